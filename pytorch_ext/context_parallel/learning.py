"""What a model does with its shared sequence in each kind of call, learnt in the first one.

The first call of a kind (shapes, modes, the modules' own flags) runs in full: each function of the sequence goes
through its rule. A module in which all functions treated every position alone is left alone from then on: it gets this
rank's part as a plain tensor and runs as in the plain model. The parameters of all such modules are given out at the
model's edge, by one node of autograd's graph, which sums their gradients over the ranks together.

A module is not left alone if it reads the sequence's length or values, drops elements, works in place, keeps a tensor,
has a hook inside, or changes an attribute of its own from call to call.
"""

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten

from weft.context_parallel.given_out import buckets, give_out
from weft.context_parallel.pytree import ATOMS, leaves
from weft.forward.functions import FunctionMode
from weft.forward.members import Members
from weft.metadata import ATTRIBUTE
from weft.ops.unit_parameters import units_of
from weft.rng import states_of_checkpoints
from weft.sharding.shard import split_over

_MOST_KINDS = 16
_SIMPLE = frozenset((bool, int, float, str, type(None)))
_LISTS = (list, tuple, set, frozenset)
_DEPTH = 4  # of objects in objects that a module holds
_NOT_SETTINGS = {*vars(nn.Module()), "forward", ATTRIBUTE}
_READS = {
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "nonzero", "unique"),
}


@dataclass
class _ThreadState(threading.local):
    """The forward under way in this thread.

    Attributes:
        recorder: learns from it.
        kind: the kind of call that it is, if that was learnt.
        given_out: for each part of the sequence here, what the modules left alone get in place of `kind.parameters`.
        masks: of attentions, each with what was recognised in it; they are kept, so that no other has their memory.
        parameters: by id, each with its views for the units of the sequence here; None without units.
    """

    recorder: "ForwardRecord | None" = None
    kind: "Kind | None" = None
    given_out: list[list[torch.Tensor]] = field(default_factory=list)
    masks: dict[tuple, tuple] | None = None
    parameters: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor]]] | None = None


state = _ThreadState()


@contextmanager
def knowing(in_units: bool) -> Iterator[None]:
    """Look at each mask of an attention, and give each parameter out to units, once inside the context."""
    before = state.masks, state.parameters
    state.masks, state.parameters = {}, {} if in_units else None
    try:
        yield
    finally:
        _end_uses()
        state.masks, state.parameters = before


def _end_uses() -> None:
    """Let the parameters that were given out forget their views."""
    for _, given_out in (state.parameters or {}).values():
        for x in given_out:
            if (of_units := units_of(x)) is not None:
                of_units.end()  # type: ignore[attr-defined]


@dataclass
class LeftAlone:
    """A module that is left alone.

    Attributes:
        given: (dimension of the sequence, the same from the end, blocks of its cut) of the first sequence that it gets.
        axes: the dimension of the sequence in each of its outputs.
        places: (a module's parameters, name, index in `Kind.parameters`) of the parameters inside of it.
    """

    given: tuple[int, int, int]
    axes: tuple[int, ...]
    places: list[tuple[dict, str, int]] = field(default_factory=list)


