"""Layouts: the dimension of a tensor that is split with a layer's features, through views and permutations."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import gcd, prod


class ConflictError(Exception):
    """Conflict: an operation on a tensor with split features needs all of them.

    Attributes:
        axes: axes in conflict, in addition to those of the operation's inputs.
    """

    def __init__(self, message: str, axes: "Iterable[Axis]" = ()):
        super().__init__(message)
        self.axes = tuple(axes)


@dataclass(eq=False)
class Axis:
    """Output features `start` to `stop` of a layer, cut into units. Axes that meet have the same number of units.

    Attributes:
        units: a multiple of the number of units.
        pieces: the parts of the axis that are used separately (queries, keys and values of a fused projection).
        apart: the pieces lie along a dimension of their own, [pieces, ...], instead of one after another.
        used: the axis was also used as a whole.
        ambiguous: a view dropped a dimension of size 1 that may have been split.
        summed: whole parameters that meet the axis. Their gradients are summed over the ranks.
    """

    layer: str
    start: int
    stop: int
    units: int = 0
    pieces: dict[tuple[int, int], "Axis"] = field(default_factory=dict)
    apart: bool = False
    used: bool = False
    ambiguous: bool = False
    summed: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.units = self.units or self.size

    @property
    def size(self) -> int:
        return self.stop - self.start

    def piece(self, start: int, stop: int, apart: bool) -> "Axis":
        """Return the axis of the features start to stop, counted from this axis' first feature."""
        if (start, stop) == (0, self.size):
            return self
        if self.pieces and self.apart != apart:
            raise ConflictError("the layer's output is taken apart in two ways")
        self.apart = apart
        return self.pieces.setdefault((start, stop), Axis(self.layer, self.start + start, self.start + stop))

    def leaves(self) -> list["Axis"]:
        """Return the parts that are not divided further, in order.

        Raises:
            ValueError: the parts do not make up the whole axis.
        """
        if not self.pieces:
            return [self]
        ends = [0]
        for start, stop in sorted(self.pieces):
            if start != ends[-1]:
                raise ValueError("parts of the layer's output overlap or are not used")
            ends.append(stop)
        if ends[-1] != self.size or self.used:
            raise ValueError("its features are taken apart, and some are not used, or it is also used undivided")
        return [leaf for key in sorted(self.pieces) for leaf in self.pieces[key].leaves()]


@dataclass(frozen=True)
class AxisLayout:
    """Place of an axis in a tensor. Dimension `dim` has size before x extent; the extent runs along the axis' units.

    Attributes:
        units: a multiple of the number of units, after all views so far.
        copies: number of equal neighbours within a unit (a KV head, repeated for each query head that uses it).
        minor: (dimension, size) of the dimensions after `dim` that a view made of the axis, if `dim` and these
            together are the whole axis.
        constant: dimensions along which the tensor was expanded.
    """

    dim: int
    before: int
    extent: int
    axis: Axis
    units: int
    copies: int = 1
    minor: tuple[tuple[int, int], ...] = ()
    constant: frozenset[int] = frozenset()

    def moved(self, to: Callable[[int], int]) -> "AxisLayout":
        """Return the layout with renumbered dimensions."""
        minor = tuple((to(dim), size) for dim, size in self.minor)
        return replace(self, dim=to(self.dim), minor=minor, constant=frozenset(map(to, self.constant)))

    @property
    def raw(self) -> bool:
        """True if the dimension is the axis exactly as the layer returned it."""
        return self.before == 1 and self.extent == self.axis.size and not self.minor and self.copies == 1

    def use(self) -> "AxisLayout":
        """Record that an operation uses the axis as a whole; return the layout."""
        self.axis.used = True
        self.axis.units = gcd(self.axis.units, self.units)
        return self


def viewed(layout: AxisLayout, old: tuple[int, ...], new: tuple[int, ...], first: bool) -> AxisLayout:
    """Return the layout after a view of a tensor of shape `old` as `new`.

    Args:
        first: if a dimension of size 1 stands before the one that continues the axis, take the dimension of size 1.
    """
    prefix, whole = prod(old[: layout.dim]) * layout.before, layout.extent
    together = layout.before == 1 and _consecutive(layout)
    if together:
        whole *= prod(size for _, size in layout.minor)
    dim, before, size = _boundary(new, prefix, first, layout.axis)
    extent = size // before
    if extent * before != size or (extent % layout.extent and layout.extent % extent):
        raise ConflictError("a view cuts through its features")
    copies = layout.copies
    if extent > layout.extent and layout.dim + 1 in layout.constant:
        copies *= old[layout.dim + 1]
        if extent % (layout.extent * old[layout.dim + 1]):
            raise ConflictError("a view cuts through copies of its features")
    if copies > 1 and extent % copies:
        raise ConflictError("a view cuts through copies of its features")
    units = gcd(layout.units, extent // copies)
    minor = _minor(new, dim, whole) if together and before == 1 else ()
    return AxisLayout(dim, before, extent, layout.axis, units, copies, minor)


def _boundary(new, prefix: int, first: bool, axis: Axis) -> tuple[int, int, int]:
    """Return the dimension of `new` at which, or within which, the product of the leading sizes is `prefix`.

    Returns:
        (dimension, factor of its size before the boundary, its size).
    """
    passed = 1
    for dim, size in enumerate(new):
        if passed * size > prefix or (passed == prefix and size == 1 and _ends_here(new, dim)):
            if prefix % passed:
                break
            start = dim
            while start > 0 and passed == prefix and new[start - 1] == 1:
                start -= 1
            if start < dim and new[dim] > 1 and start > 0:
                axis.ambiguous = True
                if first:
                    return dim - 1, 1, 1
            return dim, prefix // passed, size
        passed *= size
    raise ConflictError("a view cuts through its features")


def _ends_here(new, dim: int) -> bool:
    return all(size == 1 for size in new[dim:])


def _consecutive(layout: AxisLayout) -> bool:
    return [dim for dim, _ in layout.minor] == [layout.dim + 1 + i for i in range(len(layout.minor))]


def _minor(new, dim: int, whole: int) -> tuple[tuple[int, int], ...]:
    """Return the dimensions after `dim` that together with it hold `whole` elements; () if there are none."""
    held, found = new[dim], []
    for later in range(dim + 1, len(new)):
        if held >= whole:
            break
        held *= new[later]
        found.append((later, new[later]))
    return tuple(found) if held == whole else ()
