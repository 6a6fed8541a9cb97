"""Differentiable mappings between a tensor that is whole on every rank and one that is sharded over the ranks."""

from collections.abc import Sequence

import torch

from weft.comm.communicator import Communicator
from weft.forward.functions import seen_by_modes
from weft.ops.backward import RankFunction, first_order
from weft.sharding.shard import in_order_of_the_whole, pick
from weft.sharding.sizes import Cut


def gather(x: torch.Tensor, dim: int, communicator: Communicator, cut: Cut | Sequence[int]) -> torch.Tensor:
    """Return the whole of the ranks' shards along `dim`, in the whole's own order.

    Every rank must go on with the whole in the same way.

    Args:
        cut: the cut of the whole, or the sizes of the shards if they lie one after another.
    """
    if communicator.world_size == 1:
        return x
    seen = seen_by_modes(gather, x, dim, communicator, cut)
    return _Gather.apply(x, dim, communicator, _cut(cut)) if seen is None else seen[0]


def split(x: torch.Tensor, dim: int, communicator: Communicator, cut: Cut | Sequence[int]) -> torch.Tensor:
    """Return this rank's shard along `dim` of a tensor that is the same on every rank.

    Args:
        cut: as in `gather`.

    Raises:
        ValueError: the size of x along `dim` is not that of the cut.
    """
    cut = _cut(cut)
    if not -x.dim() <= dim < x.dim() or x.size(dim) != sum(cut.sizes):
        raise ValueError(f"the input has shape {tuple(x.shape)}; its dimension {dim} must be {sum(cut.sizes)}")
    return x if communicator.world_size == 1 else _Split.apply(x, dim, communicator, cut)


def _cut(cut: Cut | Sequence[int]) -> Cut:
    return cut if isinstance(cut, Cut) else Cut.one_after_another(cut)


class _Gather(RankFunction):
    """y = all_gather(x_shard), in the order of the whole.

    forward   y = all_gather(x_shard)
    backward  dx_shard = this rank's shard of dy: every rank has the same y and so the same dy; nothing travels. Where
              several ranks hold the same part, y has the first rank's part, and the gradient of the others is zero.
    """

    @staticmethod
    def forward(ctx, x, dim, communicator, cut):
        ctx.dim, ctx.communicator, ctx.cut = dim, communicator, cut
        return in_order_of_the_whole(communicator.all_gather(x, dim, cut.sizes), dim, cut)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        rank, cut = ctx.communicator.rank, ctx.cut
        dx = _own_part(dy, ctx.dim, rank, cut)
        if cut.replicated:
            dx = dx.clone()
            for stretch, (start, stop) in cut.places(rank).items():
                if cut.owner[stretch] != rank:
                    dx.narrow(ctx.dim, start, stop - start).zero_()
        return dx, None, None, None


class _Split(RankFunction):
    """y_shard = this rank's shard of x; no two shards overlap.

    forward   nothing travels
    backward  dx = all_gather(dy_shard), in the order of the whole
    """

    @staticmethod
    def forward(ctx, x, dim, communicator, cut):
        assert not cut.replicated
        ctx.dim, ctx.communicator, ctx.cut = dim, communicator, cut
        return _own_part(x, dim, communicator.rank, cut)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        dx = ctx.communicator.all_gather(dy, ctx.dim, ctx.cut.sizes)
        return in_order_of_the_whole(dx, ctx.dim, ctx.cut), None, None, None


def _own_part(x: torch.Tensor, dim: int, rank: int, cut: Cut) -> torch.Tensor:
    return pick(x, dim, cut.stretches[rank]).contiguous()


def used_by_parts(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Return x, the same on every rank, for use with this rank's part; its gradient is the sum over all ranks."""
    return _UsedByParts.apply(x, ranks) if x.requires_grad else x


def total(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Return the sum of the ranks' x; every rank must go on with it in the same way."""
    return _Total.apply(x, ranks)


class _UsedByParts(RankFunction):
    """y = x; backward  dx = all_reduce(dy): each rank's dy covers its own part."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return ctx.ranks.all_reduce_(dy.clone(memory_format=torch.contiguous_format)), None


class _Total(RankFunction):
    """y = all_reduce(x); backward  dx = dy: every rank has the same y and so the same dy; nothing travels."""

    @staticmethod
    def forward(ctx, x, ranks):
        return ranks.all_reduce_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy, None