@dataclass
class Kind:
    """A kind of call that was learnt.

    Attributes:
        call: the ranks' agreement on the sequence (`region.SharedCall`).
        alone: the modules that get parts as plain tensors.
        parameters: (a module's parameters, name) of the parameters of all of these, each once.
    """

    call: Any
    alone: dict[nn.Module, LeftAlone] = field(default_factory=dict)
    parameters: list[tuple[dict, str]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leave the modules alone inside the context."""
        sharing = self.call.sharing
        parameters = [members[name] for members, name in self.parameters]
        given_out: list[list[torch.Tensor]] = [[] for _ in sharing.here]
        for bucket in buckets(parameters):
            for part, made in zip(given_out, give_out(sharing.ranks, sharing.units, bucket), strict=True):
                part += made
        known = state.parameters
        if known is not None:
            known.update({id(x): (x, of_parts) for x, *of_parts in zip(parameters, *given_out, strict=True)})
        with _state_of(self, given_out, known):
            yield


@contextmanager
def _state_of(kind: Kind | None, given_out: list[list[torch.Tensor]], parameters: dict | None) -> Iterator[None]:
    before = state.kind, state.given_out, state.parameters
    state.kind, state.given_out, state.parameters = kind, given_out, parameters
    try:
        yield
    finally:
        state.kind, state.given_out, state.parameters = before


class _StateOfCheckpoint:
    """Context with this forward's kind and parameters, for the recomputation of a part of it."""

    def __init__(self) -> None:
        self._kept = state.kind, state.given_out, state.parameters

    def __enter__(self) -> None:
        self._context = _state_of(*self._kept)
        self._context.__enter__()

    def __exit__(self, *error) -> None:
        _end_uses()
        self._context.__exit__(*error)


states_of_checkpoints.append(_StateOfCheckpoint)


class Kinds:
    """The kinds of calls of a model that were learnt, as long as nothing in the model changes.

    Attributes:
        trains: some module was in training at the last `find`.
    """

    trains = False

    def __init__(self, model: nn.Module, in_units: bool):
        self._model = model
        self._restless: set[nn.Module] = set()  # they change what they hold from call to call
        self._known: dict[tuple, Kind] = {}
        self._members = Members(model, parameters=not in_units)  # a unit of the batch has parameters of its own
        self._settings = _settings(self._members.modules)

    def find(self, args: tuple, kwargs: dict) -> tuple[tuple | None, Kind | None]:
        """Return the key of a call, None if it has arguments of unknown kinds, and its kind, if that was learnt."""
        if self._members.changed():
            self._members.record()
            self._known.clear()
            self._settings = _settings(self._members.modules)
        self._look_at_settings()
        training = [module.training for module in self._members.modules]
        self.trains = True in training
        key = self._key(args, kwargs, training)
        return key, None if key is None else self._known.get(key)

    def _key(self, args: tuple, kwargs: dict, training: list[bool]) -> tuple | None:
        kinds: list = [tuple(kwargs), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor):
                kinds.append((x.shape, x.dtype, x.device, x.requires_grad, torch.is_autocast_enabled(x.device.type)))
            elif type(x) in ATOMS:
                kinds.append((type(x), x))
            else:
                found, structure = tree_flatten(x)
                if any(not isinstance(leaf, torch.Tensor) and type(leaf) not in ATOMS for leaf in found):
                    return None
                kinds.append((str(structure), *(_kind(leaf) for leaf in found)))
        modules = self._members.modules
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks or ())) for m in modules]
        trained = [p is not None and p.requires_grad for m in modules for p in m._parameters.values()]
        return (*kinds, *hooks, *training, *trained)

    def _look_at_settings(self) -> None:
        """Forget all kinds if a module holds something else than before; such a module is not left alone any more."""
        now, before = _settings(self._members.modules), self._settings[0]
        if now[0] == before:
            return
        changed = {module for module, held in now[0].items() if held != before.get(module)} - self._restless
        self._settings = now
        if changed:
            self._restless |= changed
            self._known.clear()

    def add(self, key: tuple, kind: Kind, record: "ForwardRecord") -> None:
        """Keep what a record has shown. A collective call."""
        self._look_at_settings()
        ranks = kind.call.sharing.ranks
        names = {module: name for name, module in self._model.named_modules()}
        found = {} if record.unsure else record.left_alone(self._restless)
        own = {names[module]: (alone.given, alone.axes) for module, alone in found.items()}
        everywhere: list[dict] = ranks.all_gather_object(own)
        indices: dict[torch.Tensor, int] = {}
        for module, alone in found.items():
            if any(others.get(names[module]) != (alone.given, alone.axes) for others in everywhere):
                continue
            kind.alone[module] = alone
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is None or not parameter.requires_grad or split_over(parameter, ranks):
                        continue
                    if parameter not in indices:
                        indices[parameter] = len(indices)
                        kind.parameters.append((part._parameters, name))
                    alone.places.append((part._parameters, name, indices[parameter]))
        self._known[key] = kind
        for old in list(self._known)[:-_MOST_KINDS]:
            del self._known[old]


def _kind(leaf) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


def _settings(modules: Sequence[nn.Module]) -> tuple[dict[nn.Module, list], list]:
    """Return what each module holds, in a form to compare, and the objects in it, which must live as long as that form.

    Parameters, buffers, modules and hooks are left out. Numbers, texts, flags and lists of them are compared by value,
    other objects by identity and by what they hold.
    """
    found: dict[nn.Module, list] = {}
    objects: list = []
    for module in modules:
        held = found[module] = []
        inside: list[tuple[Any, int]] = [(module.__dict__, 0)]
        for owner in type(module).__mro__:
            if owner is nn.Module:
                break
            inside.append((owner.__dict__, _DEPTH))
        seen: set[int] = set()
        while inside:
            members, depth = inside.pop()
            for name, value in members.items():
                kind = type(value)
                if kind in _SIMPLE:
                    if name not in _NOT_SETTINGS:
                        held.append((name, value))
                    continue
                if depth == _DEPTH or name in _NOT_SETTINGS:
                    continue
                if kind in _LISTS and _SIMPLE.issuperset(map(type, value)):
                    held.append((name, tuple(value)))
                    continue
                held.append(id(value))
                objects.append(value)
                more = value if kind is dict else getattr(value, "__dict__", None)
                if type(more) is not dict or isinstance(value, type | nn.Module | torch.Tensor):
                    continue
                if kind.__module__.startswith("weft."):  # its settings are fixed, and some are computed when first read
                    continue
                if id(more) not in seen:
                    seen.add(id(more))
                    inside.append((more, depth + 1))
    return found, objects


