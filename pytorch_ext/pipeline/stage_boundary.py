"""The form of a value that leaves one stage for the next."""

import torch
from torch import fx

from weft.context_parallel.shared_sequence import SequenceCut, SharedSequence, by_part


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
        return by_part(lambda part: part.like(cross(part.local, fixed)), value)
    fixed = fixed and value.is_contiguous() and not value.requires_grad
    if torch.is_grad_enabled() and differentiable(value) and not fixed:
        return _Crossing.apply(value, torch.zeros((), requires_grad=True))
    return value.contiguous()


def leaves_as_it_is(value) -> bool:
    """Return whether the value that `cross` took had this form already."""
    return getattr(getattr(value, "grad_fn", None), "was_contiguous", True)


def to_send(x: SharedSequence) -> torch.Tensor:
    """Return what a rank has of a shared sequence: its part, or its units one after another."""
    return _UnitsTogether.apply(x.axis, *(unit.local for unit in x.units)) if x.units else x.local


def received(x: torch.Tensor, axis: int, cut: SequenceCut) -> SharedSequence:
    """Return the shared sequence that `to_send` made x from."""
    if cut.sharing.units is None:
        return SharedSequence(x, axis, cut)
    parts = _UnitsApart.apply(axis, [part.blocks * part.mine for part in cut.of_units], x)
    units = [SharedSequence(part, axis, of_unit) for part, of_unit in zip(parts, cut.of_units, strict=True)]
    return SharedSequence.of_units(units, cut.sharing)


class _UnitsTogether(torch.autograd.Function):
    """y = the units one after another; backward  dx_unit = its part of dy, in its own memory."""

    @staticmethod
    def forward(ctx, axis, *parts):
        ctx.axis, ctx.sizes = axis, [part.size(axis) for part in parts]
        ctx.was_contiguous = all(map(leaves_as_it_is, parts))
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx, dy):
        return None, *(part.contiguous() for part in dy.split(ctx.sizes, ctx.axis))


class _UnitsApart(torch.autograd.Function):
    """y_unit = its part of x, in its own memory; backward  dx = the units' dy one after another."""

    @staticmethod
    def forward(ctx, axis, sizes, x):
        ctx.axis = axis
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in x.split(sizes, axis))

    @staticmethod
    def backward(ctx, *dys):
        together = torch.cat(dys, ctx.axis)
        if not all(dy.is_contiguous() for dy in dys):
            together = together.transpose(0, -1).contiguous().transpose(0, -1)  # as they are, so that it can be seen
        return None, None, together


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
