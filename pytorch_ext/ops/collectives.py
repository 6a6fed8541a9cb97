"""The collectives as differentiable functions of tensors. Backward covers every rank's result and every rank's input.

all_reduce and broadcast work in place, as in torch.distributed, unless autograd records their argument. Then that does
not change, and the result is a new tensor. Both ways return the result.
"""

import torch
import torch.distributed as dist

from weft import _C
from weft.arguments import check_choice, check_tensor
from weft.comm.communicator import Communicator
from weft.comm.fusion import Fusion
from weft.comm.registry import Group, communicator
from weft.ops.backward import RankFunction, first_order
from weft.sharding.sizes import split_sizes

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@_C.of_default_group
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
    """Reduce x over the ranks, in place unless autograd records x, and return the result.

    As with torch.distributed, autograd does not see that x has changed: reduce `y.detach().clone()` if y is needed for
    a backward, or for anything else.

    The weft backend sums in fp32 in rank order and gives the same bits on every rank. Weft's kernels do the same on
    GPUs that reach each other's memory; `transport` of the group's communicator says whether they run. Another backend
    sums in its own way.

    Args:
        x: any shape, the same on every rank. In symmetric memory (`weft.empty_symmetric`) nothing is copied.
        op: "sum", "avg" (average), "min" or "max".
        wire_dtype: bfloat16 or float16, for a float32 x. x is rounded to it before it travels, and the result before it
            is widened again; the sum itself is in fp32.
        scale: factor of the result, applied before the result is rounded.
        squared_norm: a float64 tensor of one element. It becomes the sum of squares of the result, the same on every
            rank, and is finite if and only if every element is. On the weft backend one pass reduces, rounds, scales
            and computes the norm.
        deterministic: False permits the switch between the GPUs to sum, for tensors in symmetric memory with a
            multicast address. All ranks then get the same bits, but the switch chooses the order and rounds more than
            once.

    Raises:
        ValueError: another op; a gradient, a wire type, a scale or a norm of a minimum or maximum; a gradient and a
            norm.
        TypeError: a wire type, a scale or a norm of integers.
        CommError: a rank was lost or is late, or the ranks made different calls (docs/troubleshooting.md).

    Examples:
        >>> weft.all_reduce(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
        >>> weft.all_reduce(torch.tensor(float(dist.get_rank())), op="max")
        tensor(1.)
    """
    check_tensor("all_reduce: x", x)
    ranks = communicator(group)
    plain = wire_dtype is None and scale == 1.0 and squared_norm is None
    recorded = x.requires_grad and torch.is_grad_enabled()
    if plain and op == "sum" and not recorded:
        return ranks.all_reduce_(x, dist.ReduceOp.SUM, None, deterministic)
    check_choice("op", op, _OPS)
    fusion = None if plain else Fusion.of(x, wire_dtype, scale, squared_norm)
    if fusion is not None and op not in ("sum", "avg"):
        raise ValueError(f"all_reduce by {op!r} takes no wire_dtype, scale or squared_norm; sums and averages do")
    if recorded:
        if op not in ("sum", "avg"):
            raise ValueError(f"all_reduce by {op!r} has no gradient here; detach the tensor first")
        if squared_norm is not None:
            raise ValueError("squared_norm is not differentiable; detach the tensor first")
        return _AllReduce.apply(x, op, ranks, fusion, deterministic)
    return ranks.all_reduce_(x, _OPS[op], fusion, deterministic)


