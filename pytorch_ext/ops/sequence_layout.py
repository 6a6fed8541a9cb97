"""Layouts of a sequence over the ranks: the positions of each rank, and sharding and gathering by them.

    contiguous    rank r of W has piece r of W
    zigzag        rank r has pieces r and 2W - 1 - r of 2W: an early and a late one, so that under a causal mask all
                  ranks have the same work (Llama 3: Grattafiori et al. 2024, section 3.3.2)

Pieces are as equal as the length permits. Every length works, without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from weft.arguments import check_choice
from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.kernels.attention_rules import Positions
from weft.ops.backward import RankFunction, first_order

LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of `length` positions over `world_size` ranks.

    Attributes:
        kind: "zigzag" or "contiguous".
        members: the ranks that the properties and methods below cover; all ranks if empty.

    Raises:
        ValueError: a kind that does not exist.
    """

    length: int
    world_size: int
    kind: str = "zigzag"
    members: tuple[int, ...] = ()

    def __post_init__(self):
        check_choice("layout", self.kind, LAYOUTS)

    def among(self, members: Sequence[int]) -> "SequenceLayout":
        return replace(self, members=tuple(members))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.members or tuple(range(self.world_size))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of positions of each of the ranks."""
        return [sum(length for _, length in _runs(self, (rank,))) for rank in self.ranks]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(start, length) of each run of consecutive positions that the ranks have together, in order."""
        return _runs(self, self.ranks)

    @property
    def positions(self) -> Positions:
        """The runs for the kernels, which take at most two."""
        if len(self.runs) > 2:
            raise ValueError(f"ranks {self.ranks} have {len(self.runs)} runs of positions; the kernels take two")
        return Positions(*[number for run in [*self.runs, (0, 0), (0, 0)][:2] for number in run])

    def pick(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return the rank's part of a tensor that has every position along `dim`."""
        parts = [whole.narrow(dim, start, length) for start, length in _runs(self, (rank,))]
        return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Concatenate the ranks' parts, with positions in order."""
        pieces = []
        for rank, part in zip(self.ranks, parts, strict=True):
            runs = _runs(self, (rank,))
            cut = part.split([length for _, length in runs], dim) if runs else ()
            pieces += [(start, piece) for (start, _), piece in zip(runs, cut, strict=True)]
        pieces.sort(key=lambda pair: pair[0])
        return torch.cat([piece for _, piece in pieces], dim) if pieces else parts[0]

    def cut(self, joined: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Cut a joined tensor into each rank's part; the reverse of `join`."""
        places, offset = [], 0
        for start, length in self.runs:
            places.append((start, length, offset))
            offset += length

        def within(start: int) -> int:
            return next(there + start - first for first, length, there in places if first <= start < first + length)

        return [
            torch.cat([joined.narrow(dim, within(s), n) for s, n in runs], dim) if runs else joined.narrow(dim, 0, 0)
            for runs in (_runs(self, (rank,)) for rank in self.ranks)
        ]


@lru_cache(maxsize=4096)
def _runs(layout: SequenceLayout, ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    count = layout.world_size * (2 if layout.kind == "zigzag" else 1)
    share, more = divmod(layout.length, count)
    sizes = [share + (piece < more) for piece in range(count)]
    pieces = [p for rank in ranks for p in {rank, *([count - 1 - rank] if layout.kind == "zigzag" else [])}]
    runs: list[tuple[int, int]] = []
    for piece in sorted(pieces):
        start, length = sum(sizes[:piece]), sizes[piece]
        if length and runs and sum(runs[-1]) == start:
            runs[-1] = runs[-1][0], runs[-1][1] + length
        elif length:
            runs.append((start, length))
    return runs


def shard_sequence(x: torch.Tensor, *, dim: int, group: Group = None, layout: str = "zigzag") -> torch.Tensor:
    """Return this rank's part, along the sequence, of a tensor that every rank has whole. Backward gathers.

    Shard the tokens, the labels and `torch.arange(length)` alike; rotary embeddings need the last.

    Args:
        dim: the dimension of x that is the sequence.
        group: the ranks that share the sequence.
        layout: "zigzag" or "contiguous".

    Raises:
        ValueError: a layout that does not exist.

    Examples:
        >>> tokens = torch.arange(8)
        >>> part = weft.shard_sequence(tokens, dim=0)  # rank 0: [0, 1, 6, 7], rank 1: [2, 3, 4, 5]
        >>> weft.unshard_sequence(part, dim=0)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    ranks = communicator(group)
    return _ShardSequence.apply(x, dim % x.dim(), ranks, SequenceLayout(x.size(dim), ranks.world_size, layout))


def unshard_sequence(x: torch.Tensor, *, dim: int, group: Group = None, layout: str = "zigzag") -> torch.Tensor:
    """Return on every rank the whole tensor that `shard_sequence` cut.

    Backward takes this rank's part of the gradient, so every rank must go on with the whole in the same way.

    Args:
        dim, group, layout: as in `shard_sequence`.

    Raises:
        ValueError: the sizes of the parts are not those of the layout.

    Examples:
        >>> part = weft.shard_sequence(torch.arange(6), dim=0, layout="contiguous")
        >>> weft.unshard_sequence(part, dim=0, layout="contiguous")
        tensor([0, 1, 2, 3, 4, 5])
    """
    ranks = communicator(group)
    return _Unshard.apply(x, dim % x.dim(), ranks, layout_of(ranks, x.size(dim), layout))


def layout_of(ranks: Communicator, size: int, kind: str) -> SequenceLayout:
    """Return the layout of a sequence from each rank's own number of positions, `size`. A collective call."""
    sizes = ranks.all_sizes(torch.empty(size, 0), 0)
    layout = SequenceLayout(sum(sizes), ranks.world_size, kind)
    if sizes != layout.sizes:
        raise ValueError(
            f"the ranks have {sizes} positions; {kind} shards of {layout.length} have {layout.sizes}: "
            "cut the sequence with weft.shard_sequence"
        )
    return layout


def gather_parts(x: torch.Tensor, dim: int, ranks: Communicator, layout: SequenceLayout) -> torch.Tensor:
    """Gather every rank's part, with positions in order; not differentiable."""
    return layout.join(ranks.all_gather_parts(x, dim, layout.sizes), dim)


class _ShardSequence(RankFunction):
    """x_r = this rank's positions of x; backward  dx = all_gather(dx_r), positions in order."""

    @staticmethod
    def forward(ctx, x, dim, ranks, layout):
        ctx.arguments = dim, ranks, layout
        return layout.pick(x, dim, ranks.rank)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return gather_parts(dy, *ctx.arguments), None, None, None


class _Unshard(RankFunction):
    """x = all_gather(x_r), positions in order; backward  dx_r = this rank's positions of dx."""

    @staticmethod
    def forward(ctx, x, dim, ranks, layout):
        ctx.arguments = dim, ranks, layout
        return gather_parts(x, dim, ranks, layout)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        dim, ranks, layout = ctx.arguments
        return layout.pick(dy, dim, ranks.rank), None, None, None
