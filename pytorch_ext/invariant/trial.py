"""The first call of several units at once, which finds out how each function runs.

The trial follows which unit each element of every tensor belongs to. A function runs once for all units if it is in one
of the tables here, and works there along dimensions that hold no other unit. Others run unit by unit, which needs
tensors that are units one after another. What cannot be followed raises `NotAloneError`, and calls of that kind run
the whole forward unit by unit.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from weft.invariant.at_once import (
    AS_IT_IS,
    BY_UNIT,
    COMPARED,
    EACH,
    NUMBERS,
    ROWS,
    AtOnce,
    FunctionStep,
    joined,
    sizes_of,
)
from weft.invariant.exact_functions import PRODUCTS, heads_alone
from weft.ops import column_parallel_linear, invariant, row_parallel_linear
from weft.ops.mappings import gather
from weft.ops.unit_parameters import ParameterOfUnits, units_of
from weft.rng import DROPS, drops

# Names of functions and methods, without underscores around them. tests/helpers/bits_of_rows.py tries them
# on CPUs: forward and backward have the same bits for any number of rows.
_ELEMENTS = """
    add radd sub rsub mul rmul div rdiv truediv rtruediv neg abs relu square reciprocal sqrt maximum minimum clamp
    clamp_min clamp_max where masked_fill eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or
    bitwise_not and or invert isnan isinf floor ceil round sign silu gelu mish softplus elu selu celu logsigmoid tanh
    sigmoid exp log erf pow rsqrt to type type_as float half bfloat16 double int long bool clone contiguous detach
    zeros_like ones_like
"""
_VIEWS = """
    view reshape transpose permute unsqueeze squeeze flatten unflatten split chunk getitem narrow select cat stack
    movedim swapaxes unbind t T mT view_as reshape_as
