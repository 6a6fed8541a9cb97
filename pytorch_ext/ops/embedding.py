"""Embedding with its rows (the vocabulary) split over ranks (Shoeybi et al. 2019, section 3)."""

import torch
import torch.nn.functional as F

from weft.forward.functions import seen_by_modes
from weft.ops.backward import RankFunction, first_order
from weft.sharding.shard import Shard


def parallel_embedding(
    tokens: torch.Tensor, weight: torch.Tensor, shard: Shard, padding_idx: int | None = None
) -> torch.Tensor:
    """Return rows of a table that is sharded over the ranks.

    Args:
        tokens: [...] int64 or int32, the same on every rank.
        weight: [V_r, E], this rank's rows.
        shard: the place of these rows in the table.
        padding_idx: the row, counted in the whole table, that gets no gradient.

    Returns:
        [..., E], the same on every rank.

    Raises:
        IndexError: a token outside the vocabulary; on a GPU the device raises a RuntimeError.
        TypeError: tokens of another type.
    """
    if (seen := seen_by_modes(parallel_embedding, tokens, weight, shard, padding_idx)) is not None:
        return seen[0]
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: tokens must be int64 or int32, got {tokens.dtype}")
    vocabulary = shard.global_shape[0]
    if tokens.is_cuda:  # a check on the host would wait for the device
        inside = ((tokens >= 0) & (tokens < vocabulary)).all()
        torch._assert_async(inside, f"embedding: tokens must lie in 0 to {vocabulary - 1}")
    elif tokens.numel():
        lowest, highest = torch.aminmax(tokens)
        if lowest < 0 or highest >= vocabulary:
            raise IndexError(
                f"embedding: tokens span {int(lowest)} to {int(highest)}; they must lie in 0 to {vocabulary - 1}"
            )
    return ParallelEmbeddingFunction.apply(tokens, weight, shard, padding_idx)


class ParallelEmbeddingFunction(RankFunction):
    """y = table[tokens], with the table's rows split over the ranks.

    Per rank: tokens [M] whole        w_shard_v [V_r, E]        y [M, E] whole

    forward   y = all_reduce(w_shard_v[tokens] where this rank has the row, else 0): each sum has one term that is not 0
    wgrad     dw_shard_v[token] += dy of the tokens with rows on this rank; nothing travels

    Saves the tokens.
    """

    @staticmethod
    def forward(ctx, tokens, weight, shard, padding_idx):
        ctx.shard, ctx.padding_idx, ctx.weight_shape = shard, padding_idx, weight.shape
        ctx.save_for_backward(tokens)
        local, elsewhere = _local_rows(tokens, shard)
        y = F.embedding(local, weight)
        if shard.communicator.world_size > 1:
            y.masked_fill_(elsewhere.unsqueeze(-1), 0)
        return shard.communicator.all_reduce_(y)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        (tokens,) = ctx.saved_tensors
        local, elsewhere = _local_rows(tokens, ctx.shard)
        if ctx.padding_idx is not None:
            elsewhere = elsewhere | (tokens == ctx.padding_idx)
        rows = ctx.weight_shape[0]
        # One more row than the shard has takes the gradients of other ranks' rows and of the padding.
        local = local.masked_fill(elsewhere, rows).reshape(-1)
        dy = dy.reshape(-1, dy.size(-1))
        dw = torch.ops.aten.embedding_dense_backward(dy.contiguous(), local, rows + 1, -1, False)
        return None, dw[:rows], None, None


def _local_rows(tokens, shard):
    """Return row numbers in this rank's shard (0 for rows elsewhere), and the mask of tokens with rows elsewhere."""
    local = tokens - shard.offset
    elsewhere = (local < 0) | (local >= shard.size)
    return local.masked_fill(elsewhere, 0), elsewhere