def all_reduce_rms_norm(
    partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, group: Group = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of the residual stream behind a row-parallel layer, and the stream: (normalised, residual).

        residual    <- residual + all_reduce(partial)
        normalised  =  residual / sqrt(mean(residual^2) + eps) * weight, over the last dimension

    For inference: it has no gradient. On GPUs that reach each other's memory, small tensors (decoding) of float32,
    float16 and bfloat16 take one kernel, at sizes for which `weft.all_reduce` takes its low-latency algorithm. That is
    at most 64 KiB, with every row counted in whole 8 KiB. All other tensors take weft.all_reduce, an addition and
    torch.nn.functional.rms_norm.

    Both ways give the residual the same bits: the sum over ranks is rounded to the type, and then its sum with the
    residual. Both compute the norm in fp32 and round it once, as torch does (transformers' Llama also rounds before it
    multiplies by the weight). The kernel adds the squares in an order of its own, the same on every rank and for any
    number of rows. So its norm may differ from torch's by the rounding of that sum.

    Args:
        partial: [..., hidden], this rank's part of the sum. It may be overwritten.
        residual: [..., hidden], the same on every rank.
        weight: [hidden], the same on every rank.
        eps: added to the mean of squares.

    Returns:
        New tensors [..., hidden], the same bits on every rank.

    Raises:
        ValueError: shapes that do not fit, several devices, or a tensor that needs a gradient.
        TypeError: the tensors are not of one floating-point type.
        CommError: as `weft.all_reduce`.

    Examples:
        >>> ones, residual = torch.ones(2), torch.tensor([1.0, -5.0])
        >>> normalised, residual = weft.all_reduce_rms_norm(ones, residual, weight=torch.ones(2), eps=0.0)
        >>> residual
        tensor([ 3., -3.])
        >>> normalised
        tensor([ 1., -1.])
    """
    tensors = {"partial": partial, "residual": residual, "weight": weight}
    if weight.dim() != 1 or partial.shape != residual.shape or partial.shape[-1:] != weight.shape:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise ValueError(
            f"all_reduce_rms_norm: got {shapes}; expected partial and residual of one shape [..., hidden], and weight "
            "[hidden]"
        )
    if len({x.device for x in tensors.values()}) > 1:
        devices = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"all_reduce_rms_norm: got {devices}; expected one device")
    if len({x.dtype for x in tensors.values()}) > 1 or not partial.is_floating_point():
        types = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise TypeError(f"all_reduce_rms_norm: got {types}; expected one floating-point type")
    if torch.is_grad_enabled() and (needing := [name for name, x in tensors.items() if x.requires_grad]):
        raise ValueError(
            f"all_reduce_rms_norm has no gradient, and {', '.join(needing)} needs one; call it under torch.no_grad(), "
            "or use weft.all_reduce, an addition and torch.nn.functional.rms_norm"
        )
    return communicator(group).all_reduce_rms_norm(partial, residual, weight, eps)


def all_gather(x: torch.Tensor, *, dim: int = 0, group: Group = None) -> torch.Tensor:
    """Return the ranks' x one after another along `dim`. Backward is a reduce_scatter.

    Args:
        x: any shape with that dimension; the same on every rank except along `dim`.

    Returns:
        A new tensor, the same on every rank.

    Examples:
        >>> weft.all_gather(torch.tensor([10 + dist.get_rank()]))
        tensor([10, 11])
    """
    check_tensor("all_gather: x", x)
    ranks = communicator(group)
    return _AllGather.apply(x, dim, ranks, ranks.all_sizes(x, dim))


def reduce_scatter(x: torch.Tensor, *, dim: int = 0, group: Group = None) -> torch.Tensor:
    """Return this rank's shard along `dim` of the sum of the ranks' x. Backward is an all_gather.

    `weft.split_sizes` gives the sizes of the shards.

    Args:
        x: any shape with that dimension, the same on every rank.

    Returns:
        A new tensor.

    Raises:
        ValueError: x is shorter along `dim` than there are ranks.

    Examples:
        >>> weft.reduce_scatter(torch.ones(4))  # each rank gets half of the sums
        tensor([2., 2.])
    """
    check_tensor("reduce_scatter: x", x)
    ranks = communicator(group)
    return _ReduceScatter.apply(x, dim, ranks, split_sizes(x.size(dim), ranks.world_size))


@_C.of_default_group
def broadcast(x: torch.Tensor, *, src: int = 0, group: Group = None) -> torch.Tensor:
    """Copy the x of rank `src` of the group to all ranks, in place unless autograd records x, and return it.

    Backward sums the gradients at `src`. For that, x must require a gradient on every rank or on none.

    Examples:
        >>> weft.broadcast(torch.tensor([dist.get_rank()]), src=1)
        tensor([1])
    """
    check_tensor("broadcast: x", x)
    ranks = communicator(group)
    if x.requires_grad and torch.is_grad_enabled():
        return _Broadcast.apply(x, src, ranks)
    return ranks.broadcast_(x, src)


def all_to_all(parts: list[torch.Tensor], *, group: Group = None) -> list[torch.Tensor]:
    """Send parts[r] to rank r and return the parts from all ranks: result[r] = rank r's parts[this rank].

    Backward sends the gradients back.

    Args:
        parts: one tensor for each rank. All have the same shape except in the first dimension.

    Raises:
        ValueError: the number of parts is not the number of ranks.

    Examples:
        >>> rank = dist.get_rank()
        >>> [part.tolist() for part in weft.all_to_all([torch.tensor([rank]), torch.tensor([rank])])]
        [[0], [1]]
    """
    ranks = communicator(group)
    if len(parts) != ranks.world_size:
        raise ValueError(f"all_to_all: expected {ranks.world_size} parts, one per rank, got {len(parts)}")
    return list(_AllToAll.apply(ranks, *parts))


@_C.of_default_group
def barrier(*, group: Group = None) -> None:
    """Wait until every rank of the group has called this.

    Examples:
        >>> weft.barrier()
    """
    communicator(group).barrier()


class _AllReduce(RankFunction):
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


class _AllGather(RankFunction):
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


class _ReduceScatter(RankFunction):
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


class _Broadcast(RankFunction):
    """y = the root's x; backward  dx = sum over ranks of dy at the root, 0 elsewhere."""

    @staticmethod
    def forward(ctx, x, root, ranks):
        ctx.root, ctx.ranks = root, ranks
        return ranks.broadcast_(x.clone(), root)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        dx = ctx.ranks.all_reduce_(dy.clone())
        return dx if ctx.ranks.rank == ctx.root else torch.zeros_like(dx), None, None


class _AllToAll(RankFunction):
    """y_r = rank r's x_rank; backward  dx_r = rank r's dy_rank."""

    @staticmethod
    def forward(ctx, ranks, *parts):
        ctx.ranks = ranks
        return tuple(ranks.all_to_all(list(parts)))

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        return None, *ctx.ranks.all_to_all(list(gradients))
