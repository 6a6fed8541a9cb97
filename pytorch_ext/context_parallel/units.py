"""A sequence in units of positions, for models with `invariant`: the same bits on any number of ranks that share it.

A rank has some of the units, one after another, and every rule and every layer runs on one unit at a time. So its calls
have the same shapes on any number of ranks. A unit stands in the place of a rank: it is the `ranks` of a
`SharedSequence` that has this unit alone. Sums over the sequence are sums over units, in the tree of ops/invariant.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.comm.communicator import Communicator
from weft.ops.invariant import Units, used_by_units
from weft.rng import part_of


class UnitCall:
    """One call of a function on each unit of a sequence."""

    def __init__(self, ranks: Communicator, units: Units):
        self.ranks, self.units = ranks, units
        self._used: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self._sequences: dict[int, Any] = {}
        self._wholes: dict[int, torch.Tensor] = {}

    def used(self, x: torch.Tensor, unit: int) -> torch.Tensor:
        """Return x, which every rank has whole, for use with a unit; its gradient is summed over all units."""
        if id(x) not in self._used:
            self._used[id(x)] = x, used_by_units(self.ranks, self.units, x)
        return self._used[id(x)][1][unit - self.units.here(self.ranks).start]

    def note(self, unit: torch.Tensor, sequence: torch.Tensor) -> None:
        """Note the SharedSequence of a unit that the function is called with."""
        self._sequences[id(unit)] = sequence

    def sequence_of(self, unit: torch.Tensor) -> Any:
        """Return the SharedSequence that was noted for this unit; None for another tensor."""
        return self._sequences.get(id(unit))

    def whole_of(self, unit: torch.Tensor) -> torch.Tensor:
        """Return the whole of the unit's SharedSequence: the same tensor for each of its units."""
        x = self._sequences[id(unit)]
        if id(x) not in self._wholes:
            self._wholes[id(x)] = x.whole()
        return self._wholes[id(x)]


class Unit:
    """A unit of the sequence, in the place of a rank that shares it.

    Attributes:
        rank: number of the unit.
        world_size: number of units.
        call: the call that runs on the units.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self.call: UnitCall | None = None

    @contextmanager
    def during(self, call: UnitCall) -> Iterator[None]:
        """Make this the unit's call while the context lasts."""
        before, self.call = self.call, call
        try:
            with part_of("cp", self.rank):
                yield
        finally:
            self.call = before

    def used(self, x: torch.Tensor) -> torch.Tensor:
        """As `UnitCall.used`, for this unit."""
        assert self.call is not None
        return self.call.used(x, self.rank)

    def whole_of(self, unit: torch.Tensor) -> torch.Tensor:
        """As `UnitCall.whole_of`."""
        assert self.call is not None
        return self.call.whole_of(unit)
