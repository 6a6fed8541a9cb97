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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten

from weft.context_parallel.pytree import ATOMS, leaves
from weft.forward.functions import FunctionMode
from weft.forward.members import Members
from weft.metadata import ATTRIBUTE
from weft.ops.backward import RankFunction, first_order
from weft.sharding.shard import split_over

_MOST_KINDS = 16
_BUCKET_BYTES = 25 << 20
_SIMPLE = (bool, int, float, str, type(None))
_LISTS = (list, tuple, set, frozenset)
_READS = {
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "nonzero", "unique"),
}


class _ThreadState(threading.local):
    """The forward under way in this thread.

    Attributes:
        recorder: learns from it.
        kind: the kind of call that it is, if that was learnt.
        masks: of attentions, each with what was recognised in it; they are kept, so that no other has their memory.
    """

    recorder: "ForwardRecord | None" = None
    kind: "Kind | None" = None
    masks: dict[tuple, tuple] | None = None


state = _ThreadState()


@contextmanager
def knowing_masks() -> Iterator[None]:
    """Look at each mask of an attention once inside the context."""
    before, state.masks = state.masks, {}
    try:
        yield
    finally:
        state.masks = before


@dataclass
class Kind:
    """A kind of call that was learnt.

    Attributes:
        call: the ranks' agreement on the sequence (`region.SharedCall`).
        draws: the forward drew random numbers.
        left_alone: modules that get parts as plain tensors, each with the dimension of the sequence in its outputs.
        places: (a module's parameters, name, index in `parameters`) of all that the edge gives out.
        parameters: these, each once.
    """

    call: Any
    draws: bool = True
    left_alone: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    places: list[tuple[dict, str, int]] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leave the modules alone, with parameters whose gradients are summed over the ranks."""
        ranks = self.call.sharing.ranks
        given: list[torch.Tensor] = []
        for bucket in _buckets(self.parameters):
            given += _GivenOut.apply(ranks, *bucket) if torch.is_grad_enabled() else bucket
        before, state.kind = state.kind, self
        for parameter, made in zip(self.parameters, given, strict=True):
            if ATTRIBUTE in vars(parameter):  # its place, and the ranks that its gradient is summed over already
                vars(made)[ATTRIBUTE] = vars(parameter)[ATTRIBUTE]
        for members, name, index in self.places:
            members[name] = given[index]
        try:
            yield
        finally:
            state.kind = before
            for members, name, index in self.places:
                members[name] = self.parameters[index]

    @contextmanager
    def parameters_themselves(self, module: nn.Module) -> Iterator[None]:
        """Run a module on whole tensors: its parameters' gradients are then the same on every rank, and not summed."""
        own = {id(part._parameters) for part in module.modules()}
        given = [(members, name, members[name], index) for members, name, index in self.places if id(members) in own]
        for members, name, _, index in given:
            members[name] = self.parameters[index]
        try:
            yield
        finally:
            for members, name, made, _ in given:
                members[name] = made


