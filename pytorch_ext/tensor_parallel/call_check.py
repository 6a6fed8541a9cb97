"""Checks that a plan is right for each kind of call of the model.

A plan is found, or checked, by one call. Other calls may compute something else: an argument has another number of
dimensions, and its dimension 1 is features instead of a sequence; an argument is no longer None; a flag of a module was
set afterwards. So the first call of each kind is followed too.
"""

from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import is_
from types import NoneType

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from weft.comm.communicator import Communicator
from weft.tensor_parallel.auto.example_inputs import calling
from weft.tensor_parallel.auto.plan import AutomaticPlan, conflict_in
from weft.tensor_parallel.auto.trace import without_values
from weft.tensor_parallel.plan_check import OwnPlan
from weft.tensor_parallel.transformers_calls import is_transformers

Conflict = Callable[[nn.Module, Callable, bool], str | None]  # (unsplit model, call, whether it trains) -> conflict


def call_checks(
    model: nn.Module, plan: AutomaticPlan | OwnPlan | None, ranks: Communicator | None
) -> "dict[str, CallCheck]":
    """Return the CallChecks of a model that is still unsplit, by module name.

    The model itself has the name "". If the plan followed parts of the model by themselves, each part has a check.
    There are none if the plan splits nothing, if the model cannot be copied, or for models of transformers, because
    their further arguments (masks, caches, labels) are known.
    """
    if plan is None or ranks is None:
        return {}
    if is_transformers(model) and (not isinstance(plan, AutomaticPlan) or all(_is_model(model, n) for n in plan.parts)):
        return {}
    if isinstance(plan, AutomaticPlan) and not plan.plan:
        return {}
    try:
        twin = without_values(model)
    except Exception:  # copying a user's objects may raise anything
        return {}
    if not isinstance(plan, AutomaticPlan):
        return {"": CallCheck(twin, partial(_own_conflict, plan), by_mode=True)}
    return {
        name: CallCheck(twin.get_submodule(name), partial(_automatic_conflict, own, ranks.world_size), by_mode=False)
        for name in plan.parts
        if (own := plan.of_part(name)).plan and (not name or any(twin.get_submodule(name).children()))
        if not _is_model(model, name)
    }


def _is_model(model: nn.Module, name: str) -> bool:
    return is_transformers(model.get_submodule(name))


def _own_conflict(own: OwnPlan, twin: nn.Module, call: Callable, training: bool) -> str | None:
    return own.misuse(twin, [call], training)


def _automatic_conflict(automatic: AutomaticPlan, world: int, twin: nn.Module, call: Callable, _) -> str | None:
    """Describe the conflict of a call with an automatic plan. Both training and evaluation are followed."""
    conflict = conflict_in(twin, world, automatic, call)
    return conflict and (
        f"{type(twin).__name__}: its automatic plan was found by another call than this, in which {conflict}. Find one "
        "by this call: plan=automatic_plan(model, world, example=...) of weft.tensor_parallel.auto; or write your own"
    )


class CallCheck:
    """Forward pre-hook that follows the first call of each kind. It raises ValueError before any communication.

    A call is of a new kind if its arguments are, or if an attribute of a module has changed.
    """

    def __init__(self, twin: nn.Module, conflict: Conflict, by_mode: bool):
        self.model, self.conflict, self.by_mode = twin, conflict, by_mode
        self.settings: Settings | None = None
        self.known: set[tuple] = set()
        self.numbers: Counter[tuple] = Counter()

    def install(self, model: nn.Module) -> None:
        """Check the calls of the model, which is split now, and compare its attributes."""
        self.settings = Settings(model, self.model)
        model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, module: nn.Module, args, kwargs) -> None:
        if torch.compiler.is_compiling():
            return
        settings = 0 if self.settings is None else self.settings.now()
        kind = (self.by_mode and module.training, settings, *kind_of_call(args, kwargs))
        if kind in self.known:
            return
        general = tuple(x[:1] if type(x) is tuple and x[0] in (int, float) else x for x in kind)
        if self.numbers[general] > MOST_NUMBERS:
            return
        conflict = self.conflict(self.model, calling(args, kwargs), module.training)
        if conflict is not None:
            raise ValueError(conflict)
        self.known.add(kind)
        self.numbers[general] += general != kind


