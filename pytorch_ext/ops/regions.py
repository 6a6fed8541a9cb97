"""Crossing between a tensor that every rank holds whole and one of which each holds a shard."""

import torch

from weft.comm.communicator import Communicator
from weft.ops.backward import first_order


def gather(x: torch.Tensor, dim: int, communicator: Communicator, sizes) -> torch.Tensor:
    """Shards along `dim` to the whole, which every rank then uses in the same way."""
    return x if communicator.world == 1 else _Gather.apply(x, dim, communicator, sizes)


def split(x: torch.Tensor, dim: int, communicator: Communicator, sizes) -> torch.Tensor:
    """The whole, the same on every rank, to this rank's shard along `dim`."""
    return x if communicator.world == 1 else _Split.apply(x, dim, communicator, sizes)


class _Gather(torch.autograd.Function):
    """y = all_gather(x_shard).

    forward   y = all_gather(x_shard)
    backward  dx_shard = this rank's shard of dy: every rank has the same y and so the same dy; nothing travels
    """

    @staticmethod
    def forward(ctx, x, dim, communicator, sizes):
        ctx.dim, ctx.communicator, ctx.sizes = dim, communicator, list(sizes)
        return communicator.all_gather(x, dim, ctx.sizes)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return _own_part(dy, ctx.dim, ctx.communicator, ctx.sizes), None, None, None


class _Split(torch.autograd.Function):
    """y_shard = this rank's shard of x.

    forward   nothing travels
    backward  dx = all_gather(dy_shard)
    """

    @staticmethod
    def forward(ctx, x, dim, communicator, sizes):
        ctx.dim, ctx.communicator, ctx.sizes = dim, communicator, list(sizes)
        return _own_part(x, dim, communicator, ctx.sizes)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return ctx.communicator.all_gather(dy, ctx.dim, ctx.sizes), None, None, None


def _own_part(x, dim, communicator, sizes):
    return x.split(sizes, dim)[communicator.rank].contiguous()
