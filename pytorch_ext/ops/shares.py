"""Between what every rank has whole and what each computes for its own part: where gradients become sums over ranks."""

import torch

from weft.comm.communicator import Communicator
from weft.ops.backward import first_order


def used_by_parts(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """x, the same on every rank, for use with this rank's part; its gradient is the sum of all ranks'."""
    return _UsedByParts.apply(x, ranks) if x.requires_grad else x


def total(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """The sum of the ranks' x, with which every rank goes on in the same way."""
    return _Total.apply(x, ranks)


class _UsedByParts(torch.autograd.Function):
    """y = x; backward  dx = all_reduce(dy): each rank's dy covers its own part."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return ctx.ranks.all_reduce_(dy.clone(memory_format=torch.contiguous_format)), None


class _Total(torch.autograd.Function):
    """y = all_reduce(x); backward  dx = dy: every rank has the same y and so the same dy; nothing travels."""

    @staticmethod
    def forward(ctx, x, ranks):
        return ranks.all_reduce_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy, None
