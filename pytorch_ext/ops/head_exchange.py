"""Exchange of a share of the sequence with all heads for the whole sequence with a share of the heads, and back.

This is Ulysses (Jacobs et al. 2023).
"""

from collections.abc import Sequence

import torch

from weft.comm.communicator import Communicator
from weft.ops.backward import RankFunction, first_order
from weft.ops.sequence_layout import SequenceLayout


def to_heads(
    x: torch.Tensor, heads: Sequence[Sequence[int]], ranks: Communicator, layout: SequenceLayout
) -> torch.Tensor:
    """Exchange [B, H, S_r, D] for [B, this rank's heads, S, D], positions in order.

    Backward exchanges the gradients back. It sums the gradients of a head that several ranks have, in fp32, in rank
    order.

    Args:
        heads: the head numbers of each rank; several ranks may have the same head.
    """
    return _ToHeads.apply(x, tuple(map(tuple, heads)), ranks, layout)


def to_sequence(
    x: torch.Tensor, heads: Sequence[tuple[int, int]], ranks: Communicator, layout: SequenceLayout
) -> torch.Tensor:
    """Exchange [B, this rank's heads, S, D] for [B, H, S_r, D].

    Args:
        heads: (first, count) of each rank; each head is on one rank.
    """
    return _ToSequence.apply(x, tuple(tuple(range(first, first + count)) for first, count in heads), ranks, layout)


class _ToHeads(RankFunction):
    @staticmethod
    def forward(ctx, x, heads, ranks, layout):
        ctx.arguments = heads, ranks, layout
        ctx.heads = x.size(1)
        return _gather_sequence(x, heads, ranks, layout)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return _gather_heads(dy, ctx.heads, *ctx.arguments), None, None, None


class _ToSequence(RankFunction):
    @staticmethod
    def forward(ctx, x, heads, ranks, layout):
        ctx.arguments = heads, ranks, layout
        return _gather_heads(x, sum(map(len, heads)), heads, ranks, layout)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return _gather_sequence(dy, *ctx.arguments), None, None, None


def _gather_sequence(x, heads, ranks: Communicator, layout: SequenceLayout) -> torch.Tensor:
    parts = [x[:, list(of_rank)].contiguous() for of_rank in heads]
    count = len(heads[ranks.rank])
    arrived = [x.new_empty((x.size(0), count, size, x.size(3))) for size in layout.sizes]
    ranks.all_to_all_into(parts, arrived)
    return layout.join(arrived, 2)


def _gather_heads(x, count: int, heads, ranks: Communicator, layout: SequenceLayout) -> torch.Tensor:
    parts = [part.contiguous() for part in layout.cut(x, 2)]
    rows = layout.sizes[ranks.rank]
    arrived = [x.new_empty((x.size(0), len(of_rank), rows, x.size(3))) for of_rank in heads]
    ranks.all_to_all_into(parts, arrived)
    if len({head for of_rank in heads for head in of_rank}) == sum(map(len, heads)):
        return torch.cat(arrived, 1)  # each head once, in order
    whole = x.new_zeros((x.size(0), count, rows, x.size(3)), dtype=torch.float32)
    for of_rank, part in zip(heads, arrived, strict=True):
        for place, head in enumerate(of_rank):
            whole[:, head] += part[:, place]
    return whole.to(x.dtype)
