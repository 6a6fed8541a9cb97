"""How a dimension is cut over ranks: balanced, in whole units. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Stretch = tuple[int, int]  # the first element, and the one after the last


def split_sizes(n: int, world: int, unit: int = 1) -> list[int]:
    """Sizes of the shards of a dimension of n elements over `world` ranks, in rank order.

    The dimension is cut at multiples of `unit` (a head of attention, say); of its n/unit units, the first
    (n/unit) % world ranks get one more than the others.

    Raises:
        ValueError: n is not a multiple of unit, or there are fewer units than ranks.
    """
    if world < 1 or unit < 1 or n < 0:
        raise ValueError(f"split_sizes(n={n}, world={world}, unit={unit}): n must be at least 0, the others at least 1")
    units, rest = divmod(n, unit)
    if rest:
        raise ValueError(f"{n} elements are no whole number of units of {unit}: choose a unit that divides {n}")
    if units < world:
        what = f"{n} elements" if unit == 1 else f"{n} elements in units of {unit} ({units} units)"
        raise ValueError(
            f"{what} cannot be split over {world} ranks; every rank needs at least one. "
            f"Use a group of at most {units} ranks."
        )
    share, more = divmod(units, world)
    return [(share + (rank < more)) * unit for rank in range(world)]


@dataclass(frozen=True)
class Heads:
    """Which heads of attention each rank computes. Query heads go to one rank each; where ranks outnumber KV heads,
    several have the same KV head.

    Attributes:
        queries: (first, count) of each rank.
        keys: the KV heads of each rank, as many as divide its query heads.
    """

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, heads: int, kv_heads: int, world: int) -> "Heads":
        """As even as can be. A rank whose query heads use its KV heads unequally often gets a KV head for each."""
        each = heads // kv_heads
        units, unit = (kv_heads, each) if kv_heads >= world else (heads, 1)
        share, more = divmod(units, world)
        return cls._of_counts([(share + (rank < more)) * unit for rank in range(world)], each)

    @classmethod
    def held(cls, heads: int, kv_heads: int, world: int) -> "Heads":
        """As `over`, but no rank has a KV head twice: where it would, the ranks are shared out to the KV heads first,
        and each one's query heads to its ranks. Of 8 query heads with 2 KV heads, three ranks get 4, 2 and 2.

        Raises:
            ValueError: no whole number of query heads for each KV head, or fewer query heads than ranks.
        """
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} query heads are no whole number for each of {kv_heads} KV heads")
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
    """Which stretches of a dimension each rank has, one after another in its shard.

    Several ranks may have the same stretch, and a rank may have none. Two stretches are the same or do not touch.

    Attributes:
        stretches: of each rank.
    """

    stretches: tuple[tuple[Stretch, ...], ...]

    @classmethod
    def of(cls, stretches: Sequence[Sequence[Stretch]]) -> "Cut":
        """Of stretches that may overlap between ranks: those are cut at each other's ends."""
        ends = {end for of_rank in stretches for stretch in of_rank for end in stretch}
        shared = sum(stop - start for of_rank in stretches for start, stop in of_rank) > max(ends, default=0)
        return cls(tuple(tuple(_pieces(of_rank, sorted(ends) if shared else [])) for of_rank in stretches))

    @classmethod
    def one_after_another(cls, sizes: Sequence[int]) -> "Cut":
        """Each rank has one stretch, in rank order."""
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        return cls(tuple(((start, start + size),) for start, size in zip(starts, sizes, strict=True)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Every rank's elements, in rank order."""
        return tuple(sum(stop - start for start, stop in of_rank) for of_rank in self.stretches)

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' shards one after another are the whole."""
        return self == Cut.one_after_another(self.sizes)

    @cached_property
    def owner(self) -> dict[Stretch, int]:
        """The first rank that has a stretch, which counts it; in the order of the whole."""
        first: dict[Stretch, int] = {}
        for rank, of_rank in enumerate(self.stretches):
            for stretch in of_rank:
                first.setdefault(stretch, rank)
        return dict(sorted(first.items()))

    @cached_property
    def replicated(self) -> bool:
        """Whether several ranks have the same stretch."""
        return sum(map(len, self.stretches)) > len(self.owner)

    def places(self, rank: int) -> dict[Stretch, Stretch]:
        """Where the rank's stretches of the whole lie in its shard."""
        found, start = {}, 0
        for stretch in self.stretches[rank]:
            stop = start + stretch[1] - stretch[0]
            found[stretch] = (start, stop)
            start = stop
        return found

    def owned(self, rank: int) -> list[Stretch]:
        """The stretches of its shard that the rank counts: no rank before has them."""
        return [place for stretch, place in self.places(rank).items() if self.owner[stretch] == rank]

    def common(self, rank: int, other: int) -> list[Stretch]:
        """The stretches of the rank's shard that another has as well, in the order of the whole."""
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
    """The balanced cut of a dimension of n elements.

    Args:
        unit: what stays together; with several parts, of each or one of all.
        parts: sizes of what lies one after another in the dimension and is cut each by itself (the queries, keys and
            values of one fused projection): a rank gets its share of each.
        heads: (query heads, KV heads), with the size of a head as `unit`: each part is the queries, or keys or values,
            of all heads, told by its size, and is cut so that every rank has the KV heads that its query heads use.

    Raises:
        ValueError: parts that do not add up, a part that is no number of heads; what split_sizes raises.
    """
    parts = (n,) if parts is None else tuple(parts)
    units = (unit,) * len(parts) if isinstance(unit, int) else tuple(unit)
    if sum(parts) != n or min(parts, default=0) < 1:
        raise ValueError(f"parts={parts} must be sizes that add up to {n}")
    if len(units) != len(parts):
        raise ValueError(f"unit={units} must be one number, or one for each of the {len(parts)} parts")
    stretches: list[list[Stretch]] = [[] for _ in range(world)]
    begin = 0
    for size, one in zip(parts, units, strict=True):
        local = Cut.one_after_another(split_sizes(size, world, one)).stretches if heads is None else None
        for rank, found in enumerate(local or _stretches_of_heads(size, one, world, *heads)):  # type: ignore[misc]
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
        "as unit"
    )


def _pieces(stretches: Sequence[Stretch], ends: Sequence[int]) -> list[Stretch]:
    """The stretches without their seams, cut at these ends."""
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