MOST_NUMBERS = 8  # a number with more values than this is a counter and does not decide what the code computes
_SIMPLE = (bool, int, float, str, NoneType)
_OWN = {*vars(nn.Module()), "training", "_weft"}
_ABSENT = object()


class Settings:
    """Attributes that may decide what a model's own code computes: numbers, strings and flags.

    They are attributes of modules, and of plain objects and dicts that modules hold (a configuration). The split
    model's attributes already count this rank's features, so only their changes are copied to the twin.

    Args:
        model: the split model.
        twin: the unsplit copy without values.
    """

    def __init__(self, model: nn.Module, twin: nn.Module):
        unsplit, seen = dict(twin.named_modules()), set[int]()
        # (object or dict with the attribute, attribute name, its counterpart in the twin). In a deep copy of the model
        # these are the copy's objects.
        self.places: list[tuple[object, str, object]] = []
        for name, module in model.named_modules():
            own = unsplit.get(name)
            if (
                own is None
                or type(own) is not type(module)
                or type(module).__module__.partition(".")[0] in ("torch", "weft")
            ):
                continue
            for holder, twin_of_it in _holders(module, own):
                if id(holder) not in seen:
                    seen.add(id(holder))
                    names = [key for key, value in _in(holder).items() if _is_setting(key, value)]
                    self.places += [(holder, key, twin_of_it) for key in names]
            for kind in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
                names = [key for key, value in vars(kind).items() if _is_setting(key, value)]
                self.places += [(module, key, own) for key in names if key not in vars(module)]
        self.had: list[set] = [set() for _ in self.places]
        self.read: list = []
        self.key = self._look()

    def now(self) -> int:
        """Return a key of the attributes' values, without those of numbers that count something."""
        if not all(map(is_, self._read(), self.read)):
            self.key = self._look()
        return self.key

    def _look(self) -> int:
        before, self.read = self.read, self._read()
        for (_, key, twin_of_it), old, new in zip(self.places, before, self.read, strict=False):
            if new is _ABSENT:
                _in(twin_of_it).pop(key, None)
            elif _compared(new) != _compared(old):
                _in(twin_of_it)[key] = new
        for had, value in zip(self.had, self.read, strict=True):
            if len(had) <= MOST_NUMBERS:
                had.add(_compared(value))
        pairs = zip(self.had, self.read, strict=True)
        return hash(tuple(type(x) if len(had) > MOST_NUMBERS else _compared(x) for had, x in pairs))

    def _read(self) -> list:
        return [_in(holder).get(key, _ABSENT) for holder, key, _ in self.places]


def _in(holder) -> dict:
    return holder if isinstance(holder, dict) else vars(holder)


def _compared(value) -> tuple:
    """Return the value with its type, because True == 1."""
    return type(value), value if type(value) in _SIMPLE else None


def _is_setting(key: str, value) -> bool:
    return type(value) in _SIMPLE and key not in _OWN and not key.startswith("__")


def _holders(module: nn.Module, twin: nn.Module):
    """Yield a module and its twin, then the pairs of plain objects and dicts that both hold."""
    yield module, twin
    for key, value in vars(module).items():
        other = vars(twin).get(key)
        if key in _OWN or isinstance(value, type | nn.Module | torch.Tensor) or type(other) is not type(value):
            continue
        if isinstance(value, dict) or (hasattr(value, "__dict__") and not callable(value)):
            yield value, other


def kind_of_call(args, kwargs) -> tuple:
    """Return a key of a call: its argument structure, and for each leaf the value, or a tensor's kind.

    A tensor's kind is its number of dimensions, its dtype and whether it requires a gradient.
    """
    leaves, structure = tree_flatten((args, kwargs))
    return str(structure), *map(_kind, leaves)


def _kind(x):
    if isinstance(x, torch.Tensor):
        return x.dim(), x.dtype, x.requires_grad
    return (type(x), x) if isinstance(x, (*_SIMPLE, Enum, torch.dtype)) else type(x)
