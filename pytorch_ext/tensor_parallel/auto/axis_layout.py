"""Which dimension of a tensor is split with the features of a layer, through views and permutations."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import gcd, prod


class ConflictError(Exception):
    """What is computed of a tensor whose features are split needs all of them.

    Attributes:
        axes: besides those of the tensors that it is computed of.
    """

    def __init__(self, message: str, axes: "Iterable[Axis]" = ()):
        super().__init__(message)
        self.axes = tuple(axes)


@dataclass(eq=False)
class Axis:
    """Output features of a layer, start to stop, that are cut into units, the same number for all that meet.

    Attributes:
        units: the number of units divides it.
        pieces: the parts of it that are used apart (queries, keys and values of a fused projection).
        apart: whether the pieces lie side by side under a dimension of their own, [pieces, ...], not one after another.
        used: whether it was used as one.
        lone: whether a dimension of size 1 was taken from it by a view, and might be the one that is split.
        summed: parameters that meet it whole, whose gradients are sums over the ranks.
    """

    layer: str
    start: int
    stop: int
    units: int = 0
    pieces: dict[tuple[int, int], "Axis"] = field(default_factory=dict)
    apart: bool = False
    used: bool = False
    lone: bool = False
    summed: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.units = self.units or self.size

    @property
    def size(self) -> int:
        return self.stop - self.start

    def piece(self, start: int, stop: int, apart: bool) -> "Axis":
        """The features start to stop, counted from this axis' first."""
        if (start, stop) == (0, self.size):
            return self
        if self.pieces and self.apart != apart:
            raise ConflictError("the layer's output is taken apart in two ways")
        self.apart = apart
        return self.pieces.setdefault((start, stop), Axis(self.layer, self.start + start, self.start + stop))

    def leaves(self) -> list["Axis"]:
        """The parts that are not taken apart further, in order; ValueError where they do not make up the whole."""
        if not self.pieces:
            return [self]
        ends = [0]
        for start, stop in sorted(self.pieces):
            if start != ends[-1]:
                raise ValueError("parts of the layer's output overlap or are not used")
            ends.append(stop)
        if ends[-1] != self.size or self.used:
            raise ValueError("parts of the layer's output are used, and not all of it or all of it as well")
        return [leaf for key in sorted(self.pieces) for leaf in self.pieces[key].leaves()]


@dataclass(frozen=True)
class AxisLayout:
    """Of a tensor: dimension `dim`, of size before x extent, whose second factor runs along the units of an axis.

    Attributes:
        units: the number of units divides it: what views did so far.
        copies: so many neighbours within a unit are the same (a KV head, for each of the query heads that use it).
        minor: (dimension, size) of what the axis was viewed into after `dim`, where dim and these are all of it.
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
        """With dimensions renumbered."""
        minor = tuple((to(dim), size) for dim, size in self.minor)
        return replace(self, dim=to(self.dim), minor=minor, constant=frozenset(map(to, self.constant)))

    @property
    def raw(self) -> bool:
        """Whether the dimension is the axis as it left the layer."""
        return self.before == 1 and self.extent == self.axis.size and not self.minor and self.copies == 1

    def use(self) -> "AxisLayout":
        """The axis as one is what is computed with."""
        self.axis.used = True
        self.axis.units = gcd(self.axis.units, self.units)
        return self


def viewed(layout: AxisLayout, old: tuple[int, ...], new: tuple[int, ...], lone: bool) -> AxisLayout:
    """After a view of a tensor of shape `old` as `new`.

    Args:
        lone: where a dimension of size 1 stands before the one that continues the axis, that is the one.
    """
    prefix, whole = prod(old[: layout.dim]) * layout.before, layout.extent
    together = layout.before == 1 and _consecutive(layout)
    if together:
        whole *= prod(size for _, size in layout.minor)
    dim, before, size = _boundary(new, prefix, lone, layout.axis)
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


def _boundary(new, prefix: int, lone: bool, axis: Axis) -> tuple[int, int, int]:
    """The dimension within which, or at whose begin, so many elements have passed: (it, what of it is before, size)."""
    passed = 1
    for dim, size in enumerate(new):
        if passed * size > prefix or (passed == prefix and size == 1 and _ends_here(new, dim)):
            if prefix % passed:
                break
            first = dim
            while first > 0 and passed == prefix and new[first - 1] == 1:
                first -= 1
            if first < dim and new[dim] > 1 and first > 0:
                axis.lone = True
                if lone:
                    return dim - 1, 1, 1
            return dim, prefix // passed, size
        passed *= size
    raise ConflictError("a view cuts through its features")


def _ends_here(new, dim: int) -> bool:
    return all(size == 1 for size in new[dim:])


def _consecutive(layout: AxisLayout) -> bool:
    return [dim for dim, _ in layout.minor] == [layout.dim + 1 + i for i in range(len(layout.minor))]


def _minor(new, dim: int, whole: int) -> tuple[tuple[int, int], ...]:
    """The dimensions after `dim` that together with it hold `whole` elements, if there are such."""
    held, found = new[dim], []
    for later in range(dim + 1, len(new)):
        if held >= whole:
            break
        held *= new[later]
        found.append((later, new[later]))
    return tuple(found) if held == whole else ()
