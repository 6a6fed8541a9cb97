"""Attention of a chunk in plain PyTorch, probabilities and all: what the attention kernels are compared with."""

import torch

from weft.kernels.attention import Positions, Rules


def attention(
    q,
    k,
    v,
    rules: Rules,
    *,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
    query_documents=None,
    key_documents=None,
    sinks=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, H, Sq, Dv] and lse [B, H, Sq], in the inputs' own type; arguments as for the kernel. Differentiable."""
    repeats = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    query = expand_positions(query_positions or Positions(0, q.size(2)), q.device)
    key = expand_positions(key_positions or Positions(0, k.size(2)), q.device)
    scores = q @ k.transpose(-1, -2) * (q.size(-1) ** -0.5 if rules.scale is None else rules.scale)
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    ahead = key[None, :] - query[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if rules.left is not None:
        hidden = hidden | (ahead < -rules.left)
    if rules.right is not None:
        hidden = hidden | (ahead > rules.right)
    if query_documents is not None:
        hidden = hidden | (query_documents[:, None, :, None] != key_documents[:, None, None, :])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    if scores.size(-1) == 0:
        return scores @ v, q.new_full(q.shape[:3], -torch.inf)  # no key, no sum
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))[..., : k.size(2)]
    if rules.dropout:
        kept = dropout_mask(rules, q.size(0), q.size(1), query, key)
        weights = weights * kept.to(weights.dtype) / (1 - rules.dropout)
    return weights @ v, lse


def expand_positions(positions: Positions, device=None) -> torch.Tensor:
    """One position for each row."""
    start, length, second_start, second_length = positions
    runs = [torch.arange(start, start + length), torch.arange(second_start, second_start + second_length)]
    return torch.cat(runs).to(device)


def dropout_mask(rules: Rules, batch: int, heads: int, query, key) -> torch.Tensor:
    """[B, H, Sq, Sk] of what is kept: where 32 random bits are at least dropout 2^32."""
    counters = torch.broadcast_tensors(
        key.view(1, 1, 1, -1),
        query.view(1, 1, -1, 1),
        (torch.arange(heads, device=key.device) + rules.head_start).view(1, -1, 1, 1),
        torch.arange(batch, device=key.device).view(-1, 1, 1, 1),
    )
    return philox(counters, rules.seed) >= round(rules.dropout * 2**32)


def philox(counters, seed: int, rounds: int = 7) -> torch.Tensor:
    """The first 32 bits of Philox 4x32 (Salmon et al. 2011, section 3.3), in int64 arithmetic.

    Args:
        counters: four tensors of 32-bit numbers; seed: 64 bits, the key's two words.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (counter & mask for counter in counters)
    key0, key1 = seed & mask, (seed >> 32) & mask
    for _ in range(rounds):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    return c0


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32-bit numbers, in halves that stay below 2^63."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & 0xFFFFFFFF
