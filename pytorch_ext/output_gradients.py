"""Check of the gradients that reach a model's outputs: the ranks that compute one model must compute one loss.

The ranks see equal arguments (replicas.SameCalls), and targets meet the outputs outside of the model. Other targets on
a rank, or a loss over this rank's part of the classes, keep every shape right and train another model.
"""

import warnings
from functools import partial

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.context_parallel.region import FIRST_CALLS
from weft.forward import remove_hooks
from weft.invariant.unit_outputs import tensors_of

_ALIKE = 1e-3  # of the norm: a GPU may add up a loss's gradient in any order


class SameLoss:
    """Forward hook that compares the gradients of a model's outputs over its ranks, in its first calls.

    Args:
        split: the ranks that split the layers; None if there are none.
        shared: the ranks that share the sequence and return whole outputs; None if there are none.
        checks: as in `weft.parallelize`.
    """

    def __init__(self, split: Communicator | None, shared: Communicator | None, checks: str):
        self.split, self.shared, self.checks = split, shared, checks
        self.left = FIRST_CALLS

    def install(self, model: nn.Module) -> None:
        if (self.split or self.shared) and self.checks != "off":
            model.register_forward_hook(self)

    def __deepcopy__(self, memo):
        return SameLoss(self.split, self.shared, self.checks)

    def __call__(self, module: nn.Module, args, output) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self.left <= 0 and self.checks == "first":
            if self.shared is None:  # where a sequence is shared, calls would be learnt anew for other hooks
                remove_hooks(module, self)
            return
        self.left -= 1
        for x in tensors_of(output):
            if type(x) is torch.Tensor and x.grad_fn is not None and x.numel() and x.is_floating_point():
                x.register_hook(partial(self._compare, type(module).__name__, _look(x)))

    @torch.no_grad()
    def _compare(self, name: str, seen: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        own = (seen.tolist(), _look(gradient).tolist(), _sums_to_zero(gradient), tuple(gradient.shape))
        for ranks in filter(None, (self.split, self.shared)):
            outputs, gradients, to_zero, shapes = zip(*ranks.all_gather_object(own), strict=True)
            if len(set(shapes)) > 1 or any(not _alike(outputs[0], x) for x in outputs):
                if ranks == self.split and all(to_zero):
                    raise ValueError(
                        f"{name} returns {own[3][-1]} features on this rank, a part of its last dimension, and the "
                        "loss took them for all: use weft.parallel_cross_entropy, or let the last layer return all of "
                        'them, {"style": "column", "gather_output": True}'
                    )
                continue
            for rank, other in zip(ranks.global_ranks, gradients, strict=True):
                if not _alike(gradients[0], other):
                    text = (
                        f"{name}: ranks {ranks.global_ranks[0]} and {rank}, which compute one model together, gave its "
                        "output different gradients: compute the same loss on both, with the same targets"
                    )
                    if ranks == self.split:
                        raise ValueError(text)
                    warnings.warn(text, stacklevel=2)
                    break


def _look(x: torch.Tensor) -> torch.Tensor:
    """Return [2] fp64: a projection of x, and its norm."""
    matrix = x.detach().reshape(-1, x.size(-1)) if x.dim() else x.detach().reshape(1, 1)
    rows, columns = (torch.arange(size, device=x.device).mul(12.9898).sin_() for size in matrix.shape)
    projection = (matrix @ columns.to(x.dtype)).double() @ rows.double()
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.stack([projection, torch.linalg.vector_norm(matrix, dtype=wide).double()])


def _alike(one: list[float], other: list[float]) -> bool:
    """Return whether two looks are of the same tensor; infinities, which a loss scale may make, are not compared."""
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
    return not apart > _ALIKE * max(one[1], other[1])


def _sums_to_zero(gradient: torch.Tensor) -> bool:
    """Return whether each row sums to zero, as a softmax over it makes it do."""
    if not gradient.dim():
        return False
    wide = torch.promote_types(gradient.dtype, torch.float32)
    sizes = torch.linalg.vector_norm(gradient, 1, dim=-1, dtype=wide)
    sums = gradient.sum(-1, dtype=wide).abs()
    rounding = 1e-4 if torch.finfo(gradient.dtype).bits > 16 else 2e-2
    return bool(sizes.any()) and bool((sums <= rounding * sizes).all())