@dataclass(eq=False)
class _Frame:
    """A call of a module under way."""

    module: nn.Module
    parameters: set[int]
    given: tuple[int, int, int] | None
    alone: bool = True
    functions: int = 0
    cut: Any = None
    returned: set[int] = field(default_factory=set)


class ForwardRecord:
    """Record of one forward.

    Attributes:
        unsure: nothing can be left alone, because what the forward does follows from random numbers of Python.
    """

    def __init__(self, model: nn.Module, is_shared: Callable[[Any], bool]):
        self._model, self._is_shared = model, is_shared
        self._frames: list[_Frame] = []
        self._found: dict[nn.Module, LeftAlone | None] = {}  # None: not to be left alone
        self._parents: dict[nn.Module, list[tuple[nn.Module, ...]]] = {}  # of each call
        self._made: list[tuple[weakref.ref, tuple[_Frame, ...]]] = []  # sequences, with the calls that made them
        self.unsure = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        before, numbers = state.recorder, _numbers_of_python()
        state.recorder = self
        try:
            with FunctionMode(every=self._watch):
                yield
        finally:
            state.recorder = before
            for handle in handles:
                handle.remove()
            self.unsure = _numbers_of_python() != numbers

    def _enter(self, module: nn.Module, args) -> None:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            self.crossed()  # hooks see the sequence
        self._parents.setdefault(module, []).append(tuple([frame.module for frame in self._frames]))
        first = next(filter(self._is_shared, args), None)
        given = None if first is None else (first.axis, first.back, first.cut.blocks)
        self._frames.append(_Frame(module, {id(p) for p in module.parameters()}, given))

    def _leave(self, module: nn.Module, args, output) -> None:
        if not self._frames or self._frames[-1].module is not module:
            return
        frame = self._frames.pop()
        frame.returned = {id(x) for x in leaves(output)}
        alone = self._alone(frame, output)
        if module in self._found and self._found[module] != alone:
            alone = None
        self._found[module] = alone

    def _alone(self, frame: _Frame, output) -> LeftAlone | None:
        outputs = output if type(output) is tuple else (output,)
        if not frame.alone or not frame.functions or frame.given is None or not all(map(self._is_shared, outputs)):
            return None
        if any(x.cut != frame.cut for x in outputs):
            return None
        return LeftAlone(frame.given, tuple([x.axis for x in outputs]))

    def crossed(self) -> None:
        """Note that the modules under way do more than treat each position alone."""
        for frame in self._frames:
            frame.alone = False

    def function(self, lead, args, kwargs) -> None:
        """Note a function of a sequence that treats each position alone."""
        plain = [
            x
            for x in (*args, *kwargs.values())
            if isinstance(x, torch.Tensor) and x.requires_grad and not self._is_shared(x)
        ]
        for frame in self._frames:
            frame.functions += 1
            frame.cut = frame.cut or lead.cut
            if frame.cut != lead.cut or any(id(x) not in frame.parameters for x in plain):
                frame.alone = False

    def made(self, sequence: torch.Tensor) -> None:
        """Note a new sequence."""
        self._made.append((weakref.ref(sequence), tuple(self._frames)))

    def _watch(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Note reads of values, which may decide what the code does."""
        if getattr(func, "__name__", "") in _READS:
            self.crossed()
        return func(*args, **kwargs)

    def left_alone(self, restless: set[nn.Module]) -> dict[nn.Module, LeftAlone]:
        """Return the outermost modules that can be left alone, once the forward's own tensors are gone."""
        kept = [(x, frames) for reference, frames in self._made if (x := reference()) is not None]
        keeping = {frame.module for x, frames in kept for frame in frames if id(x) not in frame.returned}
        found = {
            module: alone
            for module, alone in self._found.items()
            if alone is not None and module is not self._model and module not in keeping
            if restless.isdisjoint(module.modules())
        }
        return {
            module: alone
            for module, alone in found.items()
            if any(found.keys().isdisjoint(parents) for parents in self._parents[module])
        }


def _numbers_of_python() -> tuple:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state()
    return random.getstate(), tuple(x.tobytes() if hasattr(x, "tobytes") else x for x in of_numpy)
