"""Values between the ranks of stages: autograd functions send them on, and their gradients back.

A rank must run backward in the reverse order of forward, and run every function even if nothing uses its values. So
each function returns a token, and the next function takes it.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.comm.communicator import Communicator
from weft.comm.p2p import send_recv
from weft.context_parallel.region import SharedCall
from weft.pipeline.stage_boundary import Made, differentiable, to_send


class Send(torch.autograd.Function):
    """token = (x -> to);  backward: dx <- to, if x requires a gradient."""

    @staticmethod
    def forward(ctx, token, to, ranks, x):
        ctx.to, ctx.ranks, ctx.like = to, ranks, torch.empty_like(x, device="meta")
        ctx.device = x.device
        send_recv(ranks, [(x.contiguous(), to)], []).wait()
        return torch.zeros_like(token)

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, _):
        dx = None
        if ctx.needs_input_grad[3]:
            dx = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=ctx.device)
            send_recv(ctx.ranks, [], [(dx, ctx.to)]).wait()
        return torch.zeros(()), None, None, dx


class Receive(torch.autograd.Function):
    """token, x <- source;  backward: dx -> source, zeros if x was not used."""

    @staticmethod
    def forward(ctx, token, source, ranks, device, made):
        ctx.source, ctx.ranks, ctx.needed = source, ranks, made.requires_grad
        x = made.empty(device)
        send_recv(ranks, [], [(x, source)]).wait()
        if not made.requires_grad:
            ctx.mark_non_differentiable(x)
        return torch.zeros_like(token), x

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, _, dx):
        if ctx.needed:
            send_recv(ctx.ranks, [(dx.contiguous(), ctx.source)], []).wait()
        return torch.zeros(()), None, None, None, None


class Share(torch.autograd.Function):
    """output = the root's values, on every rank;  backward: the root's own dvalues, the token alone on the other ranks.

    Every rank computes the same loss from the same output, so the root's gradient is the gradient of every rank.
    """

    @staticmethod
    def forward(ctx, token, root, ranks, device, kinds, *values):
        outputs = [x.clone(memory_format=torch.contiguous_format) for x in values] or [
            made.empty(device) for made in kinds
        ]
        for x in outputs:
            ranks.broadcast_(x, root)
        ctx.needed = [differentiable(x) for x in values]
        ctx.mark_non_differentiable(*(x for x in outputs if not differentiable(x)))
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, *gradients):
        own = [dy if needed else None for dy, needed in zip(gradients, ctx.needed, strict=False)]
        return torch.zeros(()), None, None, None, None, *own  # own: empty on the other ranks


class Enter(torch.autograd.Function):
    """y = x, the same on every rank;  backward: dx = the sum of the ranks' dy, None if no rank used y."""

    @staticmethod
    def forward(ctx, token, ranks, *values):
        ctx.ranks, ctx.likes = ranks, [torch.empty_like(x, device="meta") for x in values]
        ctx.device = values[0].device
        ctx.set_materialize_grads(False)
        return token.clone(), *(x.clone() for x in values)

    @staticmethod
    @once_differentiable
    def backward(ctx, _, *gradients):
        used = torch.tensor([dy is not None for dy in gradients], dtype=torch.int32)
        used = ctx.ranks.all_reduce_(used.to(ctx.ranks.device_of_numbers(ctx.device)), dist.ReduceOp.MAX).tolist()
        sums: list[torch.Tensor | None] = []
        for by_some, dy, like in zip(used, gradients, ctx.likes, strict=True):
            own = torch.zeros(like.shape, dtype=like.dtype, device=ctx.device)
            sums.append(ctx.ranks.all_reduce_(own if dy is None else own.copy_(dy)) if by_some else None)
        return torch.zeros(()), None, *sums


class Transfers:
    """The transfers of one call, in the order of the token."""

    def __init__(self, ranks: Communicator, device: torch.device):
        self.ranks, self.device = ranks, device
        self._token = torch.zeros((), requires_grad=True)

    def here(self, rank: int) -> bool:
        return rank == self.ranks.rank

    def announced(self, found: Any, source: int) -> Any:
        """Return what the rank `source` has found, on every rank.

        Raises:
            Exception: `found` is one, or does not pickle. On other ranks than `source` it is of a type that they know.
        """
        box = [found]
        if self.here(source) and not _pickles(found) and not isinstance(found, Exception):
            box = [ValueError("a layer returns an object that cannot be sent to other ranks")]
        elif isinstance(found, Exception):
            known = isinstance(found, ValueError | TypeError) and _pickles(found)
            rank = self.ranks.global_ranks[source]
            box = [found if known else RuntimeError(f"on rank {rank}: {type(found).__name__}: {found}")]
        dist.broadcast_object_list(box, group=self.ranks.group, group_src=source)
        if isinstance(box[0], Exception):
            raise found if isinstance(found, Exception) else box[0]
        return box[0]

    def entered(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return these values, which every rank has alike, with the sum of all ranks' gradients in backward."""
        if not values or not torch.is_grad_enabled():
            return list(values)
        self._token, *entered = Enter.apply(self._token, self.ranks, *values)
        return entered

    def moved(self, value, made: Made, source: int, to: int, shared: SharedCall | None) -> torch.Tensor | None:
        """Send a value from the rank `source` to the rank `to`. Returns it there, and None elsewhere.

        Args:
            value: on the rank `source`.
            shared: how the sequence of the call is shared, if it is.
        """
        if self.here(source) and source != to:
            self._token = Send.apply(self._token, to, self.ranks, to_send(value))
        elif self.here(to) and source != to:
            self._token, x = Receive.apply(self._token, source, self.ranks, self.device, made)
            value = made.arrived(x, shared)
        return value if self.here(to) else None

    def shared(self, output: Any, root: int) -> Any:
        """Return the root's output, on every rank.

        Raises:
            TypeError: the output holds a value that is neither a tensor nor plain; on every rank.
        """
        leaves, structure = tree_flatten(output)
        kinds = [Made.of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        found: Any = kinds, tree_unflatten(range(len(leaves)), structure)
        for kind in kinds:
            if not isinstance(kind, Made | bool | int | float | str | None):
                found = TypeError(
                    f"LayerSplit: the model returns a {type(kind).__name__}; across ranks it can return tensors, "
                    "numbers, texts and None, and tuples, lists and dicts of these"
                )
        kinds, numbered = self.announced(found if self.here(root) else None, root)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)] if self.ranks.rank == root else []
        made = [kind for kind in kinds if isinstance(kind, Made)]
        values = iter(Share.apply(self._token, root, self.ranks, self.device, made, *tensors) if made else ())
        places, structure = tree_flatten(numbered)
        return tree_unflatten([next(values) if isinstance(kinds[k], Made) else kinds[k] for k in places], structure)


class AllHere:
    """The transfers of a process that has all stages."""

    def here(self, rank: int) -> bool:
        return True

    def announced(self, found: Any, source: int) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    def moved(self, value, *_) -> torch.Tensor:
        return value


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
