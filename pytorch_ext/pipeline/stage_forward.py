"""One forward of a model on one stage, and a trial of it that finds the values which the stage needs."""

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_not
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft.context_parallel.pytree import leaves as leaves_of
from weft.context_parallel.shared_sequence import NATIVE, name_of, parts_here
from weft.forward import FunctionMode
from weft.layer_lists import refuse_caches
from weft.pipeline.absent import Absent, AbsentValueError, absent_in, origins_in
from weft.pipeline.forward_cut import CutLayer, ForwardCut, StageEndedError, UncuttableError
from weft.pipeline.forward_plan import (
    Argument,
    ForwardPlan,
    LayerResult,
    Maker,
    Offer,
    Opaque,
    Repeated,
    Root,
    layer_root,
    result_of,
)
from weft.pipeline.stage_boundary import Made, cross
from weft.rng import generator_states, next_seed
from weft.sharding.shard import shard_of

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook}


class StageForward:
    """One forward of the model on one stage.

    Args:
        known: values of earlier stages that this stage needs.
        leaving: values that it sends to the next stage.

    Attributes:
        inside: the layer that runs.
        ended: a later stage goes on.
        follows: whether the functions of the code between layers are counted.
        made: values of this stage that leave.
    """

    inside: CutLayer | str | None = None
    ended = False

    def __init__(
        self, cut: ForwardCut, stage: int, plan: ForwardPlan, known: dict[Root, torch.Tensor], leaving: Sequence[Root]
    ):
        self.cut, self.stage, self.plan, self.known = cut, stage, plan, known
        self.made: dict[Root, torch.Tensor] = {}
        self._leaving = leaving
        self._noted = {maker for maker, _ in (*known, *leaving, *plan.written)}
        self._versions: list[tuple[Root, list[torch.Tensor], list[int]]] = []  # of values that are handed out
        self.follows = any(function for _, function, _ in self._noted)
        self._calls, self._functions = 0, Counter[tuple[int, str]]()

    def started(self) -> None:
        """Note that the model's forward begins."""
        self._context = _context()

    def enter_nested(self, layer: CutLayer) -> None:
        """Note a layer that another layer calls; it is on the stage of that layer."""

    def following(self) -> AbstractContextManager:
        """Return the context for the code between layers."""
        return FunctionMode(every=self.function) if self.follows else nullcontext()

    def function(self, func: Callable, args: tuple, kwargs: dict, name: str | None = None):
        """Call a function, or the forward of a module with this name, for the code between layers."""
        # What arrives in the forward of a custom autograd function has no gradient, and a checkpoint runs again later.
        if self.inside is not None or _context() != self._context:
            return func(*args, **kwargs)
        self.inside = name = name or name_of(func)
        maker = self._calls, name, self._functions[self._calls, name]
        self._functions[self._calls, name] += 1
        try:
            return self._followed(maker, func, args, kwargs)
        finally:
            self.inside = None

    def _followed(self, maker: Maker, func: Callable, args: tuple, kwargs: dict):
        """Return what a function gives, with the values that have arrived."""
        out = func(*args, **kwargs)
        if maker not in self._noted:
            return out
        parts, structure = tree_flatten(out)
        for place, part in enumerate(parts):
            root = maker, place
            if (offer := self.plan.offers.get(root)) is None:
                continue
            if not isinstance(part, torch.Tensor) or Made.of(part) != offer.made:
                raise self._other_functions(maker)
            if root in self.known and absent_in(part):  # what is here is right, also for other names of its memory
                parts[place] = self._handed_out(root, self.known[root])
            if root in self._leaving:
                self.made[root] = parts[place]
                self._watch(root, parts[place])
        return tree_unflatten(parts, structure)

    def _other_functions(self, maker: Maker) -> ValueError:
        return ValueError(
            f"{self.cut.caller}: the forward of {type(self.cut.model).__name__} does not call {maker[1]} between its "
            "layers as in the first micro-batch of these shapes: make that a module of its own"
        )

    def call(self, layer: CutLayer, forward: Callable, args: tuple, kwargs: dict):
        """Run a layer, skip it, or end the forward."""
        number, cut = self._calls, self.cut
        known = number < len(cut.names) and cut.names[number] == layer.name
        stage = cut.stages[number] if known else cut.stage_of(number, layer.name, self.stage)
        if stage > self.stage:
            self.ended = True
            raise StageEndedError
        self._calls = number + 1
        self.inside = layer  # functions from here on are not of the code between layers
        try:
            if stage < self.stage:
                return self._skipped(number, self.plan.results[number], args, kwargs)
            result, alone = self.plan.results[number], not cut.draws and cut.watched is nullcontext
            if result.is_tensor and (number, "", 0) not in self._noted:
                return forward(*args, **kwargs) if alone else layer.seeded(forward, args, kwargs)
            arguments = [] if result.is_tensor else tree_leaves((args, kwargs))
            output = forward(*args, **kwargs) if alone else layer.seeded(forward, args, kwargs)
            return self._note(number, layer, output, arguments)
        finally:
            self.inside = None

    def _note(self, number: int, layer: CutLayer, output, arguments: list):
        """Note the result of a layer; return it with copies of what other code changes in place."""
        expected = self.plan.results[number]
        if expected.is_tensor and type(output) is torch.Tensor and Made.of(output) == expected.parts[0]:
            self.made[layer_root(number)] = output
            return self._handed_out(layer_root(number), output)
        parts, structure = tree_flatten(output)
        result = result_of(parts, structure, arguments)
        if result != expected:
            raise ValueError(
                f"{self.cut.caller}: {layer.name} returned {result.parts} for this micro-batch, and {expected.parts} "
                "for the first one of these shapes; the shapes that cross stages must not depend on values"
            )
        return self._kept(number, result, parts)

    def _kept(self, number: int, result: LayerResult, parts: list):
        for place, (part, kind) in enumerate(zip(parts, result.parts, strict=True)):
            if isinstance(kind, Made | Opaque):
                self.made[layer_root(number, place)] = part
            if isinstance(kind, Made):
                parts[place] = self._handed_out(layer_root(number, place), part)
            elif isinstance(kind, Repeated):
                parts[place] = parts[kind.place]
        return tree_unflatten(parts, result.structure)

    def _skipped(self, number: int, result: LayerResult, args: tuple, kwargs: dict):
        """Return the result of a layer that does not run here."""
        if self.cut.draws:
            next_seed()  # as where it runs
        parts = list(result.parts)
        for place, part in enumerate(parts):
            root = layer_root(number, place)
            if isinstance(part, Argument):
                parts[place] = tree_leaves((args, kwargs))[part.number]
            elif isinstance(part, Repeated):
                parts[place] = parts[part.place]
            elif isinstance(part, Opaque):
                if root not in self.known:
                    raise UncuttableError(
                        f"{self.cut.caller}: {self.cut.names[number]} returns a {part.kind}, and stages send "
                        "tensors, numbers, and tuples, lists and dicts of these: let it return those"
                    )
                parts[place] = self.known[root]
            elif isinstance(part, Made):
                value = self.known.get(root)
                parts[place] = self._absent(root, part) if value is None else self._handed_out(root, value)
        return parts[0] if result.is_tensor else tree_unflatten(parts, result.structure)

    def _absent(self, root: Root, made: Made) -> torch.Tensor:
        x = Absent(made.empty("meta"), self.cut.device, {root})
        return x if made.shared is None else made.arrived(x, self.cut.shared)

    def _handed_out(self, root: Root, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the code between layers gets."""
        if root in self.plan.written:
            return value.clone()
        self._watch(root, value)
        return value

    def _watch(self, root: Root, value: torch.Tensor) -> None:
        parts = [value] if type(value) is torch.Tensor else _parts(value)
        self._versions.append((root, parts, _versions(parts)))

    def finish(self) -> None:
        """Raise ValueError if the forward ended before this stage's layers, or wrote to what other stages have."""
        names = self.cut.names
        for root, parts, versions in self._versions:
            if _versions(parts) != versions:
                raise ValueError(
                    f"{self.cut.caller}: the forward of {type(self.cut.model).__name__} changes in place what "
                    f"{root[0][1] or names[root[0][0]]} gave, as it did not in the first micro-batch of these shapes: "
                    "let it work on a new tensor"
                )
        if not self.ended and self._calls < len(names):
            raise ValueError(
                f"{self.cut.caller}: the forward of {type(self.cut.model).__name__} does not call "
                f"{names[self._calls]}, which it called when it was cut: pass example= like the batches"
            )

    def leaving(self) -> tuple[torch.Tensor, ...]:
        """Return what the next stage gets."""
        values = {**self.known, **self.made}
        for root in self._leaving:
            if root not in values:
                raise self._other_functions(root[0])
        return tuple([cross(values[root]) for root in self._leaving])


class StageTrial(StageForward):
    """A forward of the model on one stage that finds what the stage needs.

    Args:
        ran: results of the layers that ran in an earlier trial; they do not run again, and their values are known.

    Attributes:
        made: values of all of this stage's layers, and those that the code between them can offer to later stages.
    """

    def __init__(self, cut: ForwardCut, stage: int, plan: ForwardPlan, known, ran: dict[int, LayerResult]):
        super().__init__(cut, stage, plan, known, ())
        self._ran, self._offers = ran, dict[Root, Offer]()
        self.follows = True
        self._touched: set[int] = set()  # ids of tensors that are written to without a trace
        self._region: Any = None  # a checkpoint of torch around the last layer, and whether that layer ran
        self._here: dict[int, tuple[Root, weakref.ref, list[int]]] = {}  # what functions gave, by id
        self._state: list[torch.Tensor] = []
        self._draws = False

    def started(self) -> None:
        super().started()
        cut = self.cut
        self._state, self._others = generator_states(cut.device), cut.other_generators()
        self._buffers, self._before = cut.buffers(), cut.state() if cut.runs else None
        if cut.runs is not None:
            cut.runs += 1

    def _followed(self, maker: Maker, func: Callable, args: tuple, kwargs: dict):
        leaves = leaves_of((args, kwargs))
        for x in leaves if func not in NATIVE else ():
            if isinstance(x, torch.Tensor) and (shard := shard_of(x)) and shard.communicator.world_size > 1:
                weight = next((own for own, y in self.cut.model.named_parameters() if y is x), "a parameter")
                raise UncuttableError(
                    f"{self.cut.caller}: {weight} is used by {maker[1]} outside of its layer, and is split over ranks: "
                    "make that use a module of its own that shares the parameter, and leave both whole"
                )
        self._refuse_hooks(func, maker)
        if func == _DATA:
            self._touched |= {id(part) for x in leaves if isinstance(x, torch.Tensor) for part in _parts(x)}
        out = super()._followed(maker, func, args, kwargs)
        for place, x in enumerate(tree_leaves(out)):
            root = maker, place
            if absent := absent_in(x):
                for part in absent if root in self.plan.offers else ():
                    part.origins = {root}  # an earlier stage has the value itself
            elif isinstance(x, torch.Tensor):
                self._here[id(x)] = root, weakref.ref(x), _versions(_parts(x))
        return out

    def _refuse_hooks(self, func: Callable, maker: Maker) -> None:
        if func not in _HOOKS:
            return
        frame = _frame_of(torch.nn.modules.module)
        if frame is None or frame.f_locals.get("self") in self.cut.around:  # not a hook of a layer
            raise UncuttableError(
                f"{self.cut.caller}: the forward of {type(self.cut.model).__name__} calls {maker[1]} between its "
                "layers, and several stages would: call it in a layer"
            )

    def gives(self, origin: Any) -> bool:
        """Return whether the next trial has this parameter or buffer."""
        return False

    def call(self, layer: CutLayer, forward: Callable, args: tuple, kwargs: dict):
        self.inside, number, cut = layer, self._calls, self.cut
        try:
            self._draws |= not all(map(torch.equal, self._state, generator_states(cut.device)))
            if self._others != cut.other_generators():
                raise UncuttableError(
                    f"{cut.caller}: the forward of {type(cut.model).__name__} draws from Python's random numbers or "
                    "from a torch.Generator between its layers, and stages would draw others: draw them in a layer"
                )
            stage = cut.stage_of(number, layer.name, self.stage)
            if stage > self.stage:
                self._check_checkpoints(layer.name, False)
                self._offer()
                self.ended = True
                raise StageEndedError
            self._calls = number + 1
            known = self._ran.get(number) if stage == self.stage else self.plan.results[number]
            self._check_checkpoints(layer.name, stage == self.stage)
            if stage == self.stage and (missing := origins_in((args, kwargs))):
                raise AbsentValueError(missing, f"{layer.name} needs values of another stage")
            if known is not None:
                return self._skipped(number, known, args, kwargs)
            return self._run(number, layer, forward, args, kwargs)
        finally:
            self._state, self._others = generator_states(cut.device), cut.other_generators()
            self.inside = None

    def _check_checkpoints(self, name: str, runs: bool) -> None:
        """Refuse a checkpoint of torch around layers of several stages, and one without a graph around other stages'.

        Args:
            runs: the layer is on this stage.
        """
        frame = _frame_of(torch.utils.checkpoint)
        before, self._region = self._region, frame and (frame, runs)
        if frame is None:
            return
        if not runs and torch.is_grad_enabled() != self._context[0]:
            raise UncuttableError(
                f"{self.cut.caller}: {name} is in a checkpoint with use_reentrant=True, which gives values of other "
                "stages no gradient: pass use_reentrant=False"
            )
        if before is not None and before[0] is frame and before[1] != runs:
            raise UncuttableError(
                f"{self.cut.caller}: one checkpoint has {name} and a layer of another stage, and would run both again: "
                "put a checkpoint around each layer"
            )

    def _offer(self) -> None:
        """Note the values that are in use. A view, or what was changed since, is made again from what it came from."""
        for root, reference, versions in self._here.values():
            x = reference()
            if x is None or any(part._is_view() for part in _parts(x)):
                continue
            if not self._is_written(_parts(x), versions):
                self._offers[root] = Offer(self.stage, Made.of(x))
                self.made[root] = x

    def _run(self, number: int, layer: CutLayer, forward: Callable, args: tuple, kwargs: dict):
        refuse_caches(layer.layer, args, kwargs, "and every stage would fill the part of its own layers alone")
        tensors = [part for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) for part in _parts(x)]
        versions, arguments = _versions(tensors), tree_leaves((args, kwargs))
        output = layer.seeded(forward, args, kwargs)
        after = tree_leaves((args, kwargs))
        if versions != _versions(tensors) or len(after) != len(arguments) or any(map(is_not, after, arguments)):
            raise ValueError(
                f"{self.cut.caller}: {layer.name}, a {type(layer.layer).__name__}, changes its input in place, which "
                "other stages would not see: let it work on a new tensor (inplace=False)"
            )
        _warn_of_attributes(layer)
        parts, structure = tree_flatten(output)
        if absent_in(parts):
            raise ValueError(f"{self.cut.caller}: {layer.name} uses a parameter or buffer of a layer on another stage")
        result = self._ran[number] = result_of(parts, structure, arguments)
        return self._kept(number, result, parts)

    def _handed_out(self, root: Root, value: torch.Tensor) -> torch.Tensor:
        copy = value.clone()
        self._watch(root, copy)
        return copy

    def _is_written(self, parts: list[torch.Tensor], versions: list[int]) -> bool:
        return _versions(parts) != versions or any(id(part) in self._touched for part in parts)

    def found(self) -> ForwardPlan:
        """Return what this trial has found, for `ForwardPlan.add`."""
        written = {root for root, parts, versions in self._versions if self._is_written(parts, versions)}
        values = {**self.known, **self.made}
        for root in written:
            (number, function, _), _ = maker, _ = root
            others = [x for other, x in values.items() if other[0] == maker and other != root]
            if not function and not _memory_of([values[root]]).isdisjoint(_memory_of(others)):
                raise UncuttableError(
                    f"{self.cut.caller}: {self.cut.names[number]} returns several tensors that share memory, and the "
                    "code after it writes to one: let that work on a new tensor"
                )
        if self._before is not None and (after := self.cut.state()) != self._before:
            name = next(key[1] for key, value in after.items() if value != self._before.get(key))
            raise UncuttableError(
                f"{self.cut.caller}: the forward of {type(self.cut.model).__name__} changes {name} outside of its "
                "layers, and each rank runs that several times in a call; make that a module of its own"
            )
        if replaced := self._buffers.keys() - self.cut.buffers().keys():
            raise UncuttableError(
                f"{self.cut.caller}: the forward of {type(self.cut.model).__name__} puts another tensor in the place "
                f"of its buffer {next(iter(replaced))[1]}, which stages would not have: write to it (copy_)"
            )
        return ForwardPlan(
            results=self._ran,
            names=self.cut.names,
            stages=self.cut.stages,
            whole=not self.ended,
            offers=self._offers,
            written=written,
            draws=self._draws,
        )


def _frame_of(module: ModuleType) -> FrameType | None:
    """Return the innermost frame under way of a function of a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != module.__file__:
        frame = frame.f_back
    return frame


def _warn_of_attributes(layer: CutLayer) -> None:
    for module in layer.layer.modules() if not layer.cut.warned else ():
        for name, x in vars(module).items():
            if isinstance(x, torch.Tensor) and x.requires_grad and x.grad_fn is not None:
                warnings.warn(
                    f"{layer.cut.caller}: {layer.name} keeps a tensor with a gradient as {name}; code outside of the "
                    "layer that reads it sees it on one stage alone (let the layer return it)",
                    stacklevel=2,
                )
                layer.cut.warned = True
                return


def _context() -> tuple:
    """Return what custom autograd functions and checkpoints change while they run: gradients, and saved tensors."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [part for _, part in parts_here(x)]


def _memory_of(values: list) -> set[int]:
    """Return what identifies the memory of the tensors among these values."""
    tensors = [part for x in values if isinstance(x, torch.Tensor) for part in _parts(x)]
    return {part.untyped_storage()._cdata for part in tensors}


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the tensors' version counters, which change on a write; tensors of inference_mode have none."""
    return [x._version for x in tensors if not x.is_inference()]
