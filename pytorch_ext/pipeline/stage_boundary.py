"""The form of a value that leaves one stage for the next.

Of a sequence that ranks share, a rank sends its part. The next stage is on the same rank of "cp" and makes the shared
sequence of it again.
"""

from dataclasses import dataclass, field

import torch

from weft.context_parallel.region import SharedCall
from weft.context_parallel.shared_sequence import SequenceCut, SharedSequence, by_part, without_guards


@dataclass(frozen=True)
class Made:
    """A tensor that one stage made, as it crosses to another.

    Attributes:
        shared: of a shared sequence: its dimension; blocks and region as in SequenceCut.
    """

    shape: torch.Size
    dtype: torch.dtype
    shared: tuple[int, int, tuple[int, int] | None] | None = None
    requires_grad: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, x: torch.Tensor) -> "Made":
        """Return the kind of a tensor or shared sequence."""
        if not isinstance(x, SharedSequence):
            return cls(x.shape, x.dtype, None, x.requires_grad)
        shape, parts = list(x.shape), x.units or (x,)
        shape[x.axis] = sum(part.local.size(x.axis) for part in parts)
        needs = any(part.local.requires_grad for part in parts)
        return cls(torch.Size(shape), x.dtype, (x.axis, x.cut.blocks, x.cut.region), needs)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def arrived(self, x: torch.Tensor, call: SharedCall | None) -> torch.Tensor:
        """Return the value that `to_send` made x from."""
        if self.shared is None:
            return x
        assert call is not None
        axis, blocks, region = self.shared
        cut = SequenceCut(call.sharing, call.layout, blocks, region)
        if cut.sharing.units is None:
            return SharedSequence(x, axis, cut)
        parts = _UnitsApart.apply(axis, [part.blocks * part.mine for part in cut.of_units], x)
        units = [SharedSequence(part, axis, of_unit) for part, of_unit in zip(parts, cut.of_units, strict=True)]
        return SharedSequence.of_units(units, cut.sharing)


def differentiable(x: torch.Tensor) -> bool:
    """Return whether values of this dtype can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def cross(value: torch.Tensor) -> torch.Tensor:
    """Return what a rank sends of the value, in a form whose gradient can be sent back."""
    if isinstance(value, SharedSequence):
        return to_send(by_part(lambda part: part.like(cross(part.local)), value))
    if torch.is_grad_enabled() and differentiable(value):
        return _Crossing.apply(value, torch.zeros((), requires_grad=True))
    return value.contiguous()


def leaves_as_it_is(value) -> bool:
    """Return whether the value that `cross` took had this form already."""
    return getattr(getattr(value, "grad_fn", None), "was_contiguous", True)


def to_send(x: torch.Tensor) -> torch.Tensor:
    """Return what a rank has of a tensor. Of a shared sequence: its part, or its units one after another."""
    if not isinstance(x, SharedSequence):
        return x
    return without_guards(_UnitsTogether.apply(x.axis, *(unit.local for unit in x.units)) if x.units else x.local)


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
