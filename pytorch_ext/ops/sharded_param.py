"""A parameter's shard for use in a product: handles rows on several ranks and matrices that are stored transposed."""

import torch

from weft.forward.functions import seen_by_modes
from weft.ops.backward import RankFunction, first_order
from weft.ops.matmul import check_main_grad
from weft.sharding.shard import Shard, pick


def operand(parameter: torch.Tensor, shard: Shard, transposed: bool = False, *, whole_use: bool = True) -> torch.Tensor:
    """Return the parameter for use in a product, transposed if it is a matrix stored as [in, out].

    Where several ranks have the same rows, the gradient from each rank covers that rank's use of them (the query heads
    that share a KV head). The parameter's gradient is the sum over these ranks.

    Args:
        transposed: the matrix is stored as [in, out].
        whole_use: one product of weft's takes the whole parameter unchanged and handles a `main_grad` itself.
    """
    as_it_is = not transposed and not shard.cut.replicated
    if as_it_is and whole_use:
        return parameter
    main_grad = getattr(parameter, "main_grad", None)
    if as_it_is and main_grad is None:
        return parameter
    seen = seen_by_modes(operand, parameter, shard, transposed)
    return _ShardedParam.apply(parameter, shard, transposed, main_grad) if seen is None else seen[0]


class _ShardedParam(RankFunction):
    """w = p or p.T.

    forward   nothing travels
    backward  dp = dw (dw.T); for rows that several ranks have, the sum over exactly these ranks

    With an fp32 `main_grad`, dp is added to that and p gets no gradient.
    """

    @staticmethod
    def forward(ctx, parameter, shard, transposed, main_grad):
        ctx.arguments = shard, transposed, main_grad
        return parameter.t() if transposed else parameter.view_as(parameter)

    @staticmethod
    @first_order
    def backward(ctx, dw):
        shard, transposed, main_grad = ctx.arguments
        dp = dw.t() if transposed else dw
        if shard.cut.replicated:
            dp = sum_over_holders(dp, shard)
        if main_grad is None:
            return dp, None, None, None
        check_main_grad(main_grad, tuple(dp.shape))
        main_grad.add_(dp)
        return None, None, None, None


def sum_over_holders(local: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Sum rows that several ranks have over these ranks: in fp32 (fp64 for fp64), in rank order, rounded once.

    Rows that only one rank has do not change. Only shared rows travel.

    Args:
        local: a tensor with the shape of this rank's part.
    """
    ranks, dim = shard.communicator, shard.dim
    shared = [shard.cut.common(ranks.rank, other) if other != ranks.rank else [] for other in range(ranks.world_size)]
    parts = [pick(local, dim, stretches).contiguous() for stretches in shared]
    arrived = [torch.empty_like(part) for part in parts]
    ranks.all_to_all_into(parts, arrived)
    total = torch.zeros_like(local, dtype=torch.promote_types(local.dtype, torch.float32))
    for rank, part in enumerate(arrived):
        if rank == ranks.rank:
            total += local
            continue
        begin = 0
        for start, stop in shared[rank]:
            total.narrow(dim, start, stop - start).add_(part.narrow(dim, begin, stop - start))
            begin += stop - start
    return total.to(local.dtype)
