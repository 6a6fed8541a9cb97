"""Dropout of split tensors: each rank, or each unit, draws its own random numbers; then all ranks draw alike again."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.ops.invariant import Units, in_own_memory
from weft.rng import device_of, own_random_numbers, part_of

SEVERAL = "several"  # `drops` of a module that drops split features in several places, which has no form in units


class PartDrops:
    """Handler of dropouts and attentions of split tensors, in which each part draws random numbers of its own.

    Args:
        invariant: each of so many units of the split features draws its own numbers, on any number of ranks.
        drops: with `invariant`, where the split features are; see `drop_in_units`.
    """

    def __init__(self, ranks: Communicator, invariant: int | None = None, drops: tuple[int, int] | None = None):
        self.ranks, self.drops = ranks, drops
        self.units = None if invariant is None else Units(invariant)

    def __call__(self, func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
        if self.units is not None:
            in_units = attend_in_units if func is F.scaled_dot_product_attention else drop_in_units
            return in_units(self.ranks, self.units, self.drops, *args, **kwargs)
        with own_random_numbers(self.ranks, device_of(args, kwargs)):
            return func(*args, **kwargs)


class _OwnRandomNumbers(nn.Module):
    """A dropout of split tensors; `invariant` and `drops` as for PartDrops."""

    function: Callable

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        group: Group = None,
        invariant: int | None = None,
        drops: tuple[int, int] | None = None,
    ):
        super().__init__(p, inplace)  # type: ignore[call-arg]
        self.communicator = communicator(group)
        self._part_drops = PartDrops(self.communicator, invariant, drops)

    @classmethod
    def from_dropout(cls, dropout, **options):
        """Return the replacement of a dropout."""
        return cls(dropout.p, dropout.inplace, **options).train(dropout.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return super().forward(x)  # type: ignore[misc]
        return self._part_drops(type(self).function, (x, self.p, True, self.inplace), {})


class ShardedDropout(_OwnRandomNumbers, nn.Dropout):
    """nn.Dropout between a column and a row layer (of split features or heads), or in a sequence-parallel region.

    Here nn.Dropout itself would be wrong: it drops the same places of every rank's part, and after uneven parts the
    ranks draw different numbers for good. Elsewhere nn.Dropout is right: ranks with the same seed drop the same
    elements of a tensor that all of them have.
    """

    function = F.dropout


class OwnDropout2d(_OwnRandomNumbers, nn.Dropout2d):
    """ShardedDropout that drops whole channels, for use between split convolutions."""

    function = F.dropout2d


def split_dim(dims: int) -> int:
    """Return the usual split dimension of a tensor with so many: heads of weights [batch, heads, T, S], or features."""
    return 1 if dims > 3 else dims - 1


def drop_in_units(
    ranks: Communicator,
    units: Units,
    drops: tuple[int, int] | None,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Return F.dropout of this rank's units of split features or heads, with the random numbers of each unit.

    Args:
        drops: (dimension, full size of the split axis inside it), as (0, heads) of weights [batch * heads, T, S].
            None: all of the default dimension, that of split features.

    Raises:
        ValueError: the split features are not as many equal units.
    """
    dim, size = drops or (split_dim(input.dim()), ranks.world_size * input.size(split_dim(input.dim())))
    apart = input.unflatten(dim, (-1, size // ranks.world_size))
    # CUDA's dropout gives the elements of a view other numbers than those of a tensor with memory of its own.
    ys = [F.dropout(in_own_memory(x), p, training) for (x,) in _each_unit(ranks, units, apart, dim=dim + 1)]
    y = torch.cat(ys, dim + 1).flatten(dim, dim + 1)
    return input.copy_(y) if inplace else y


def attend_in_units(
    ranks: Communicator,
    units: Units,
    drops: tuple[int, int] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options,
) -> torch.Tensor:
    """Return F.scaled_dot_product_attention of this rank's units of heads, with the random numbers of each unit.

    Args:
        drops: as `drop_in_units`, of the query. None: the heads are the third dimension from the end.
    """
    if drops is not None:
        dim, size = drops

        def apart(x: torch.Tensor) -> torch.Tensor:
            return x if x.dim() < query.dim() else x.unflatten(dim, (-1, size // ranks.world_size))

        mask = None if attn_mask is None else apart(attn_mask)
        q, k, v = map(apart, (query, key, value))
        return attend_in_units(ranks, units, None, q, k, v, mask, dropout_p, is_causal, **options).flatten(dim, dim + 1)
    by_head = attn_mask is not None and attn_mask.dim() > 2 and attn_mask.size(-3) > 1
    split = (query, key, value, attn_mask) if by_head else (query, key, value)
    ys = []
    for q, k, v, *own_mask in _each_unit(ranks, units, *split, dim=-3):
        mask = own_mask[0] if own_mask else attn_mask
        ys.append(F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **options))
    return torch.cat(ys, -3)


def _each_unit(
    ranks: Communicator, units: Units, *tensors: torch.Tensor, dim: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield each unit's part of the tensors, and say that it runs meanwhile."""
    here = units.here(ranks)
    for x in tensors:
        if x.size(dim) % len(here):
            raise ValueError(
                f"invariant={units.total}: dimension {dim % x.dim()} of {tuple(x.shape)} is not the {len(here)} equal "
                f"units of one of {ranks.world_size} ranks"
            )
    for unit, parts in zip(here, zip(*(x.chunk(len(here), dim) for x in tensors), strict=True), strict=True):
        with part_of("tp", unit):
            yield parts
