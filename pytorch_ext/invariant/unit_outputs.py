"""Outputs of the units of a batch."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from weft.comm.communicator import Communicator
from weft.ops.backward import RankFunction, first_order
from weft.ops.invariant import Units, total_of_units

ATOMS = {int, float, bool, str, bytes, type(None), torch.dtype}


class JoinFunction(RankFunction):
    """y = the units' outputs one after another.

    backward  dy_unit = dy / W for ranks whose own losses are averaged: where the loss of W ranks is W times that of one
              process (a mean over a part of the batch), the division by a power of two makes the same bits of it
    """

    @staticmethod
    def forward(ctx, world: int, *parts):
        ctx.world, ctx.size = world, parts[0].size(0)
        ctx.set_materialize_grads(False)
        return torch.cat(parts)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        world = ctx.world
        if dy is None:
            return None, *[None] * (len(ctx.needs_input_grad) - 1)
        if world & (world - 1):
            raise ValueError(
                f"invariant: the average over {world} ranks of losses outside of the units rounds in another way than "
                "one process; compute the loss in model.in_units(...), or pass average=False and divide the loss by "
                "the size of the whole batch"
            )
        return None, *(dy if world == 1 else dy / world).split(ctx.size)


def mean_of_units(ranks: Communicator, units: Units, scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean over all units of all ranks of this rank's units' numbers. A collective call."""
    wide = torch.promote_types(scalars[0].dtype, torch.float32)
    return (total_of_units(ranks, units, [x.to(wide) for x in scalars]) / units.total).to(scalars[0].dtype)


def leaves_of(output: Any) -> Iterator[Any]:
    """Yield what is in a module's output: in lists, dicts, dataclasses and other trees that torch knows."""
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves_of([getattr(leaf, entry.name) for entry in dataclasses.fields(leaf)])
        else:
            yield leaf


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's output."""
    return [leaf for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor)]


def same(x: Any, y: Any) -> bool:
    """Return whether two numbers, texts or the like are equal."""
    return type(x) is type(y) and type(x) in ATOMS and x == y


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))
