"""A chain of layers on ranks, one whole batch at a time: autograd functions send activations on and gradients back.

A rank must run backward in the reverse order of forward, and run every function even if nothing uses its activations.
So each function returns a token, and the next function takes it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.comm.communicator import Communicator
from weft.pipeline.layer_split_broadcast import Elsewhere, Enter
from weft.pipeline.stage import Stage
from weft.pipeline.stage_boundary import differentiable

_PLAIN = (bool, int, float, str, type(None))  # types that cross ranks, in addition to tensors


class Send(torch.autograd.Function):
    """token = (values -> to);  backward: dvalues <- to. Values that are not floating point have no gradient."""

    @staticmethod
    def forward(ctx, token, to, ranks, *values):
        ctx.to, ctx.ranks = to, ranks
        ctx.likes = [torch.empty_like(x, device="meta", memory_format=torch.contiguous_format) for x in values]
        ctx.device = values[0].device
        for x in values:
            dist.send(x.contiguous(), group=ranks.group, group_dst=to)
        return torch.zeros_like(token)

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, _):
        gradients: list[torch.Tensor | None] = []
        for number, like in enumerate(ctx.likes):
            if not differentiable(like):
                gradients.append(None)
                continue
            gradient = torch.empty(like.shape, dtype=like.dtype, device=ctx.device)
            dist.recv(gradient, group=ctx.ranks.group, group_src=ctx.to)
            gradients.append(gradient if ctx.needs_input_grad[3 + number] else None)
        return torch.zeros(()), None, None, *gradients


class Receive(torch.autograd.Function):
    """token, values <- source;  backward: dvalues -> source, zeros for unused values."""

    @staticmethod
    def forward(ctx, token, source, ranks, device, kinds):
        ctx.source, ctx.ranks = source, ranks
        values = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
        for x in values:
            dist.recv(x, group=ranks.group, group_src=source)
        ctx.mark_non_differentiable(*(x for x in values if not differentiable(x)))
        ctx.differentiable = [differentiable(x) for x in values]
        return torch.zeros_like(token), *values

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, _, *gradients):
        for gradient, needed in zip(gradients, ctx.differentiable, strict=True):
            if needed:
                dist.send(gradient.contiguous(), group=ctx.ranks.group, group_dst=ctx.source)
        return torch.zeros(()), None, None, None, None


class Share(torch.autograd.Function):
    """output = the root's values, on every rank;  backward: the root's own dvalues, the token alone on the other ranks.

    Every rank computes the same loss from the same output, so the root's gradient is the gradient of every rank.
    """

    @staticmethod
    def forward(ctx, token, root, ranks, device, kinds, *values):
        ctx.differentiable = [differentiable(x) for x in values]
        outputs = [x.clone() for x in values] or [
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds
        ]
        for x in outputs:
            ranks.broadcast_(x, root)
        ctx.mark_non_differentiable(*(x for x in outputs if not differentiable(x)))
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # the gradients that travel back have no graph
    def backward(ctx, *gradients):
        own = [dy if needed else None for dy, needed in zip(gradients, ctx.differentiable, strict=False)]
        return torch.zeros(()), None, None, None, None, *own  # own: empty on the other ranks


def run(segments: Sequence[tuple[int, Stage | None]], values: Sequence, ranks: Communicator, device: torch.device):
    """Run the segments one after another.

    Args:
        segments: (rank, stage) each; the stage is None if it is on another rank.

    Returns:
        The whole output, on every rank.
    """
    token, values = _entered(torch.zeros((), requires_grad=True), values, segments[0][0], ranks, device)
    output = None
    for number, (owner, segment) in enumerate(segments):
        if owner != ranks.rank:
            continue
        assert segment is not None
        if number > 0:
            before = segments[number - 1][0]
            box: list = [None]
            dist.recv_object_list(box, group=ranks.group, group_src=before)
            kinds, segment.arriving = box[0]
            token, *values = Receive.apply(token, before, ranks, device, kinds)
        output = segment(*values)
        values = output if isinstance(output, tuple) else (output,)
        if number + 1 < len(segments):
            after = segments[number + 1][0]
            header = [(x.shape, x.dtype) for x in values], segment.leaving
            dist.send_object_list([header], group=ranks.group, group_dst=after)
            token = Send.apply(token, after, ranks, *values)
    return _shared(token, output, segments[-1][0], ranks, device)


def _entered(token: torch.Tensor, values: Sequence, owner: int, ranks: Communicator, device: torch.device):
    """Return the inputs, with a backward that gives every rank their gradient.

    The first stage's rank alone uses the inputs. On every rank they may come from its own parameters, or from another
    model that is split.
    """
    needing = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
    if not needing or not torch.is_grad_enabled():
        return token, values
    if owner != ranks.rank:
        (token,) = Elsewhere.apply(token, owner, ranks, device, [], *needing)
        return token, values
    token, *entered = Enter.apply(token, owner, ranks, *needing)
    later = iter(x.clone() for x in entered)  # a layer may change its input in place, which a view of several forbids
    return token, [next(later) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in values]


def _shared(token: torch.Tensor, output, root: int, ranks: Communicator, device: torch.device):
    """Return the root's whole output, on every rank.

    Raises:
        TypeError: the output holds a value that is neither a tensor nor plain; on every rank.
    """
    leaves, structure = tree_flatten(output) if root == ranks.rank else ([], None)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    others = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]
    strange = [type(x).__name__ for (x,) in filter(None, others) if not isinstance(x, _PLAIN)]
    kinds = [(x.shape, x.dtype) for x in tensors]
    description = (strange, None, None, None) if strange else ([], kinds, others, structure)
    strange, kinds, others, structure = ranks.all_gather_object(description)[root]
    if strange:
        raise TypeError(
            f"LayerSplit: the model returns a {strange[0]}; across ranks it can return tensors, numbers, texts and "
            "None, and tuples, lists and dicts of these"
        )
    shared = iter(Share.apply(token, root, ranks, device, kinds, *tensors) if kinds else ())
    return tree_unflatten([next(shared) if other is None else other[0] for other in others], structure)
