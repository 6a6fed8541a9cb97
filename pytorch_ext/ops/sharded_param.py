"""A parameter's shard on its way into a product: rows that several ranks have, and matrices that lie transposed."""

import torch

from weft.ops.backward import first_order
from weft.ops.matmul import check_main_grad
from weft.sharding.shard import Shard, pick


def held(parameter: torch.Tensor, shard: Shard, transposed: bool = False, *, whole_use: bool = True) -> torch.Tensor:
    """The parameter, for a product; of a matrix that is kept [in, out], its transpose.

    Args:
        whole_use: one product of ours takes all of it as it is, and sees to a `main_grad` itself.

    Where ranks have the same rows, each one's gradient of them covers its own use (the query heads that share a KV
    head), and the parameter's is the sum.
    """
    as_it_is = not transposed and not shard.cut.replicated
    if as_it_is and whole_use:
        return parameter
    main_grad = getattr(parameter, "main_grad", None)
    return parameter if as_it_is and main_grad is None else _ShardedParam.apply(parameter, shard, transposed, main_grad)


class _ShardedParam(torch.autograd.Function):
    """w = p or p.T.

    forward   nothing travels
    backward  dp = dw (dw.T); of rows that several ranks have, the sum over exactly these ranks

    With an fp32 `main_grad`, dp is added to that instead, and p gets no gradient.
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


def sum_over_holders(mine: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Of tensors like each rank's part, the sum over the ranks that have the same rows: in fp32 (fp64 of fp64), in rank
    order, rounded once. Rows of one rank alone are as they were. Only what is shared travels."""
    ranks, dim = shard.communicator, shard.dim
    shared = [shard.cut.common(ranks.rank, other) if other != ranks.rank else [] for other in range(ranks.world_size)]
    parts = [pick(mine, dim, stretches).contiguous() for stretches in shared]
    arrived = [torch.empty_like(part) for part in parts]
    ranks.all_to_all_into(parts, arrived)
    total = torch.zeros_like(mine, dtype=torch.promote_types(mine.dtype, torch.float32))
    for rank, part in enumerate(arrived):
        if rank == ranks.rank:
            total += mine
            continue
        begin = 0
        for start, stop in shared[rank]:
            total.narrow(dim, start, stop - start).add_(part.narrow(dim, begin, stop - start))
            begin += stop - start
    return total.to(mine.dtype)
