"""Several units of a batch in one call of a function, with the bits that each has in a call of its own.

The batch is units one after another along the first dimension. A function of torch runs once for all of them if it
treats every row alone, with bits that depend on no other row. Any other one runs unit by unit, and its results are
joined along the first dimension. A number of each unit, such as its loss, is a vector of all units' numbers until the
call ends.

The first call of a kind is a `Trial` (trial.py), which writes down how every function runs. Later calls do as it is
written, and end with `PathChangedError` as soon as a function is not the one that is written next.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weft.context_parallel.shared_sequence import SharedSequence
from weft.forward import FunctionMode
from weft.invariant.exact_functions import functions_in_any_shape
from weft.ops.unit_parameters import ValueOfUnits, give_units, units_of
from weft.rng import UnitDraws

ROWS, NUMBERS = 1, 2  # how a tensor is cut into units: along the first dimension, or into one number for each
AS_IT_IS, EACH, BY_UNIT = range(3)
COMPARED = frozenset((int, float, bool, str, type(None), torch.dtype))
_BYTES = 64  # at which libraries choose other code

_METHODS = """
    size dim stride numel nelement element_size __len__ is_contiguous is_floating_point is_complex storage_offset
    _is_view
"""
_PROPERTIES = (
    "shape ndim dtype device layout requires_grad grad_fn is_cuda is_cpu is_meta is_nested is_leaf itemsize nbytes"
)
# They read no values.
READS: set[Callable] = {
    *[getattr(torch.Tensor, name) for name in _METHODS.split()],
    *[getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()],
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch._C._set_grad_enabled),
}


class PathChangedError(RuntimeError):
    """A function was called that was not called in the trial."""


class FunctionStep(NamedTuple):
    """How a function runs that the forward calls.

    Attributes:
        plain: the numbers, flags, texts and types among its arguments.
        how: AS_IT_IS; EACH: it makes a value of parameters that all units use, and once more for each; or BY_UNIT.
        cut: of the arguments by place or name: how they are cut into units; of a list, that of each element.
    """

    func: Callable
    plain: list
    how: int
    cut: dict[int | str, Any]


class AtOnce(UnitDraws):
    """Context in which functions run on several units of the batch.

    Args:
        path: the steps of the trial.
        units: numbers of the units.
        seed: that of the first unit of the batch.
    """

    def __init__(self, path: list[FunctionStep], units: range, seed: int):
        super().__init__(seed, functions_in_any_shape)
        self.path, self.units, self.seed = path, units, seed
        self._handlers_of = self.mode.table
        self.mode = FunctionMode(every=self.function, inside=SharedSequence, owner=self, passed=READS)
        self._number = 0

    def copy(self) -> "AtOnce":
        other = AtOnce(self.path, self.units, self.seed)
        other._before, other._number = self._before.copy(), self._number
        return other

    def function(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function as the next step says."""
        if self._number == len(self.path):
            raise PathChangedError
        step = self.path[self._number]
        if step.func is not func or step.plain != [x for x in (*args, *kwargs.values()) if type(x) in COMPARED]:
            raise PathChangedError
        self._number += 1
        return joined(self.by_unit(step, args, kwargs)) if step.how == BY_UNIT else self.run(step, args, kwargs)

    def end(self) -> None:
        """Check that all steps have run."""
        if self._number < len(self.path):
            raise PathChangedError

    def run(self, step: FunctionStep, args: tuple, kwargs: dict) -> Any:
        """Run a function once."""
        handler = self._handlers_of.get(step.func)
        result = step.func(*args, **kwargs) if handler is None else handler(step.func, args, kwargs)
        if step.how == EACH:
            each = self.by_unit(step, args, kwargs)
            for number, x in enumerate(result if isinstance(result, (tuple, list)) else ()):
                give_units(x, ValueOfUnits([of_unit[number] for of_unit in each]))
            if isinstance(result, torch.Tensor) and units_of(result) is None:
                give_units(result, ValueOfUnits(each))
        return result

    def by_unit(self, step: FunctionStep, args: tuple, kwargs: dict) -> list:
        """Run a function once for each unit, and return the results."""
        count, handler = len(self.units), self._handlers_of.get(step.func)
        if step.func is torch.Tensor.expand and step.how == BY_UNIT:
            args = _expanding(count, *args)
        places = [self._parts(x, step.cut.get(at)) for at, x in enumerate(args)]
        named = {name: self._parts(x, step.cut.get(name)) for name, x in kwargs.items()}
        results = []
        for number in range(count):
            self._seeds[:] = [self.seed + self.units[number]]
            own = tuple([parts[number] for parts in places])
            options = {name: parts[number] for name, parts in named.items()}
            results.append(step.func(*own, **options) if handler is None else handler(step.func, own, options))
        return results

    def _parts(self, x: Any, cut: Any) -> Sequence:
        """Return an argument's part of each unit, where a tensor of its own would be aligned too."""
        if type(x) in (list, tuple):
            every = [self._parts(y, of_y) for y, of_y in zip(x, cut or [None] * len(x), strict=True)]
            return [type(x)([parts[number] for parts in every]) for number in range(len(self.units))]
        if cut == ROWS:
            parts = x.chunk(len(self.units))
            return [y.clone() if y.storage_offset() * y.element_size() % _BYTES else y for y in parts]
        if cut == NUMBERS:
            return x.unbind()
        of_units = units_of(x)
        return [x] * len(self.units) if of_units is None else of_units.each(x)


def sizes_of(args: tuple) -> list[int]:
    """Return the sizes among the arguments of Tensor.expand."""
    return [*args] if isinstance(args[0], int) else [*args[0]]


def _expanding(count: int, x: torch.Tensor, *args) -> tuple:
    """Return the arguments of Tensor.expand for a unit, from those for the batch."""
    sizes = sizes_of(args)
    if x.size(0) == 1:
        sizes[0] //= count
    elif len(sizes) == x.dim():
        sizes[0] = -1
    return x, sizes


def joined(results: list) -> Any:
    """Return the units' results as one.

    Raises:
        PathChangedError: they have different shapes, which follow from values.
    """
    first = results[0]
    if isinstance(first, (tuple, list)):
        return type(first)([joined(list(same)) for same in zip(*results, strict=True)])
    if not isinstance(first, torch.Tensor):
        return first
    if any([x.shape != first.shape for x in results]):  # noqa: C419 - in fewer calls
        raise PathChangedError
    return torch.stack(results) if first.dim() == 0 else torch.cat(results)
