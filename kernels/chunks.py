"""Chunks: the rows of a product, cut by the rank that has or gets them. A chunk travels as one and has one flag.

A sequence-parallel tensor [..., S, ..., F] is flattened to [M, F] for the product. With dimensions before the sequence
there are `batch` blocks of sizes[0], sizes[1], ... rows, and a rank has rows in each block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from weft.kernels.signal import FLAGS

_by_value = lru_cache(maxsize=1024)  # of methods: equal `Rows` share the results


@dataclass(frozen=True)
class RowChunk:
    """Rows start to start + rows of the product; on rank `rank` they start at its own row local_start."""

    start: int
    rows: int
    rank: int
    local_start: int


@dataclass(frozen=True)
class Rows:
    """Split of a product's rows over the ranks.

    Attributes:
        batch: number of blocks.
        sizes: rows of each rank in one block.
        most: largest number of rows in a chunk.
    """

    batch: int
    sizes: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, shape, dim: int, sizes, most: int = 1024) -> "Rows":
        """Return the rows of a tensor of that shape, split over the ranks along `dim`.

        Chunks are long enough that a window has a flag for each chunk from each rank.

        Args:
            shape: shape of the tensor, whole along dim.
            dim: not the last dimension.
            sizes: sizes of the ranks' shards along dim.
            most: largest number of rows in a chunk, doubled until the flags suffice.

        Raises:
            ValueError: there are too few flags even for the longest chunks.
        """
        dim %= len(shape)
        batch, inner = prod(shape[:dim]), prod(shape[dim + 1 : -1])
        rows = cls(batch, tuple(size * inner for size in sizes), most)
        while len(sizes) * len(rows.chunks) > FLAGS and rows.most < rows.total:
            rows = cls(batch, rows.sizes, 2 * rows.most)
        if len(sizes) * len(rows.chunks) > FLAGS:
            raise ValueError(
                f"{batch} blocks of rows shared by {len(sizes)} ranks need {len(sizes) * len(rows.chunks)} flags, and "
                f"there are {FLAGS}; put the sequence dimension first"
            )
        return rows

    @property
    def total(self) -> int:
        return self.batch * sum(self.sizes)

    def of_rank(self, rank: int) -> int:
        return self.batch * self.sizes[rank]

    @property
    def largest(self) -> int:
        """Largest number of rows on one rank."""
        return self.batch * max(self.sizes)

    @property
    @_by_value
    def chunks(self) -> tuple[RowChunk, ...]:
        """The chunks in the order of rows, without gaps."""
        chunks, start = [], 0
        for block in range(self.batch):
            for rank, size in enumerate(self.sizes):
                for offset in range(0, size, self.most):
                    count = min(self.most, size - offset)
                    chunks.append(RowChunk(start, count, rank, block * size + offset))
                    start += count
        return tuple(chunks)

    @_by_value
    def order(self, block_m: int, rank: int, own_first: bool, device: torch.device) -> torch.Tensor:
        """Return int32 [tiles of block_m rows, 3]: for each turn, the tile, its first chunk and its last.

        Ranks are served in the order rank, rank + 1, ... (own_first, for chunks that arrive) or rank + 1, ..., rank
        (for chunks that depart). A tile's turn comes with the last of its chunks where chunks arrive, with the first
        where they depart.
        """
        world, shift, spans = len(self.sizes), 0 if own_first else 1, self._spans(block_m)

        def turn(chunk: int) -> tuple[int, int]:
            return (self.chunks[chunk].rank - rank - shift) % world, chunk

        def key(tile: int) -> tuple[int, int]:
            first, final = spans[tile]
            turns = [turn(chunk) for chunk in range(first, final + 1)]
            return max(turns) if own_first else min(turns)

        return _tensor([(tile, *spans[tile]) for tile in sorted(range(len(spans)), key=key)], 3, device)

    @_by_value
    def tiles_of_chunk(self, block_m: int, device: torch.device) -> torch.Tensor:
        """Return int32 [chunks]: the number of tiles of block_m rows that have rows of the chunk."""
        counts = [0] * len(self.chunks)
        for first, final in self._spans(block_m):
            for chunk in range(first, final + 1):
                counts[chunk] += 1
        return torch.tensor(counts, dtype=torch.int32, device=device)

    @_by_value
    def rank_of_chunk(self, device: torch.device) -> torch.Tensor:
        """Return int32 [chunks]: the rank of each chunk."""
        return torch.tensor([chunk.rank for chunk in self.chunks], dtype=torch.int32, device=device)

    @_by_value
    def own_chunks(self, rank: int, device: torch.device) -> torch.Tensor:
        """Return int32 [chunks of the rank, 3]: number among all chunks, local start, rows."""
        own = [(number, c.local_start, c.rows) for number, c in enumerate(self.chunks) if c.rank == rank]
        return _tensor(own, 3, device)

    @_by_value
    def table(self, device: torch.device) -> torch.Tensor:
        """Return int32 [chunks, 4]: rank, local start, rows, start."""
        return _tensor([(c.rank, c.local_start, c.rows, c.start) for c in self.chunks], 4, device)

    @_by_value
    def _spans(self, block_m: int) -> list[tuple[int, int]]:
        """Return the first and the last chunk of each tile of block_m rows."""
        spans, first, chunks = [], 0, self.chunks
        for start in range(0, self.total, block_m):
            end = min(start + block_m, self.total)
            while chunks[first].start + chunks[first].rows <= start:
                first += 1
            final = first
            while chunks[final].start + chunks[final].rows < end:
                final += 1
            spans.append((first, final))
        return spans


def _tensor(table: Sequence[tuple[int, ...]], width: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int32, device=device).view(-1, width)
