"""The form of a value that leaves one stage for the next."""

import torch
from torch import fx

from weft.context_parallel.shared_sequence import SharedSequence


def differentiable(x: torch.Tensor) -> bool:
    """Return whether values of this dtype can have a gradient."""
    return x.is_floating_point() or x.is_complex()


@fx.wrap
def cross(value, fixed: bool = False):
    """Return the value in a form that can be sent, and whose gradient can be sent back.

    Args:
        fixed: whether the value depends on no parameter. Then it needs no gradient, unless an input needs one.

    Raises:
        TypeError: the value is not a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"a {type(value).__name__} ({value!r}) is made in one stage and needed in a later one; only tensors are "
            "sent. Compute it in the layer that needs it, or cut elsewhere (balance=[...])"
        )
    if isinstance(value, SharedSequence):
        return value.like(cross(value.local, fixed))
    fixed = fixed and value.is_contiguous() and not value.requires_grad
    if torch.is_grad_enabled() and differentiable(value) and not fixed:
        return _Crossing.apply(value, torch.zeros((), requires_grad=True))
    return value.contiguous()


def leaves_as_it_is(value) -> bool:
    """Return whether the value that `cross` took had this form already."""
    return getattr(getattr(value, "grad_fn", None), "was_contiguous", True)


class _Crossing(torch.autograd.Function):
    """y = x, in its own memory; backward  dx = dy, which is contiguous as it was sent.

    y is no view, since torch's split backward detaches stage outputs in place. y requires a gradient even if x does
    not: torch's split backward searches for the weights of a stage between its outputs and inputs. If no input requires
    a gradient (a frozen embedding in the stage before), it would drop the gradients of all weights.
    """

    @staticmethod
    def forward(ctx, x, anchor):
        ctx.needed, ctx.was_contiguous = x.requires_grad, x.is_contiguous()
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, dy):
        return dy if ctx.needed else None, None
