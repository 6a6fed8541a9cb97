"""Checks that a plan is right for a model: before the model changes, and in the first call of each kind.

A plan is found, or checked, by one call. Other calls may compute something else: an argument has another number of
dimensions, and its dimension 1 is features instead of a sequence; an argument is no longer None; a flag of a module was
set afterwards. So the first call of each kind is followed too (CallCheck).

Of a model that could not be followed as a whole, parts were followed one by one. The code around them is unknown and
may do more than call the parts: it may add up a weight that is split over ranks, or call a layer of a part by itself.
That is found when the model runs (PartUses).
"""

import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate
from operator import is_
from types import NoneType

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from weft.comm.communicator import Communicator
from weft.forward import FunctionMode
from weft.forward.running import followed, is_running
from weft.nn import OwnDropout2d, ParallelEmbedding, ParallelLinear, ParallelMultiheadAttention, ShardedDropout
from weft.nn.sharded import ShardedModule, ShardHolder
from weft.sharding.sizes import Cut
from weft.tensor_parallel.auto.example_inputs import calling, calls
from weft.tensor_parallel.auto.plan import AutomaticPlan, conflict_in
from weft.tensor_parallel.auto.propagation import Flow, Propagation
from weft.tensor_parallel.auto.trace import Trace, tensors_in, trace, without_values
from weft.tensor_parallel.local_sizes import SIZES, draws_for_parts, has_numbers
from weft.tensor_parallel.split import SplitLayers
from weft.tensor_parallel.transformers_calls import attentions, is_transformers, prepare

_log = logging.getLogger(__name__)
_FOLLOWED = (ParallelLinear, ParallelEmbedding, ParallelMultiheadAttention, ShardedDropout, OwnDropout2d)


class PlanCheck:
    """The checks of the plan that splits a model's layers, made while the model is still unsplit.

    Args:
        ranks: the ranks that split the layers; None: there are none, and nothing is checked.
        in_units: check that what drops parts does so in units.
        checks: as in `weft.parallelize`; "off" leaves out the checks of calls.

    Raises:
        ValueError: the user's own plan is wrong for a call of the model that can be guessed.
    """

    def __init__(self, model: nn.Module, split: SplitLayers, ranks: Communicator | None, in_units: bool, checks: str):
        self._calls: dict[str, CallCheck] = {}  # by the name of the module whose calls are followed
        self._own = ranks is not None and ranks.world_size > 1 and split.automatic is None and bool(split.replacements)
        self._uses: PartUses | None = None
        if ranks is None:
            return
        plan = split.automatic or _own_plan(model, split, ranks.world_size, in_units)
        if isinstance(plan, OwnPlan) and (misuse := plan.misuse(model, calls(model, constants=True), model.training)):
            raise ValueError(misuse)
        if plan is None or checks == "off" or (isinstance(plan, AutomaticPlan) and not plan.plan):
            return
        self._calls = _call_checks(model, plan, ranks.world_size)
        if isinstance(plan, AutomaticPlan) and plan.parts != ("",):
            self._uses = PartUses(plan.parts)

    def install(self, model: nn.Module, called: nn.Module) -> None:
        """Check the calls of the model, which is split now; `called` is the module that calls it for the user."""
        if self._own:
            model.register_forward_hook(_explain_shape, always_call=True)  # also behind an error
        if self._uses is not None:
            self._uses.install(model)
        for name, check in self._calls.items():
            check.install(model.get_submodule(name) if name else called)


# The user's own plan


def _explain_shape(model: nn.Module, args, output) -> None:
    """Say which module counts whole features, if a call fails by the shape of a part. Torch calls it then too."""
    error = sys.exc_info()[1]
    if output is not None or not isinstance(error, RuntimeError) or "is invalid for input of size" not in str(error):
        return
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for module in reversed([caller for caller in callers if isinstance(caller, nn.Module)]):
        if split := [name for name, child in module.named_children() if isinstance(child, ShardHolder)]:
            numbers = [name for name, value in vars(module).items() if type(value) is int and not name.startswith("_")]
            error.args = (
                f"{error}. {', '.join(split)} of {type(module).__name__} are split, and it may count all "
                f"features ({', '.join(numbers) or 'a number in its code'}): let the plan give it this rank's numbers, "
                f'{{"style": "attributes", "{(numbers or ["heads"])[0]}": (one of each rank)}}, or take plan="auto"',
            )
            return


