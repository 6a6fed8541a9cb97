"""Dropout masks of attention, from random numbers that depend on positions and not on the rank that draws them."""

import torch

from weft.kernels.attention_rules import Rules


def dropout_mask(rules: Rules, batch: int, heads: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return [B, H, Sq, Sk], True where the pair is kept: where its 32 random bits are at least dropout 2^32."""
    counters = (
        key.view(1, 1, 1, -1),
        query.view(1, 1, -1, 1),
        (torch.arange(heads, device=key.device) + rules.head_start).view(1, -1, 1, 1),
        torch.arange(batch, device=key.device).view(-1, 1, 1, 1),
    )
    return philox(torch.broadcast_tensors(*counters), rules.seed) >= round(rules.dropout * 2**32)


def philox(counters, seed: int, rounds: int = 7) -> torch.Tensor:
    """Return the first 32 bits of Philox 4x32 (Salmon et al. 2011, section 3.3), the same bits as the kernel's.

    The arithmetic is in int64.

    Args:
        counters: four tensors of 32-bit numbers.
        seed: 64 bits, the two words of the key.
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
    """Return the high and low 32 bits of a product of 32-bit numbers, computed in halves that stay below 2^63."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & 0xFFFFFFFF