class _GivenOut(RankFunction):
    """y_i = p_i for each parameter; backward  dp_i = all_reduce(dy_i), of all of them at once.

    A parameter without a gradient on any rank gets none.
    """

    @staticmethod
    def forward(ctx, ranks, *parameters):
        ctx.ranks, ctx.like = ranks, [(p.shape, p.dtype, p.device) for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple([p.view_as(p) for p in parameters])

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        sums: list[torch.Tensor | None] = [None] * len(gradients)
        of_type: dict[torch.dtype, list[int]] = {}
        for index, (_, dtype, _) in enumerate(ctx.like):
            of_type.setdefault(dtype, []).append(index)
        for dtype, indices in of_type.items():
            shapes = [ctx.like[index][0] for index in indices]
            sizes = [shape.numel() for shape in shapes]
            flat = torch.empty(sum(sizes) + len(indices), dtype=dtype, device=ctx.like[indices[0]][2])
            *places, used = flat.split([*sizes, len(indices)])
            used.copy_(torch.tensor([gradients[index] is not None for index in indices]))
            for index, place, shape in zip(indices, places, shapes, strict=True):
                gradient = gradients[index]
                place.zero_() if gradient is None else place.view(shape).copy_(gradient)
            ctx.ranks.all_reduce_(flat)
            for index, place, shape, by_some in zip(indices, places, shapes, used.tolist(), strict=True):
                sums[index] = place.view(shape) if by_some else None
        return None, *sums


def is_given_out(x: torch.Tensor) -> bool:
    """Return whether x is a parameter whose gradient the model's edge sums."""
    return isinstance(x.grad_fn, _GivenOut._backward_cls)  # type: ignore[attr-defined]


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters in groups, so that the gradients of one are summed while those of the next are computed."""
    bucket: list[torch.Tensor] = []
    bytes = 0
    for parameter in parameters:
        bucket.append(parameter)
        bytes += parameter.nbytes
        if bytes >= _BUCKET_BYTES:
            yield bucket
            bucket, bytes = [], 0
    if bucket:
        yield bucket


class Kinds:
    """The kinds of calls of a model that were learnt, as long as nothing in the model changes."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._restless: set[nn.Module] = set()  # they change an attribute of their own from call to call
        self._known: dict[tuple, Kind] = {}
        self._members = Members(model)
        self._record()

    def _record(self) -> None:
        self._modules, self._parameters = list(self._model.modules()), list(self._model.parameters())
        self._places = [place for module in self._modules for place in _attributes(module)]
        self._values = self._read()

    def _read(self) -> list:
        found: list[Any] = [members.get(name) for _, members, name in self._places]
        return [tuple(value) if type(value) in _LISTS else value for value in found]

    def find(self, args: tuple, kwargs: dict) -> tuple[tuple | None, Kind | None]:
        """Return the key of a call, None if it has arguments of unknown kinds, and its kind, if that was learnt."""
        if self._members.changed():
            self._members.record()
            self._known.clear()
            self._record()
        self._forget_changes()
        key = self._key(args, kwargs)
        return key, None if key is None else self._known.get(key)

    def _key(self, args: tuple, kwargs: dict) -> tuple | None:
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
        hooks = [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks or ())) for m in self._modules
        ]
        own = [
            (m.training, len(m.__dict__) - ("forward" in m.__dict__) - (ATTRIBUTE in m.__dict__)) for m in self._modules
        ]
        return (*kinds, *hooks, *own, *[parameter.requires_grad for parameter in self._parameters])

    def _forget_changes(self) -> None:
        """Forget all kinds if an attribute of a module has changed, and what this module did for good."""
        now = self._read()
        if now == self._values:
            return
        changed = {
            index
            for index, (old, new) in enumerate(zip(self._values, now, strict=True))
            if old is not new and old != new
        }
        self._restless |= {self._places[index][0] for index in changed}
        self._places = [place for index, place in enumerate(self._places) if index not in changed]
        self._values = self._read()
        self._known.clear()

    def add(self, key: tuple, kind: Kind, recorder: "ForwardRecord") -> None:
        """Keep what a recorder has learnt. A collective call."""
        self._forget_changes()
        self._record()
        ranks = kind.call.sharing.ranks
        names = {module: name for name, module in self._model.named_modules()}
        found = {} if recorder.unsure else recorder.left_alone(self._restless)
        own = {names[module]: axes for module, axes in found.items()}, kind.draws
        everywhere: list[tuple] = ranks.all_gather_object(own)
        kind.draws = any(draws for _, draws in everywhere)
        kind.left_alone = {
            module: axes
            for module, axes in found.items()
            if all(others.get(names[module]) == axes for others, _ in everywhere)
        }
        indices: dict[torch.Tensor, int] = {}
        for module in kind.left_alone:
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is None or not parameter.requires_grad or split_over(parameter, ranks):
                        continue
                    index = indices.setdefault(parameter, len(indices))
                    kind.places.append((part._parameters, name, index))
        kind.parameters = list(indices)
        self._known[key] = kind
        for old in list(self._known)[:-_MOST_KINDS]:
            del self._known[old]