@dataclass(frozen=True)
class OwnPlan:
    """User's plan of a model, in the form that the analysis of automatic plans can follow.

    Attributes:
        columns: layers that give each rank a part of their features, to the parts of a fused projection.
        rows: layers that take such a part.
        split: all layers that are split, embeddings too.
        cuts: each of these layers to the split features that each rank has.
        summed: modules with gradients that are summed over the ranks.
        drops: modules whose random numbers differ between parts; None if they are not checked.
    """

    world_size: int
    columns: Mapping[str, tuple[int, ...] | None]
    rows: Collection[str]
    split: Collection[str]
    cuts: Mapping[str, Cut]
    summed: Collection[str]
    drops: Collection[str] | None = None

    def misuse(self, model: nn.Module, tries: Iterable[Callable], training: bool) -> str | None:
        """Describe the mistake in the plan, found in the first call that runs; None if there is no mistake.

        Args:
            model: the unsplit model. It is not changed and may be on the meta device.
            tries: calls to try, in order.
            training: whether to follow training or evaluation.
        """
        try:
            twin = without_values(model, training)
            prepare(twin, attentions(model)[0])
        except Exception as error:  # copying a user's objects may raise anything
            _log.debug("the plan is not followed: %s", error)
            return None
        for call in tries:
            try:
                whole = trace(twin, call, {})
                flow = Flow(twin, whole, self.world_size)
                if outside := [layer for layer in self.split if layer in flow.elsewhere]:
                    return (
                        f"parallelize: {outside[0]} is split, and {flow.elsewhere[outside[0]]}, which would take a "
                        "part for the whole: make that use a layer that shares the weight (a tied nn.Linear), call "
                        f"weft.parallel_linear_cross_entropy with the weight, or leave {outside[0]} whole"
                    )
                found = flow.misuse(self.columns, self.rows)
            except Exception as error:  # the model's code may raise, and so may a rule on unexpected arguments
                _log.debug("the plan is not followed in a call: %s", error)
                continue
            if isinstance(found, str):
                return (
                    f"parallelize: {found} is a row layer, which takes a part of its input features, and gets all of "
                    'them: split the layer before it by columns, or say {"style": "row", "split_input": True}'
                )
            if isinstance(found, Propagation):
                misuse = self._of_pieces(found) or self._of_cuts(found) or self._of_sums(twin, flow, found)
                return self._message(*misuse) if misuse else self._of_drops(whole, found)
            return self._message(*found)
        return None

    def _of_drops(self, whole: Trace, found: Propagation) -> str | None:
        if self.drops is None:
            return None
        for node in whole.nodes:
            split = [found.layouts[value].axis.layer for value in node.inputs if value in found.layouts]
            if node.drops and split and node.where not in self.drops:
                style = '"dropout"' if node.op == "dropout" else '{"style": "attributes", "own_random_numbers": True}'
                return (
                    f"parallelize: {node.where or 'the model'} drops elements of a part of {split[0]}, and would "
                    f"drop others on another number of ranks: make it {style} (docs/tensor_parallel.md)"
                )
        return None

    def _of_pieces(self, found: Propagation) -> tuple[str, str] | None:
        for layer, axis in found.columns.items():
            try:
                sizes = [leaf.size for leaf in axis.leaves()]
            except ValueError as error:
                if self.columns[layer] is None:
                    return layer, str(error)
                continue
            ends = set(accumulate(self.columns[layer] or [axis.size]))
            if not ends >= set(accumulate(sizes)):
                return layer, f'the model takes pieces of {sizes} features of it: say "parts": {tuple(sizes)}'
        return None

    def _of_cuts(self, found: Propagation) -> tuple[str, str] | None:
        taken = [(row, layout.axis, 0, layout.extent) for row, layout in found.rows.items() if layout.copies == 1]
        taken += [(other.layer, axis, other.start, other.stop) for axis, other in found.met]
        for layer, axis, start, stop in taken:
            has = _ends(self.cuts[axis.layer], axis.start, axis.stop)
            takes = _ends(self.cuts[layer], start, stop)
            for rank, (one, other) in enumerate(zip(has, takes, strict=True)):
                if [end * (stop - start) for end in one] != [end * axis.size for end in other]:
                    there = f"rank {rank} of tp has {_places(one)} of them, where {layer} takes {_places(other)}"
                    return axis.layer, f"{there}: give both the same unit and parts"
        for queries, keys in found.shared:
            head = keys.size // keys.units
            has, takes = (_ends(self.cuts[axis.layer], axis.start, axis.stop) for axis in (queries, keys))
            for rank, (one, other) in enumerate(zip(has, takes, strict=True)):
                if _heads(one, head * queries.size // keys.size) != _heads(other, head):
                    there = f"rank {rank} of tp has {_places(one)} of them, and {_places(other)} of the {keys.layer}"
                    return queries.layer, f'{there} they use: say "heads": (query heads, KV heads) for both'
        return None

    def _of_sums(self, twin: nn.Module, flow: Flow, found: Propagation) -> tuple[str, str] | None:
        for layout in found.layouts.values():
            for name in layout.axis.summed:
                owners = [f"{owner}." for owner in flow.owners[name]]
                prefixes = [f"{module}." if module else "" for module in self.summed]
                summed = any(owner.startswith(prefix) for owner in owners for prefix in prefixes)
                if twin.get_parameter(name).requires_grad and not summed:
                    module = name.rpartition(".")[0] or "the model"
                    misuse = (
                        f'{name} meets them, and its gradient would be a part: make {module} "sequence", which sums it'
                    )
                    return layout.axis.layer, misuse
        return None

    def _message(self, layer: str, misuse: str) -> str:
        return (
            f"parallelize: {layer} gives each rank a part of its output features, and {misuse}. Otherwise let it give "
            'all of them, {"style": "column", "gather_output": True} (a row layer behind it then takes "split_input": '
            "True), or leave it whole"
        )


def _own_plan(model: nn.Module, split: SplitLayers, world: int, in_units: bool) -> OwnPlan | None:
    """Return the user's plan; None if nothing can be wrong, or if the splits of some layers cannot be followed."""
    replacements = split.replacements
    linear = {name: layer for name, layer in replacements.items() if isinstance(layer, ParallelLinear)}
    columns = {
        name: None if layer.parts is None else tuple(layer.parts)
        for name, layer in linear.items()
        if layer.style == "column" and not layer.gather_output
    }
    first = {id(module): name for name, module in model.named_modules()}
    names = set(first.values())
    rows = [name for name, layer in linear.items() if layer.style == "row" and not layer.split_input and name in names]
    everywhere = all(first[id(model.get_submodule(name))] in replacements for name in replacements)
    followed = all(isinstance(layer, _FOLLOWED) or has_numbers(layer) for layer in replacements.values())
    split_alone = [name for name, layer in replacements.items() if isinstance(layer, ParallelEmbedding)]
    if world == 1 or not (columns or rows or split_alone) or not everywhere or not followed:
        return None
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        return None  # such a module communicates
    drops = [name for name, layer in replacements.items() if draws_for_parts(layer)] if in_units else None
    columns = {name: parts for name, parts in columns.items() if name in names}
    cuts = {name: linear[name].shards["weight"].cut for name in (*columns, *rows)}
    return OwnPlan(world, columns, rows, [*linear, *split_alone], cuts, split.summed, drops)


def _ends(cut: Cut, start: int, stop: int) -> list[list[int]]:
    """Return the first and last ends of what each rank has of the features start to stop, counted from start."""
    found = []
    for of_rank in cut.stretches:
        ends: list[int] = []
        for one, other in of_rank:
            begin, end = max(one, start) - start, min(other, stop) - start
            if begin < end:
                ends = [*ends[:-1], end] if ends and ends[-1] == begin else [*ends, begin, end]
        found.append(ends)
    return found


def _heads(ends: Sequence[int], size: int) -> list[int]:
    return [
        head
        for start, stop in zip(ends[::2], ends[1::2], strict=True)
        for head in range(start // size, -(-stop // size))
    ]


def _places(ends: Sequence[int]) -> str:
    return " and ".join(f"{start} to {stop}" for start, stop in zip(ends[::2], ends[1::2], strict=True)) or "none"


# The first call of each kind


def _call_checks(model: nn.Module, plan: "AutomaticPlan | OwnPlan", world: int) -> "dict[str, CallCheck]":
    """Return the checks of a model's calls, and of the calls of parts that were followed by themselves, by name.

    Models of transformers need none, because their further arguments (masks, caches, labels) are known.
    """
    names = [""] if isinstance(plan, OwnPlan) else plan.parts
    names = [name for name in names if not is_transformers(model.get_submodule(name))]
    try:
        twin = without_values(model) if names else model
    except Exception:  # copying a user's objects may raise anything
        return {}
    if isinstance(plan, OwnPlan):
        return {name: CallCheck(twin, plan.misuse, by_mode=True) for name in names}
    return {
        name: CallCheck(twin.get_submodule(name), partial(_automatic_conflict, own, world), by_mode=False)
        for name in names
        if (own := plan.of_part(name)).plan and (not name or any(twin.get_submodule(name).children()))
    }


def _automatic_conflict(automatic: AutomaticPlan, world: int, twin: nn.Module, calls: Sequence, _) -> str | None:
    """Describe the conflict of a call with an automatic plan. Both training and evaluation are followed."""
    conflict = conflict_in(twin, world, automatic, calls[0])
    return conflict and (
        f"{type(twin).__name__}: its automatic plan was found by another call than this, in which {conflict}. Find one "
        "by this call: plan=automatic_plan(model, world, example=...) of weft.tensor_parallel.auto; or write your own"
    )


class CallCheck:
    """Forward pre-hook that follows the first call of each kind. It raises ValueError before any communication.

    A call is of a new kind if its arguments are, or if an attribute of a module has changed.
    """

    def __init__(self, twin: nn.Module, conflict: Callable, by_mode: bool):
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
        conflict = self.conflict(self.model, [calling(args, kwargs)], module.training)
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


# Parts that were followed by themselves


class PartUses:
    """Check of a model's first calls. A use of a split weight outside of its part raises ValueError on every rank.

    The object is the model's forward pre-hook, and its `leave` is a forward hook.

    Args:
        parts: names of the modules that were followed.
    """

    def __init__(self, parts: Sequence[str]):
        self.parts = parts
        self.known: set[tuple] = set()
        self.under_way: list[ExitStack] = []

    def __deepcopy__(self, memo):
        return PartUses(self.parts)

    def install(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self, with_kwargs=True)
        model.register_forward_hook(self.leave, always_call=True)

    def __call__(self, model: nn.Module, args, kwargs) -> None:
        uses = ExitStack()
        self.under_way.append(uses)
        kind = (model.training, *kind_of_call(args, kwargs))
        if torch.compiler.is_compiling() or kind in self.known or len(self.known) > MOST_NUMBERS:
            return
        self.known.add(kind)
        uses.enter_context(followed(model))
        uses.enter_context(FunctionMode(every=_UseCheck(model, self.parts)))

    def leave(self, model: nn.Module, args, output) -> None:
        if self.under_way:  # empty if another pre-hook has refused the call
            self.under_way.pop().close()


class _UseCheck:
    """Handler of all functions."""

    def __init__(self, model: nn.Module, parts: Sequence[str]):
        self.kind = type(model).__name__
        self.weights: dict[int, tuple[str, nn.Module]] = {}  # tensor id to (name, the part that has it)
        for name in parts:
            part = model.get_submodule(name)
            for inner, layer in part.named_modules(prefix=name):
                if isinstance(layer, ShardHolder):
                    self.weights |= {id(getattr(layer, own)): (f"{inner}.{own}", part) for own in layer.shards}

    def __call__(self, func, args: tuple, kwargs: dict):
        for tensor in tensors_in((args, kwargs)):
            name, part = self.weights.get(id(tensor), ("", None))
            if part is not None and not is_running(part) and not _asks_for_a_property(func):
                raise ValueError(
                    f"{self.kind}: {name} is used by {getattr(func, '__name__', func)} outside of "
                    f"{type(part).__name__}, and each rank has a part of it: automatic_plan could not follow the "
                    "model, and followed that module alone. Give it an example of the model's inputs, "
                    "plan=automatic_plan(model, world, example=...) of weft.tensor_parallel.auto; or a plan of your "
                    f"own that leaves {name} whole"
                )
        return func(*args, **kwargs)


_PROPERTIES = {
    *("device", "dtype", "layout", "requires_grad", "is_cuda", "is_meta", "is_leaf", "is_sparse", "ndim"),
    *("is_floating_point", "is_complex", "dim"),
}


def _asks_for_a_property(func) -> bool:
    """Return whether the function reads a property that is equal for a part and the whole tensor."""
    getter = getattr(func, "__self__", None)
    return func not in SIZES and getattr(getter, "__name__", getattr(func, "__name__", "")) in _PROPERTIES