"""
EVERY_ELEMENT, MOVES = frozenset(_ELEMENTS.split()), frozenset(_VIEWS.split())
EVERY_ROW = frozenset(("softmax", "log_softmax", "sum", "mean", "layer_norm"))
LINEAR = {F.linear, column_parallel_linear, row_parallel_linear}
OVER_POSITIONS = {invariant.used_by_units, invariant.total_of_units}  # sums of the same element of several tensors
# Autograd's nodes between a unit's functions and the batch.
_BORDERS = ("SplitBackward0", "UnbindBackward0", "CloneBackward0", "_EachUnitFunctionBackward")


class NotAloneError(Exception):
    """A call that cannot run on several units at once."""


class _UnitMark(NamedTuple):
    """What a trial knows of a tensor.

    Attributes:
        x: the tensor, which must live as long as its id is known.
        units: [...] as x: number of the unit of each element, -1 for an element of no unit; None if no element has one.
        numbers: x is one number for each unit.
    """

    x: torch.Tensor
    units: torch.Tensor | None
    numbers: bool = False

    @property
    def trains(self) -> bool:
        return self.x.requires_grad and torch.is_grad_enabled()

    @property
    def all_units(self) -> torch.Tensor:
        return torch.full_like(self.x, -1, dtype=torch.int16) if self.units is None else self.units


class _FunctionCall:
    """A call of a function.

    Attributes:
        name: the function's, without underscores around it.
        marks: of its tensors, by place or name.
        inside: marks of tensors in its lists.
    """

    def __init__(self, func: Callable, args: tuple, kwargs: dict, mark_of: Callable[[torch.Tensor], _UnitMark]):
        self.func, self.args, self.kwargs = func, args, kwargs
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]
        self.in_place = (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        self.name = name.strip("_")
        if func in DROPS and func is not F.scaled_dot_product_attention and not drops(func, args, kwargs):
            self.name = "clone"
        tensors: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        self.marks = {at: mark_of(x) for at, x in tensors.items() if isinstance(x, torch.Tensor)}
        self.lists = {
            at: [mark_of(y) if isinstance(y, torch.Tensor) else None for y in x]
            for at, x in tensors.items()
            if type(x) in (tuple, list)
        }
        self.inside = [mark for of_list in self.lists.values() for mark in of_list if mark is not None]
        self.every = [*self.marks.values(), *self.inside]

    def argument(self, name: str, place: int) -> Any:
        return self.kwargs.get(name, self.args[place] if len(self.args) > place else None)

    def step(self, how: int, cut: dict[int | str, Any] | None = None) -> FunctionStep:
        plain = [x for x in (*self.args, *self.kwargs.values()) if type(x) in COMPARED]
        return FunctionStep(self.func, plain, how, cut or {})


class Trial(AtOnce):
    """Context of a first call.

    Args:
        units, seed: as AtOnce.
        batch: tensors that are units one after another.
        others: all tensors that the function may use besides.

    Attributes:
        drew: functions have dropped elements.
    """

    def __init__(self, units: range, seed: int, batch: Iterable[torch.Tensor], others: Iterable[torch.Tensor]):
        super().__init__([], units, seed)
        self._marks: dict[int, _UnitMark] = {}
        self._parameters: set[ParameterOfUnits] = set()
        for x in others:
            self._mark(x, None)
        for x in batch:
            self._mark(x, self._one_after_another(x))
            self._size = x.size(0)
        self._arguments = {mark.x.untyped_storage().data_ptr() for mark in self._marks.values()}
        self.drew = False

    def end(self) -> None:
        """Check the order in which autograd would add the gradients of a parameter."""
        for of_units in self._parameters:
            if of_units.products and of_units.others and of_units.products + of_units.others > 2:
                raise NotAloneError("a parameter in products and in other functions")

    def function(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function, and write down how."""
        call = _FunctionCall(func, args, kwargs, self._mark_of)
        self._number += 1
        before = torch.get_rng_state()
        if all(mark.units is None for mark in call.every):
            result = self._of_no_unit(call)
        else:
            if call.in_place and not self._may_write(next(iter(call.marks.values()))):
                raise NotAloneError(call.name)
            units = self._units_of_results(call)
            result = self._by_unit(call) if units is None else self._at_once(call, units)
        if not torch.equal(before, torch.get_rng_state()):
            raise NotAloneError(call.name)  # each unit draws numbers of its own
        return result

    def _may_write(self, mark: _UnitMark) -> bool:
        """Return whether a tensor has rows of units, and is none of the arguments, which may be needed again."""
        return mark.units is not None and mark.x.untyped_storage().data_ptr() not in self._arguments

    def _run(self, call: _FunctionCall, how: int) -> Any:
        self.path.append(call.step(how))
        return self.run(self.path[-1], call.args, call.kwargs)

    def _of_no_unit(self, call: _FunctionCall) -> Any:
        trained = any(units_of(mark.x) for mark in call.every)
        expands = call.func is torch.Tensor.expand and call.args[0].shape[:1] == (1,)
        if expands and sizes_of(call.args[1:])[0] == self._size:  # it becomes rows of the batch
            return self._by_unit(call)
        if drops(call.func, call.args, call.kwargs) or (call.in_place and trained):
            raise NotAloneError(call.name)
        result = self._run(call, EACH if trained else AS_IT_IS)
        for x in _tensors(result):
            self._mark(x, None)
        return result

    def _at_once(self, call: _FunctionCall, units: list[torch.Tensor]) -> Any:
        result = self._run(call, AS_IT_IS)
        found = _tensors(result)
        if not found or len(found) != len(units) or any(x.dim() != y.dim() for x, y in zip(found, units, strict=True)):
            raise NotAloneError(call.name)
        numbers = any(mark.numbers for mark in call.every)
        for x, of_x in zip(found, units, strict=True):
            self._mark(x, of_x.expand(x.shape), numbers)
        return result

    def _by_unit(self, call: _FunctionCall) -> Any:
        trained = [id(mark.x) for mark in call.every if mark.trains]
        if call.in_place or len(trained) > len(set(trained)):  # autograd would add gradients in another order
            raise NotAloneError(call.name)
        cut: dict[int | str, Any] = {at: self._cut(call, mark) for at, mark in call.marks.items()}
        for at, marks in call.lists.items():
            cut[at] = [None if mark is None else self._cut(call, mark) for mark in marks]
        self.path.append(call.step(BY_UNIT, cut))
        dropped = self._before.total()
        results = self.by_unit(self.path[-1], call.args, call.kwargs)
        self.drew = self.drew or self._before.total() > dropped
        if _uses_twice(results[0]):
            raise NotAloneError(call.name)  # autograd would add gradients in another order
        result, of_first = joined(results), _tensors(results[0])
        if not of_first:
            raise NotAloneError(call.name)
        for x, first in zip(_tensors(result), of_first, strict=True):
            self._mark(x, self._one_after_another(x), first.dim() == 0)
        return result

    def _cut(self, call: _FunctionCall, mark: _UnitMark) -> int | None:
        if mark.units is None:
            if mark.trains and units_of(mark.x) is None:
                raise NotAloneError(call.name)
            return None
        if not mark.numbers and not torch.equal(mark.units, self._one_after_another(mark.x)):
            raise NotAloneError(call.name)
        return NUMBERS if mark.numbers else ROWS

    def _units_of_results(self, call: _FunctionCall) -> list[torch.Tensor] | None:
        """Return the unit of each element of the results; None if the function must run unit by unit."""
        marks = list(call.marks.values())
        trained = [mark.x for mark in call.every if mark.units is None and mark.trains]
        if trained and (call.func not in LINEAR or any(type(units_of(x)) is not ParameterOfUnits for x in trained)):
            return None  # only products keep the gradients of units apart
        numbers = any(mark.numbers for mark in call.every)
        if call.func in OVER_POSITIONS:
            units = _agreed(call, [mark.all_units for mark in call.every])
            return [units] * (len(call.args[1].here(call.args[0])) if marks else 1)
        if call.name in EVERY_ELEMENT and not call.inside:
            return self._of_every_element(call, marks, numbers)
        if numbers or (0 not in call.marks and not call.inside):
            return None
        if call.name in MOVES:
            return _of_moved(call, marks)
        if call.func in PRODUCTS and len(marks) == 2 and min(mark.x.dim() for mark in marks) > 2:
            return _of_product(call, marks[0].all_units, marks[1].all_units)
        if call.func is F.scaled_dot_product_attention:
            return _of_attention(call, marks)
        if call.func is gather:
            dim = call.args[1]
            return [marks[0].all_units.narrow(dim, 0, 1)] if _is_one(marks[0].all_units, (dim,)) else None
        if any(mark.units is not None for mark in marks[1:]) or not _along_the_last_dim(call, marks):
            return None
        units = marks[0].all_units
        apart = not trained or torch.equal(units, self._one_after_another(marks[0].x))  # as products take them
        if not apart or not _is_one(units, (-1,)):
            return None
        removed = call.name in ("sum", "mean") and not call.argument("keepdim", 2)
        return [units[..., 0] if removed else units[..., :1]]

    def _of_every_element(self, call: _FunctionCall, marks: list[_UnitMark], numbers: bool):
        if (call.name == "pow" and len(marks) > 1) or "alpha" in call.kwargs:
            return None
        shape = torch.broadcast_shapes(*[mark.x.shape for mark in marks])
        if any(mark.units is not None and mark.trains and mark.x.shape != shape for mark in marks):
            return None  # backward adds up over other dimensions
        if numbers and any(mark.x.dim() for mark in marks if not mark.numbers):
            raise NotAloneError(call.name)
        return [_agreed(call, [mark.units.expand(shape) for mark in marks if mark.units is not None])]

    def _one_after_another(self, x: torch.Tensor) -> torch.Tensor:
        """Return the unit of each element of a tensor that is units one after another."""
        count = len(self.units)
        if x.dim() == 0 or x.size(0) % count:
            raise NotAloneError("a first dimension of no such units")
        numbers = torch.arange(count, dtype=torch.int16).repeat_interleave(x.size(0) // count)
        return numbers.view(-1, *[1] * (x.dim() - 1)).expand(x.shape)

    def _mark(self, x: torch.Tensor, units: torch.Tensor | None, numbers: bool = False) -> None:
        self._marks[id(x)] = _UnitMark(x, units, numbers)

    def _mark_of(self, x: torch.Tensor) -> _UnitMark:
        of_units = units_of(x)
        if type(of_units) is ParameterOfUnits:
            self._parameters.add(of_units)
        mark = self._marks.get(id(x))
        if mark is None and of_units is None and not isinstance(x, nn.Parameter):
            raise NotAloneError("a tensor that no function of torch has made")
        return mark or _UnitMark(x, None)

    def cut_of(self, x: torch.Tensor) -> int:
        """Return how an output is cut into units."""
        mark = self._mark_of(x)
        if mark.units is None or not torch.equal(mark.units, self._one_after_another(x)):
            raise NotAloneError("an output of no units")
        return NUMBERS if mark.numbers else ROWS


def _uses_twice(result: Any) -> bool:
    """Return whether a unit's result follows in two ways from the same part of a tensor, or view of a parameter."""
    nodes = [x.grad_fn for x in _tensors(result) if x.grad_fn is not None]
    seen, uses = set(nodes), set()
    while nodes:
        for use in nodes.pop().next_functions:
            node = use[0]
            if node is None:
                continue
            if node.name() in _BORDERS:
                if use in uses:
                    return True
                uses.add(use)
            elif node not in seen:
                seen.add(node)
                nodes.append(node)
    return False


def _is_one(units: torch.Tensor, dims: Sequence[int]) -> bool:
    """Return whether all elements along the dimensions are of one unit."""
    return all(torch.equal(units, units.narrow(dim, 0, 1).expand(units.shape)) for dim in dims)


def _agreed(call: _FunctionCall, of_tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the unit of each element, which is that of all tensors that have one."""
    found = of_tensors[0]
    for units in of_tensors[1:]:
        if ((units != found) & (units >= 0) & (found >= 0)).any():
            raise NotAloneError(f"{call.name} of several units")
        found = torch.maximum(found, units)
    return found


def _of_moved(call: _FunctionCall, marks: list[_UnitMark]) -> list[torch.Tensor] | None:
    if call.inside:
        return None if marks else _tensors(call.func([x.all_units for x in call.inside], *call.args[1:], **call.kwargs))
    func = torch.Tensor.reshape if call.name == "view" else call.func
    return _tensors(func(marks[0].all_units, *call.args[1:], **call.kwargs)) if len(marks) == 1 else None


def _of_product(call: _FunctionCall, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the units of a @ b, for a [..., M, K] and b [..., K, N]."""
    if a.shape[:-2] != b.shape[:-2] or not _is_one(a, (-1,)) or not _is_one(b, (-2,)):
        return None
    shape = (*a.shape[:-1], b.size(-1))
    return [_agreed(call, [a[..., :1].expand(shape), b[..., :1, :].expand(shape)])]


def _of_attention(call: _FunctionCall, marks: list[_UnitMark]) -> list[torch.Tensor] | None:
    if list(call.marks)[:3] != [0, 1, 2] or any(mark.units is not None for mark in marks[3:]):
        return None
    of_operands = [mark.all_units for mark in marks[:3]]
    alone = heads_alone(*call.args, **call.kwargs) and all(_is_one(units, (1, 2, 3)) for units in of_operands)
    return [_agreed(call, [units[:, :1, :1, :1] for units in of_operands])] if alone else None


def _along_the_last_dim(call: _FunctionCall, marks: list[_UnitMark]) -> bool:
    """Return whether a function works along the last dimension, with bits that follow from that row alone."""
    x, last = marks[0].x, (-1, marks[0].x.dim() - 1)
    if call.func is F.linear:
        return x.dtype in invariant.DTYPES and x.device.type == "cpu" and len(marks) > 1 and marks[1].x.dim() == 2
    if call.func in LINEAR:
        return call.args[3].sequence_dim is None
    if call.name == "layer_norm":
        return len(call.argument("normalized_shape", 1)) == 1
    dims = call.argument("dim", 1)
    return call.name in EVERY_ROW and (dims[0] if isinstance(dims, (list, tuple)) and len(dims) == 1 else dims) in last


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for part in result for x in _tensors(part)] if isinstance(result, (tuple, list)) else []
