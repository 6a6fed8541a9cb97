"""What a value becomes where it leaves one stage for the next."""

import torch
from torch import fx

from weft.context_parallel.shared_sequence import SharedSequence


def differentiable(x: torch.Tensor) -> bool:
    """Whether values of its type can have a gradient."""
    return x.is_floating_point() or x.is_complex()


@fx.wrap
def cross(value):
    """The value as it can be sent, and so that its gradient can be.

    Raises:
        TypeError: something else than a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"a {type(value).__name__} ({value!r}) is made in one stage and needed in a later one; only tensors are "
            "sent. Compute it in the layer that needs it, or cut elsewhere (balance=[...])"
        )
    if isinstance(value, SharedSequence):
        return value.like(cross(value.local))
    if torch.is_grad_enabled() and differentiable(value):
        return _Crossing.apply(value, torch.zeros((), requires_grad=True))
    return value.contiguous()


class _Crossing(torch.autograd.Function):
    """y = x, in its own memory; backward  dx = dy, which is contiguous as it was sent.

    y is no view, since torch's split backward detaches stage outputs in place. It requires a gradient even where x does
    not: that backward finds the weights of a stage between its outputs and inputs, and would drop the gradients of all
    where no input requires one (a frozen embedding in the stage before).
    """

    @staticmethod
    def forward(ctx, x, anchor):
        ctx.needed = x.requires_grad
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, dy):
        return dy if ctx.needed else None, None
