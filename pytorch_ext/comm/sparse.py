"""Sums of sparse COO tensors over ranks, as torch's DDP makes them of the gradients of sparse embeddings."""

import torch

from weft.comm.dtypes import AVERAGE, OP_NAMES, SUM
from weft.comm.engine import Engine
from weft.comm.multi_host import SpanningEngine


def all_reduce_sparse(engine: Engine | SpanningEngine, x: torch.Tensor, op: int) -> None:
    """Set x to the coalesced sum or average over ranks; each rank sends what it has.

    Numbers of 16 bits are added in fp32 and rounded once.

    Args:
        x: a sparse COO tensor, of the same shape on every rank.

    Raises:
        ValueError: another operator, or shapes that differ.
    """
    if op not in (SUM, AVERAGE):
        raise ValueError(f"sparse tensors are summed or averaged over ranks, not reduced by {OP_NAMES[op]!r}")
    mine, world = x.detach().coalesce(), engine.world_size
    described = torch.tensor([mine.indices().size(1), mine.sparse_dim(), *x.shape])
    of_ranks = [torch.empty_like(described) for _ in range(world)]
    engine.all_gather(described, of_ranks)
    if any(not torch.equal(other[1:], described[1:]) for other in of_ranks):
        shapes = ", ".join(str(tuple(other[2:].tolist())) for other in of_ranks)
        raise ValueError(f"all_reduce of sparse tensors: ranks have other shapes: {shapes}")
    counts = [int(other[0]) for other in of_ranks]
    dense = mine.values().shape[1:]
    indices = [torch.empty(mine.sparse_dim(), count, dtype=torch.int64) for count in counts]
    values = [torch.empty(count, *dense, dtype=x.dtype) for count in counts]
    engine.all_gather(mine.indices(), indices)
    engine.all_gather(mine.values(), values)
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values).to(wide), x.shape).coalesce()
    sums = total.values()
    if op == AVERAGE:
        sums = sums.div(world, rounding_mode=None if sums.is_floating_point() else "trunc")
    with torch.no_grad():  # a detached sparse tensor has indices of its own
        x.copy_(torch.sparse_coo_tensor(total.indices(), sums.to(x.dtype), x.shape, is_coalesced=True))
