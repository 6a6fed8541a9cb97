"""The place of one rank's tensor in the whole one, found by their values.

A program of others does not say which part of a batch, a sequence or of features a rank has. A part's place is the one
at which the values agree. Places that were found are tried first from then on.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, product
from typing import NamedTuple

import torch

_MOST_TRIES = 4096
_MOST_OFFSETS = 64


class Fit(NamedTuple):
    """The best place of a part.

    Attributes:
        error: relative difference there, of all elements (Frobenius norm); of integers, the share that differs.
        indexes: of each dimension, the indices in the whole; None: all of them.
        scale: factor of the part to the whole, where one was allowed.
        expected: the whole's elements at this place, times the scale.
        rescaled: whether it would be right with another factor than gradients of this rank have.
    """

    error: float
    indexes: tuple[torch.Tensor | None, ...]
    scale: float
    expected: torch.Tensor
    rescaled: bool = False


class Alignment:
    """What is known of the places of one rank's parts."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def note(self, indexes: tuple[torch.Tensor | None, ...], whole: torch.Size) -> None:
        """Remember a place, to be tried first."""
        for index, size in zip(indexes, whole, strict=True):
            if index is not None:
                known = self._known[len(index), size]
                known[:] = [index, *(other for other in known if not torch.equal(index, other))][:8]

    def fit(self, part: torch.Tensor, whole: torch.Tensor, allowed: float, scales: bool = False) -> Fit | None:
        """Return the first place with at most the allowed error, or else the best one; None if no part fits.

        Args:
            scales: whether the part may be the whole times any factor.
        """
        if part.dim() != whole.dim() or any(s > n for s, n in zip(part.shape, whole.shape, strict=True)):
            return None
        per_dim = [
            [None] if s == n else list(self._candidates(s, n)) for s, n in zip(part.shape, whole.shape, strict=True)
        ]
        best: Fit | None = None
        for indexes in islice(product(*per_dim), _MOST_TRIES):
            expected = take(whole, indexes)
            scale = _scale(part, expected) if scales else 1.0
            expected = expected * scale if scale != 1.0 else expected
            error = error_of(part, expected)
            if best is None or error < best.error:
                best = Fit(error, indexes, scale, expected)
                if error <= allowed:
                    return best
        cut = [dim for dim, (s, n) in enumerate(zip(part.shape, whole.shape, strict=True)) if s != n]
        if best is not None and len(cut) == 1 and part.dim() > 1 and not scales:  # tokens that went to an expert, say
            find = nearest_rows if part.is_floating_point() else rows_of
            rows = find(part, whole, cut[0])
            indexes = tuple(rows if dim == cut[0] else None for dim in range(part.dim()))
            if rows is not None and (error := error_of(part, expected := take(whole, indexes))) <= allowed:
                return Fit(error, indexes, 1.0, expected)
        return best

    def _candidates(self, size: int, whole: int) -> Iterator[torch.Tensor]:
        yield from self._known[size, whole]
        for (s, n), (t, m) in product(list(self._known), repeat=2):  # two dimensions in one
            if s * t == size and n * m == whole:
                for outer, inner in product(self._known[s, n], self._known[t, m]):
                    yield (outer.unsqueeze(1) * m + inner).flatten()
        for (s, n), known in list(self._known.items()):  # one dimension in two
            if s and size % s == 0 and whole % n == 0 and size // s == whole // n > 1:
                of_each = size // s
                for index in known:
                    yield (index.unsqueeze(1) * of_each + torch.arange(of_each)).flatten()
                    yield (torch.arange(of_each).unsqueeze(1) * n + index).flatten()
        starts = (
            range(whole - size + 1) if whole - size <= _MOST_OFFSETS else {*range(0, whole - size, size), whole - size}
        )
        for start in sorted(starts, key=lambda start: (start % max(size, 1) != 0, start)):
            yield torch.arange(start, start + size)
        if size and whole % size == 0:
            for start in range(whole // size):
                yield torch.arange(start, whole, whole // size)
        if size and size % 2 == 0 and whole % (size // 2) == 0:  # two ends of a sequence (zigzag)
            half = size // 2
            for first in range(whole // size):
                last = whole // half - 1 - first
                yield torch.cat([torch.arange(x * half, (x + 1) * half) for x in (first, last)])


def nearest_rows(part: torch.Tensor, whole: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the index of the nearest row of the whole for each row of the part."""
    ours, theirs = (as_rows(x, dim).double() for x in (part, whole))
    return torch.cdist(ours, theirs).argmin(1)


def rows_of(part: torch.Tensor, whole: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the indices of a part's rows among those of the whole, by their bits; None unless each has one."""
    if part.dtype != whole.dtype:
        return None
    places: dict[bytes, list[int]] = defaultdict(list)
    for number, row in reversed(list(enumerate(bits_of_rows(whole, dim)))):
        places[row].append(number)
    found = [places[row].pop() if places[row] else None for row in bits_of_rows(part, dim)]
    return None if None in found else torch.tensor(found)


def bits_of_rows(x: torch.Tensor, dim: int) -> list[bytes]:
    """Return the bits of x[i] along a dimension, for each i."""
    rows = as_rows(x, dim).clone(memory_format=torch.contiguous_format)  # contiguous() leaves strides of columns of one
    return [row.numpy().tobytes() for row in (rows.view(torch.uint8) if rows.numel() else rows.to(torch.uint8))]


def as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [size of dim, the rest]."""
    return x.movedim(dim, 0).reshape(x.size(dim), -1)


def take(whole: torch.Tensor, indexes: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    for dim, index in enumerate(indexes):
        if index is not None:
            whole = whole.index_select(dim, index)
    return whole


def error_of(part: torch.Tensor, expected: torch.Tensor, trimmed: bool = False) -> float:
    """Return the relative difference of all elements; of integers, the share of elements that differ.

    Args:
        trimmed: leave out the 2% of elements that differ most. An optimizer that divides by the root of squared
            gradients makes of a gradient that is nothing but rounding a whole step.
    """
    if not part.numel():
        return 0.0
    if not (part.is_floating_point() and expected.is_floating_point()):
        return (part != expected).double().mean().item()
    part, expected = part.double(), expected.double()
    if not torch.equal(part.isfinite(), expected.isfinite()):
        return float("inf")
    part, expected = part.nan_to_num(posinf=0.0, neginf=0.0), expected.nan_to_num(posinf=0.0, neginf=0.0)
    differences = (part - expected).abs().flatten()
    if trimmed and len(differences) > 1:
        differences = differences.sort().values[: -max(1, len(differences) // 50)]
    size, difference = expected.norm().item(), differences.norm().item()
    return difference / size if size else float("inf") if difference else 0.0


def _scale(part: torch.Tensor, expected: torch.Tensor) -> float:
    part, expected = part.double().flatten(), expected.double().flatten()
    size = expected.dot(expected).item()
    return (part.dot(expected).item() / size if size else 1.0) or 1.0  # 0 of two roundings that have nothing in common
