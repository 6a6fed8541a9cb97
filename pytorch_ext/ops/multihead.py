"""Attention of this rank's heads, as nn.MultiheadAttention computes it between its projections."""

import math

import torch
import torch.nn.functional as F

from weft.comm.communicator import Communicator
from weft.ops.mappings import gather, total
from weft.rng import own_random_numbers
from weft.sharding.sizes import Cut


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    ranks: Communicator,
    causal: bool = False,
    dropout: float = 0.0,
    weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute softmax attention of this rank's heads; nothing travels.

    Args:
        q: [B, H_r, L, D].
        k, v: [B, H_r, S, D].
        mask: [B or 1, H_r or 1, L, S], added to the scores.
        dropout: probability of dropping an attention weight; each rank draws its own random numbers.
        weights: return the probabilities too.

    Returns:
        The output [B, H_r, L, D], and the probabilities [B, H_r, L, S] after dropout, or None without `weights`.
    """
    if dropout > 0:
        with own_random_numbers(ranks, q.device):
            return _attend(q, k, v, mask, causal, dropout, weights)
    return _attend(q, k, v, mask, causal, dropout, weights)


def _attend(q, k, v, mask, causal, dropout, weights):
    if not weights:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
    scores = (q * math.sqrt(1 / q.size(-1))) @ k.transpose(-2, -1)
    probabilities = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return probabilities @ v, probabilities


def over_heads(probabilities: torch.Tensor, average: bool, ranks: Communicator, heads: Cut) -> torch.Tensor:
    """Return the mean over all ranks' heads [B, L, S], or all heads' probabilities [B, H, L, S]; alike on all ranks."""
    if average:
        return total(probabilities.sum(1), ranks) / sum(heads.sizes)
    return gather(probabilities, 1, ranks, heads)


def mask_of(
    attention: torch.Tensor | None,
    keys: torch.Tensor | None,
    batch: int,
    scores: tuple[int, int],
    heads: Cut,
    ranks: Communicator,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the mask to add to the scores of this rank's heads, or None.

    Args:
        attention: nn.MultiheadAttention's attn_mask, [L, S] or [B all heads, L, S], True (or -inf) at hidden positions.
        keys: its key_padding_mask, [B, S].
        scores: (L, S).

    Raises:
        ValueError: another shape.
        TypeError: a mask that is neither bool nor floating point.
    """
    found = None
    count = sum(heads.sizes)
    if attention is not None:
        _check(attention, "attn_mask", [scores, (batch * count, *scores)])
        found = _added(attention, dtype).view(-1, count if attention.dim() == 3 else 1, *scores)
        if attention.dim() == 3:
            ((first, last),) = heads.stretches[ranks.rank]
            found = found[:, first:last]
    if keys is not None:
        _check(keys, "key_padding_mask", [(batch, scores[1])])
        padding = _added(keys, dtype).view(batch, 1, 1, scores[1])
        found = padding if found is None else found + padding
    return found


def _check(mask: torch.Tensor, name: str, shapes: list[tuple]) -> None:
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; it must be {' or '.join(map(str, shapes))}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} is {mask.dtype}; it must be torch.bool, or floating point, which is added")


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