def _kind(leaf) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


def _attributes(module: nn.Module) -> Iterator[tuple[nn.Module, dict, str]]:
    """Yield numbers, texts and flags of a module, and of plain objects and dicts that it holds (a configuration)."""
    for name, value in vars(module).items():
        if _is_setting(value):
            if name != "training":
                yield module, vars(module), name
            continue
        held = value if type(value) is dict else getattr(value, "__dict__", None)
        of_weft = type(value).__module__.startswith("weft.")  # the chain of the module's forward
        if name.startswith("_") or of_weft or isinstance(value, type | nn.Module | torch.Tensor):
            continue
        if type(held) is not dict:
            continue
        for inner, found in held.items():
            if _is_setting(found):
                yield module, held, inner


def _is_setting(value) -> bool:
    return type(value) in _SIMPLE or (type(value) in _LISTS and all(type(each) in _SIMPLE for each in value))


@dataclass
class _Frame:
    """A call of a module under way."""

    module: nn.Module
    parameters: set[int]
    alone: bool = True
    functions: int = 0
    cut: Any = None


class ForwardRecord:
    """Record of one forward.

    Attributes:
        unsure: nothing can be left alone, because what the forward does follows from random numbers of Python.
    """

    def __init__(self, model: nn.Module, is_shared: Callable[[Any], bool]):
        self._model, self._is_shared = model, is_shared
        self._frames: list[_Frame] = []
        self._outputs: dict[nn.Module, tuple[int, ...] | None] = {}  # None: not to be left alone
        self._parents: dict[nn.Module, list[tuple[nn.Module, ...]]] = {}  # of each call
        self._uses: dict[int, list[tuple[nn.Module, ...]]] = {}  # of leaves, by id
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
        self._frames.append(_Frame(module, {id(p) for p in module.parameters()}))

    def _leave(self, module: nn.Module, args, output) -> None:
        if not self._frames or self._frames[-1].module is not module:
            return
        frame = self._frames.pop()
        axes = self._axes(frame, output)
        known = self._outputs.setdefault(module, axes)
        if known != axes:
            self._outputs[module] = None

    def _axes(self, frame: _Frame, output) -> tuple[int, ...] | None:
        given = output if type(output) is tuple else (output,)
        if not frame.alone or not frame.functions or not all(map(self._is_shared, given)):
            return None
        kept = leaves(list(vars(frame.module).values()))
        if any(x.cut != frame.cut for x in given) or any(map(self._is_shared, kept)):
            return None
        return tuple([x.axis for x in given])

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

    def _watch(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Note the leaves that a function uses, and reads of values, which may decide what the code does."""
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _READS:
            self.crossed()
        elif any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves(result)):
            for x in leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf:
                    self._uses.setdefault(id(x), []).append(tuple([frame.module for frame in self._frames]))
        return result

    def left_alone(self, restless: set[nn.Module]) -> dict[nn.Module, tuple[int, ...]]:
        """Return the outermost modules that can be left alone, with the sequence's dimension in their outputs."""
        found = {
            module: axes
            for module, axes in self._outputs.items()
            if axes is not None and module is not self._model and restless.isdisjoint(module.modules())
        }
        while True:
            outside = {
                number for number, uses in self._uses.items() if any(found.keys().isdisjoint(stack) for stack in uses)
            }
            taken = [m for m in found if not outside.isdisjoint({id(p) for p in m.parameters()})]
            if not taken:
                break
            for module in taken:
                del found[module]
        return {
            module: axes
            for module, axes in found.items()
            if any(found.keys().isdisjoint(parents) for parents in self._parents[module])
        }


def _numbers_of_python() -> tuple:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state()
    return random.getstate(), tuple(x.tobytes() if hasattr(x, "tobytes") else x for x in of_numpy)
