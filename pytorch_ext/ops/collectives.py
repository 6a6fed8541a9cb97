"""The collectives as functions of tensors, differentiable: each rank's result is differentiated for each rank's input.

In place where nothing is differentiated, as in torch.distributed; a tensor that takes part in autograd is left as it is
and the result is a new one. Either way the result is returned.
"""

import torch
import torch.distributed as dist

from weft.arguments import check_choice
from weft.comm.communicator import Communicator
from weft.comm.fusion import Fusion
from weft.comm.registry import Group, communicator
from weft.ops.backward import first_order
from weft.sharding.sizes import split_sizes

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def all_reduce(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: Group = None,
    wire_dtype: torch.dtype | None = None,
    scale: float = 1.0,
    squared_norm: torch.Tensor | None = None,
    deterministic: bool = True,
) -> torch.Tensor:
    """The sum ("sum"), average ("avg"), minimum or maximum over the ranks.

    On a group of the weft backend, and by weft's kernels on GPUs that reach each other's memory (`transport` of the
    group's communicator says whether they run), summed in fp32 in rank order, the same bits on every rank; on another
    backend, in its way.

    Args:
        x: any shape, the same on every rank. In symmetric memory (`weft.empty_symmetric`) nothing is copied.
        wire_dtype: bfloat16 or float16, for float32: x is rounded to it before it travels, and the result before it is
            widened again; the sum is in fp32 all the same.
        scale: multiplies the result before it is rounded.
        squared_norm: a float64 tensor of one element that becomes the sum of squares of the result, the same on every
            rank. It is finite exactly where every element is. On the weft backend all of this is done in the pass of
            the reduction.
        deterministic: False permits the sum of the switch between the GPUs, for tensors in symmetric memory that has a
            multicast address: all ranks get the same bits, but the order is the switch's own.

    Raises:
        ValueError: another op; a gradient, a wire type, a scale or a norm of a minimum or maximum; a gradient and a
            norm.
        TypeError: a wire type, a scale or a norm of integers.
        CommError: a rank was lost or is late, or the ranks called different things (docs/troubleshooting.md).
    """
    check_choice("op", op, _OPS)
    ranks = communicator(group)
    plain = wire_dtype is None and scale == 1.0 and squared_norm is None
    fusion = None if plain else Fusion.of(x, wire_dtype, scale, squared_norm)
    if fusion is not None and op not in ("sum", "avg"):
        raise ValueError(f"all_reduce by {op!r} takes no wire_dtype, scale or squared_norm; sums and averages do")
    if torch.is_grad_enabled() and x.requires_grad:
        if op not in ("sum", "avg"):
            raise ValueError(f"all_reduce by {op!r} has no gradient here; detach the tensor first")
        if squared_norm is not None:
            raise ValueError("squared_norm is not differentiable; detach the tensor first")
        return _AllReduce.apply(x, op, ranks, fusion, deterministic)
    return ranks.all_reduce_(x, _OPS[op], fusion, deterministic)


def all_gather(x: torch.Tensor, *, dim: int = 0, group: Group = None) -> torch.Tensor:
    """The ranks' x one after another along `dim`; their sizes along it may differ. Backward is a reduce_scatter.

    Args:
        x: any shape with that dimension, the same on every rank but along it.

    Returns:
        A new tensor, the same on every rank.
    """
    ranks = communicator(group)
    return _AllGather.apply(x, dim, ranks, ranks.all_sizes(x, dim))


def reduce_scatter(x: torch.Tensor, *, dim: int = 0, group: Group = None) -> torch.Tensor:
    """This rank's shard along `dim` (see `weft.split_sizes`) of the sum of the ranks' x. Backward is an all_gather.

    Args:
        x: any shape with that dimension, the same on every rank.

    Returns:
        A new tensor.

    Raises:
        ValueError: x is shorter along `dim` than there are ranks.
    """
    ranks = communicator(group)
    return _ReduceScatter.apply(x, dim, ranks, split_sizes(x.size(dim), ranks.world_size))


def broadcast(x: torch.Tensor, *, src: int = 0, group: Group = None) -> torch.Tensor:
    """The x of rank `src` of the group. In place where nothing is differentiated; backward sums at `src`, for which the
    x of every rank must require a gradient, or of none."""
    ranks = communicator(group)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Broadcast.apply(x, src, ranks)
    return ranks.broadcast_(x, src)


def all_to_all(parts: list[torch.Tensor], *, group: Group = None) -> list[torch.Tensor]:
    """result[r] = rank r's parts[this rank]. Parts are alike but for their first dimension, any of whose sizes may
    differ. Backward sends the gradients back.

    Raises:
        ValueError: not as many parts as ranks.
    """
    ranks = communicator(group)
    if len(parts) != ranks.world_size:
        raise ValueError(f"all_to_all: expected {ranks.world_size} parts, one per rank, got {len(parts)}")
    return list(_AllToAll.apply(ranks, *parts))


def barrier(*, group: Group = None) -> None:
    """Returns once every rank of the group has called it."""
    dist.barrier(group=communicator(group).group)


class _AllReduce(torch.autograd.Function):
    """y = scale * sum over ranks of x (or their average).

    forward   y = scale * all_reduce(x)
    backward  dx = scale * all_reduce(dy), averaged where y is
    """

    @staticmethod
    def forward(ctx, x, op, ranks: Communicator, fusion, deterministic):
        ctx.arguments = _OPS[op], fusion, deterministic
        ctx.ranks = ranks
        return ranks.all_reduce_(x.clone(), *ctx.arguments)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return ctx.ranks.all_reduce_(dy.clone(), *ctx.arguments), None, None, None, None


class _AllGather(torch.autograd.Function):
    """y = all_gather(x_shard); backward  dx_shard = reduce_scatter(dy)."""

    @staticmethod
    def forward(ctx, x, dim, ranks, sizes):
        ctx.arguments = dim, ranks, sizes
        return ranks.all_gather(x, dim, sizes) if ranks.world_size > 1 else x.clone()

    @staticmethod
    @first_order
    def backward(ctx, dy):
        dim, ranks, sizes = ctx.arguments
        return ranks.reduce_scatter(dy, dim, sizes), None, None, None


class _ReduceScatter(torch.autograd.Function):
    """y_shard = reduce_scatter(x); backward  dx = all_gather(dy_shard)."""

    @staticmethod
    def forward(ctx, x, dim, ranks, sizes):
        ctx.arguments = dim, ranks, sizes
        return ranks.reduce_scatter(x, dim, sizes) if ranks.world_size > 1 else x.clone()

    @staticmethod
    @first_order
    def backward(ctx, dy):
        dim, ranks, sizes = ctx.arguments
        return ranks.all_gather(dy, dim, sizes), None, None, None


class _Broadcast(torch.autograd.Function):
    """y = the root's x; backward  dx = the sum over ranks of dy at the root, 0 elsewhere."""

    @staticmethod
    def forward(ctx, x, root, ranks):
        ctx.root, ctx.ranks = root, ranks
        return ranks.broadcast_(x.clone(), root)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        dx = ctx.ranks.all_reduce_(dy.clone())
        return dx if ctx.ranks.rank == ctx.root else torch.zeros_like(dx), None, None


class _AllToAll(torch.autograd.Function):
    """y_r = rank r's x_rank; backward  dx_r = rank r's dy_rank."""

    @staticmethod
    def forward(ctx, ranks, *parts):
        ctx.ranks = ranks
        return tuple(ranks.all_to_all(list(parts)))

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        return None, *ctx.ranks.all_to_all(list(gradients))
