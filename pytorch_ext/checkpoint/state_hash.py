"""A hash of a model and its training that no mesh changes."""

from collections.abc import Sequence
from hashlib import blake2b
from math import prod

import torch
from torch import nn

from weft.arguments import check_module
from weft.checkpoint import contents, save_plan
from weft.checkpoint.boxes import Extent, TensorPart
from weft.checkpoint.contents import HeldTensor, Optimizers
from weft.checkpoint.on_all_ranks import ranks_of, together
from weft.comm.purpose import calls_for
from weft.comm.registry import Group

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 16  # elements: their hashes stay in a core's cache
_MODULUS = 1 << 64
# Odd factors, and shifts between them, after which one other bit of a number changes half of the bits of its hash
# (splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
_OF_PLACE, _FACTORS, _SHIFTS = 0x1E3779B97F4A7C15, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15), (30, 27, 31)


@calls_for("weft.state_hash, which every rank calls")
@torch.no_grad()
def state_hash(model: nn.Module, optimizer: Optimizers = None, *, group: Group = None) -> str:
    """Return a hash of every bit of the model and of the optimizer's state, the same on every rank and every mesh.

        print(step, weft.state_hash(model, optimizer))

    A collective call. Each rank reads its share once, and nothing but sums travels. Of a replicated tensor one rank's
    copy is read (`model.check_replicas()` compares them). Options of the optimizer's groups are not in the hash. State
    that only some meshes have is: the fp32 copies of a sharded optimizer's bf16 parameters. The hash finds differences;
    it does not stand against forgery.

    Args:
        model, optimizer, group: as for weft.save_checkpoint.

    Returns:
        16 hexadecimal digits.

    Raises:
        CheckpointError, ValueError, TypeError: as in weft.save_checkpoint.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        >>> alone = weft.state_hash(model)
        >>> weft.state_hash(weft.parallelize(model, weft.init_mesh(tp=2))) == alone
        True
    """
    check_module("state_hash", model)
    ranks = ranks_of(group)
    here: dict[str, dict[str, HeldTensor]] = {}

    def describe():
        here.update(contents.of_training(model, optimizer)[0])
        return save_plan.described(here)

    outlines, owner = save_plan.owners(together(ranks, describe), ranks.global_ranks)

    def sums():
        found: dict[tuple[str, str], int] = {}
        for place, held, part in save_plan.places_in(here):
            if owner[place] == ranks.rank:
                key = place.section, place.name
                found[key] = (found.get(key, 0) + _sum(part, held.shape)) % _MODULUS
        return found

    totals = dict.fromkeys(outlines, 0)
    for share in together(ranks, sums):
        for key, total in share.items():
            totals[key] = (totals[key] + total) % _MODULUS
    lines = [f"{section} {name} {outlines[section, name]} {total}" for (section, name), total in totals.items()]
    return blake2b("\n".join(sorted(lines)).encode(), digest_size=8).hexdigest()


def _sum(part: TensorPart, shape: Extent) -> int:
    """Return the sum of a hash of each element's bits and of its place in the whole tensor, modulo 2^64."""
    bits, offset = part.tensor.detach().view(_BITS[part.tensor.element_size()]), part.offset
    if not shape:
        bits, offset, shape = bits[None], (0,), (1,)
    return _sum_from(0, bits, offset, [prod(shape[dim + 1 :]) for dim in range(len(shape))]) % _MODULUS


def _sum_from(place: int, bits: torch.Tensor, offset: Extent, strides: Sequence[int]) -> int:
    """Return the sum for a box that begins at `offset` from a place; its dimensions have these strides in the whole."""
    if bits.dim() > 1 and bits[0].numel() > _AT_ONCE:
        each = enumerate(bits, offset[0])
        return sum(_sum_from(place + row * strides[0], x, offset[1:], strides[1:]) for row, x in each)
    columns = torch.full((), place, dtype=torch.int64, device=bits.device)
    for begin, size, stride in zip(offset[1:], bits.shape[1:], strides[1:], strict=True):
        columns = columns[..., None] + torch.arange(begin, begin + size, device=bits.device) * stride
    total, first = 0, offset[0]
    for some in bits.split(max(1, _AT_ONCE // columns.numel())):
        rows = torch.arange(first, first + len(some), device=bits.device) * strides[0]
        mixed = (rows.view(-1, *[1] * columns.dim()) + columns) * _OF_PLACE + some
        for factor, shift in zip(_FACTORS, _SHIFTS, strict=False):
            mixed = (mixed ^ _shifted(mixed, shift)) * factor
        total += int((mixed ^ _shifted(mixed, _SHIFTS[-1])).sum())
        first += len(some)
    return total


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return x shifted to the right without its sign, which `>>` would repeat: x and ~x would have one hash."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
