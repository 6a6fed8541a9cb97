"""Balanced cuts of a dimension over ranks, in whole units. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Stretch = tuple[int, int]  # the first element, and the one after the last


def split_sizes(n: int, world: int, unit: int = 1) -> list[int]:
    """Return the shard sizes of a dimension of n elements over `world` ranks, in rank order.

    Cuts lie at multiples of `unit` elements (for example a head of attention). The first (n/unit) % world ranks get one
    unit more than the others.

    Raises:
        ValueError: n is not a multiple of unit, or there are fewer units than ranks.

    Examples:
        >>> weft.split_sizes(10, 3)
        [4, 3, 3]
        >>> weft.split_sizes(12, 2, unit=4)
        [8, 4]
    """
    if world < 1 or unit < 1 or n < 0:
        raise ValueError(f"split_sizes(n={n}, world={world}, unit={unit}): n must be at least 0, the others at least 1")
    units, rest = divmod(n, unit)
    if rest:
        raise ValueError(f"{n} elements are not a whole number of units of {unit}: choose a unit that divides {n}")
    if units < world:
        elements = f"{n} elements" if unit == 1 else f"{n} elements in units of {unit} ({units} units)"
        raise ValueError(
            f"{elements} cannot be split over {world} ranks; every rank needs at least one. "
            f"Use a group of at most {units} ranks."
        )
    share, more = divmod(units, world)
    return [(share + (rank < more)) * unit for rank in range(world)]


@dataclass(frozen=True)
class Heads:
    """Attention heads of each rank.

    Each query head belongs to one rank. If there are more ranks than KV heads, several ranks have the same KV head.

    Attributes:
        queries: (first, count) of each rank's query heads.
        keys: the KV heads of each rank; their number divides its number of query heads.
    """

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, heads: int, kv_heads: int, world: int) -> "Heads":
        """Return the most even distribution of the heads.

        If a rank's query heads use its KV heads unequally often, the rank gets one KV head for each query head.
        """
        each = heads // kv_heads
        units, unit = (kv_heads, each) if kv_heads >= world else (heads, 1)
        share, more = divmod(units, world)
        return cls._of_counts([(share + (rank < more)) * unit for rank in range(world)], each)

    @classmethod
    def held(cls, heads: int, kv_heads: int, world: int) -> "Heads":
        """Return a distribution like `over`, in which no rank has a KV head twice.

        If `over` repeats a KV head, the ranks are divided among the KV heads first, and then the query heads of each KV
        head among its ranks. For 8 query heads with 2 KV heads, three ranks get 4, 2 and 2 query heads.

        Raises:
            ValueError: heads is not a multiple of kv_heads, or there are fewer query heads than ranks.
        """
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} query heads are not a whole number for each of {kv_heads} KV heads")
        split_sizes(heads, world)
        even = cls.over(heads, kv_heads, world)
        if all(len(set(keys)) == len(keys) for keys in even.keys):
            return even
        each = heads // kv_heads
        return cls._of_counts([n for ranks in split_sizes(world, kv_heads) for n in split_sizes(each, ranks)], each)

    @classmethod
    def _of_counts(cls, counts: Sequence[int], each: int) -> "Heads":
        queries, keys, first = [], [], 0
        for count in counts:
            used = [head // each for head in range(first, first + count)]
            distinct = sorted(set(used))
            grouped = len({used.count(head) for head in distinct}) <= 1
            queries.append((first, count))
            keys.append(tuple(distinct if grouped else used))
            first += count
        return cls(tuple(queries), tuple(keys))


@dataclass(frozen=True)
class Cut:
    """Stretches of a dimension that each rank has, one after another in its shard.

    Several ranks may have the same stretch, and a rank may have none. Two stretches are equal or do not overlap.

    Attributes:
        stretches: the stretches of each rank.
    """

    stretches: tuple[tuple[Stretch, ...], ...]

    @classmethod
    def of(cls, stretches: Sequence[Sequence[Stretch]]) -> "Cut":
        """Return the cut for stretches of ranks. Stretches that overlap between ranks are cut at each other's ends."""
        ends = {end for of_rank in stretches for stretch in of_rank for end in stretch}
        shared = sum(stop - start for of_rank in stretches for start, stop in of_rank) > max(ends, default=0)
        return cls(tuple(tuple(_pieces(of_rank, sorted(ends) if shared else [])) for of_rank in stretches))

    @classmethod
    def one_after_another(cls, sizes: Sequence[int]) -> "Cut":
        """Return the cut with one stretch per rank, in rank order."""
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        return cls(tuple(((start, start + size),) for start, size in zip(starts, sizes, strict=True)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each rank, in rank order."""
        return tuple(sum(stop - start for start, stop in of_rank) for of_rank in self.stretches)

    @cached_property
    def in_order(self) -> bool:
        """True if the ranks' shards, one after another, are the whole dimension."""
        return self == Cut.one_after_another(self.sizes)

    @cached_property
    def owner(self) -> dict[Stretch, int]:
        """First rank that has each stretch, in the order of the whole. This rank counts the stretch."""
        first: dict[Stretch, int] = {}
        for rank, of_rank in enumerate(self.stretches):
            for stretch in of_rank:
                first.setdefault(stretch, rank)
        return dict(sorted(first.items()))

    @cached_property
    def replicated(self) -> bool:
        """True if several ranks have the same stretch."""
        return sum(map(len, self.stretches)) > len(self.owner)

    def places(self, rank: int) -> dict[Stretch, Stretch]:
        """Return the place in the rank's shard of each of its stretches of the whole."""
        found, start = {}, 0
        for stretch in self.stretches[rank]:
            stop = start + stretch[1] - stretch[0]
            found[stretch] = (start, stop)
            start = stop
        return found

    def owned(self, rank: int) -> list[Stretch]:
        """Return the stretches of its shard that the rank counts, because no earlier rank has them."""
        return [place for stretch, place in self.places(rank).items() if self.owner[stretch] == rank]

    def common(self, rank: int, other: int) -> list[Stretch]:
        """Return the stretches of the rank's shard that another rank also has, in the order of the whole."""
        places, others = self.places(rank), set(self.stretches[other])
        return [places[stretch] for stretch in sorted(places) if stretch in others]


def cut_over(
    n: int,
    world: int,
    *,
    unit: int | Sequence[int] = 1,
    parts: Sequence[int] | None = None,
    heads: tuple[int, int] | None = None,
) -> Cut:
    """Return the balanced cut of a dimension of n elements over `world` ranks.

    Args:
        unit: number of elements that stay together: one for all parts, or one for each part.
        parts: sizes of the parts, one after another in the dimension (the queries, keys and values of one fused
            projection). Each part is cut by itself, and a rank gets its share of each.
        heads: (query heads, KV heads), with the size of a head as `unit`. Each part holds the queries, or the keys or
            values, of all heads; its size decides which. Every rank gets the KV heads that its query heads use.

    Raises:
        ValueError: the parts do not add up to n, or a part is no number of heads; also the errors of split_sizes.
    """
    parts = (n,) if parts is None else tuple(parts)
    units = (unit,) * len(parts) if isinstance(unit, int) else tuple(unit)
    if sum(parts) != n or min(parts, default=0) < 1:
        raise ValueError(f"parts={parts} must be sizes that add up to {n}")
    if len(units) != len(parts):
        raise ValueError(f"unit={units} must be one number, or one for each of the {len(parts)} parts")
    stretches: list[list[Stretch]] = [[] for _ in range(world)]
    begin = 0
    for size, each in zip(parts, units, strict=True):
        local = Cut.one_after_another(split_sizes(size, world, each)).stretches if heads is None else None
        for rank, found in enumerate(local or _stretches_of_heads(size, each, world, *heads)):  # type: ignore[misc]
            stretches[rank] += [(begin + start, begin + stop) for start, stop in found]
        begin += size
    return Cut.of(stretches)


def _stretches_of_heads(size: int, unit: int, world: int, heads: int, kv_heads: int) -> list[list[Stretch]]:
    chosen = Heads.held(heads, kv_heads, world)
    if size == heads * unit:
        return [[(first * unit, (first + count) * unit)] for first, count in chosen.queries]
    if size == kv_heads * unit:
        return [[(head * unit, (head + 1) * unit) for head in keys] for keys in chosen.keys]
    raise ValueError(
        f"{size} elements are neither {heads} query heads nor {kv_heads} KV heads of {unit}: give the size of a head "
        "as unit, and the parts of a fused projection as parts."
    )


def _pieces(stretches: Sequence[Stretch], ends: Sequence[int]) -> list[Stretch]:
    """Join adjacent stretches, then cut them at the ends."""
    joined: list[Stretch] = []
    for start, stop in stretches:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    pieces: list[Stretch] = []
    for start, stop in joined:
        marks = [start, *(end for end in ends if start < end < stop), stop]
        pieces += pairwise(marks)
    return pieces
