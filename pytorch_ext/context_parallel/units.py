"""A sequence in units of positions, for models with `invariant`: the same bits on any number of ranks that share it.

A rank has some of the units, one after another, and every rule and every layer runs on one unit at a time. So its calls
have the same shapes on any number of ranks. A unit is modelled as a group of one rank, the `ranks` of
a `SharedSequence` that has this unit alone. Sums over the sequence are sums over units, in the tree of ops/invariant.
"""

from typing import Any

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.context_parallel.given_out import give_out
from weft.context_parallel.learning import state
from weft.ops.invariant import Units, used_by_units
from weft.rng import parts_of_functions


class UnitCall:
    """One call of a function on each unit of a sequence.

    Attributes:
        sequences: by the id of each unit that the function is called with, its SharedSequence.
    """

    def __init__(self, ranks: Communicator, units: Units):
        self.ranks, self.units = ranks, units
        self._used: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self.sequences: dict[int, Any] = {}
        self._wholes: dict[int, torch.Tensor] = {}

    def used(self, x: torch.Tensor, unit: int) -> torch.Tensor:
        """Return x, which every rank has whole, for use with a unit; its gradient is summed over all units.

        A parameter is given out once in a forward.
        """
        place = unit - self.units.here(self.ranks).start
        if state.parameters is not None and x.requires_grad and isinstance(x, nn.Parameter):
            if id(x) not in state.parameters:
                with torch._C.DisableTorchFunction():
                    state.parameters[id(x)] = x, [part[0] for part in give_out(self.ranks, self.units.total, [x])]
            return state.parameters[id(x)][1][place]
        if id(x) not in self._used:
            self._used[id(x)] = x, used_by_units(self.ranks, self.units, x)
        return self._used[id(x)][1][place]

    def sequence_of(self, unit: torch.Tensor) -> Any:
        """Return the SharedSequence of this unit; None for another tensor."""
        return self.sequences.get(id(unit))

    def whole_of(self, unit: torch.Tensor) -> torch.Tensor:
        """Return the whole of the unit's SharedSequence: the same tensor for each of its units."""
        x = self.sequences[id(unit)]
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

    def during(self, call: UnitCall) -> "_During":
        """Return a context in which this is the unit's call, and functions get this unit."""
        return _During(self, call)

    def used(self, x: torch.Tensor) -> torch.Tensor:
        """As `UnitCall.used`, for this unit."""
        assert self.call is not None
        return self.call.used(x, self.rank)

    def whole_of(self, unit: torch.Tensor) -> torch.Tensor:
        """As `UnitCall.whole_of`."""
        assert self.call is not None
        return self.call.whole_of(unit)


class _During:
    def __init__(self, unit: Unit, call: UnitCall):
        self._unit, self._call, self._before = unit, call, unit.call

    def __enter__(self) -> None:
        self._unit.call = self._call
        parts_of_functions.append(("cp", self._unit.rank))

    def __exit__(self, *_) -> None:
        self._unit.call = self._before
        parts_of_functions.pop()
