"""Sums of the bits of tensors, by which ranks compare them."""

import torch

from weft.sharding.quantized import is_quantized, numbers_in
from weft.sharding.sharded_grad import local

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits as integers, which is the same in any order."""
    return _bits(x).sum(dtype=torch.int64)


def mark_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Return a sum of the bits that depends on the order of rows and positions.

    It differs between ranks that each shuffle the batch.
    """
    bits = _bits(x)
    mark = bits.sum(dtype=torch.int64)
    for dim, size in enumerate(bits.shape):
        others = [other for other in range(bits.ndim) if other != dim]
        line = bits.sum(others, dtype=torch.int64) if others else bits
        mark = 31 * mark + (line * torch.arange(1, size + 1, device=x.device)).sum()
    return mark


def _bits(x: torch.Tensor) -> torch.Tensor:
    if is_quantized(x):
        return torch.cat([_bits(numbers).flatten().long() for _, numbers in numbers_in(x)])
    numbers = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return local(numbers.detach()).contiguous().view(_INTEGERS[numbers.element_size()])
