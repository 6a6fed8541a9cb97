"""A model's own forward, cut into stages by the order in which it calls its layers.

Every stage runs the whole forward of the model. Layers of its own run. Layers of earlier stages are skipped: a result
that this stage needs was sent, the others are absent. The first layer of a later stage ends the forward. The code
between layers runs on every stage, on the same inputs and with the same random numbers; of absent values it computes
shapes only. So masks and angles are made where they are used, and nothing is sent that a later stage does not need.

A layer is an element of the model's outermost lists, or another module with parameters that the code around these lists
calls. The results that cross are found in one run of a micro-batch through all stages (`ForwardCut.plan`).
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from weft._C import CommError
from weft.comm.communicator import Communicator
from weft.context_parallel.hugging_face import models_of_transformers
from weft.context_parallel.shared_sequence import NATIVE
from weft.forward import ForwardChain, FunctionMode, step_of
from weft.forward.running import followed
from weft.layer_lists import layers_of, opened_in, refuse_caches, tensors_outside
from weft.pipeline.absent import Absent, AbsentValueError, absent_in, like
from weft.pipeline.balance import LayerCost, measured, undisturbed
from weft.pipeline.layer_graph import numbers_in
from weft.pipeline.stage_boundary import cross
from weft.rng import UnitDraws, random_numbers_of

Root = tuple[int, int]  # a result of a layer: the number of the call, and of the tensor in its result
Call = tuple[tuple, dict]  # arguments of the model
_PRIME = 1_000_003  # keeps the seeds of micro-batches apart


@dataclass(frozen=True)
class Argument:
    """A part of a layer's result that is one of its arguments."""

    number: int


@dataclass(frozen=True)
class Made:
    """A tensor that a layer made."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class LayerResult:
    """Structure of a layer's result.

    Attributes:
        parts: an Argument, a Made or a constant each.
        structure: the pytree of the parts.
    """

    parts: tuple
    structure: TreeSpec

    def __reduce__(self):
        # A pickled TreeSpec warns when it is read; a result with its parts' numbers does not.
        return _sent, (self.parts, tree_unflatten(range(len(self.parts)), self.structure))


@dataclass
class ForwardPlan:
    """What each layer gives, and the results that cross.

    Attributes:
        results: structure of the result of each call.
        leaving: the results that each stage sends to the next one.
        written: results that the code between layers changes in place; every stage changes a copy.
    """

    results: dict[int, LayerResult] = field(default_factory=dict)
    leaving: list[list[Root]] = field(default_factory=list)
    written: set[Root] = field(default_factory=set)

    def made(self, root: Root) -> Made:
        return self.results[root[0]].parts[root[1]]


class CountingError(ValueError):
    """Error for a forward that keeps a number of its own from call to call."""


class _StageEnd(BaseException):
    """Raised by the first layer of a later stage; no `except Exception` of the model stops it."""


class CutLayer:
    """Step of the forward of a layer of a model that is cut."""

    forward: Callable  # the rest of the layer's own

    def __init__(self, name: str, layer: nn.Module, cut: "ForwardCut"):
        self.name, self.layer, self.cut = name, layer, cut

    def __call__(self, forward: Callable, layer: nn.Module, *args, **kwargs):
        self.forward, run = forward, self.cut.run
        if run is None:  # recomputation in backward, which draws the numbers of the forward again
            return self.seeded(args, kwargs)
        if run.inside is not None:
            run.enter_nested(self)
            return self.forward(*args, **kwargs)
        return run.call(self, args, kwargs)

    def seeded(self, args, kwargs):
        with self.cut.numbers_of_layer(), self.cut.watched(self.name):
            return self.forward(*args, **kwargs)


class ForwardCut:
    """A model whose layers ask the running stage whether to run.

    Attributes:
        names: name of the layer of each call, in order.
        stages: stage of each call.
        run: the forward under way.
        watched: watched(name) is a context around each layer that runs.
    """

    watched: Callable[[str], AbstractContextManager] = nullcontext

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model, device
        self.names: list[str] = []
        self.stages: list[int] = []
        self.run: StageForward | CallRecording | None = None
        for name, layer in layers_of(model).items():
            if any(True for _ in layer.parameters()) or any(map(_has_means, layer.modules())):
                ForwardChain.of(layer).add("stage", CutLayer(name, layer, self))

    def undo(self) -> None:
        """Give the layers back their own forward."""
        for layer in layers_of(self.model).values():
            if isinstance(step_of(layer, "stage"), CutLayer):
                ForwardChain.of(layer).remove("stage")

    @property
    def total(self) -> int:
        return self.stages[-1] + 1

    @contextmanager
    def numbers_of_layer(self) -> Iterator[None]:
        """Run a layer with random numbers of its own, so that the code after it draws alike on every stage."""
        with random_numbers_of(int(torch.randint(2**62, (1,))), self.device):
            yield

    def forward(self, run: "StageForward | CallRecording", inputs: Call, seed: int | None = None):
        """Run the model's forward as `run` says.

        Returns:
            The model's output, or None if a later stage goes on.
        """
        self.run = run
        try:
            with without_caches(self.model), nullcontext() if seed is None else random_numbers_of(seed, self.device):
                return self.model(*inputs[0], **inputs[1])
        except _StageEnd:
            return None
        finally:
            self.run = None

    def plan(self, stages: Mapping[int, "ModelStage"], owner: Callable[[int], int], ranks: Communicator) -> ForwardPlan:
        """Run the first micro-batch through all stages, one after another, and note what each needs. A collective call.

        A stage that needs a value asks for it, gets it from the rank that has it, and begins again.

        Args:
            stages: this rank's stages; they have begun.
            owner: stage -> its rank.

        Raises:
            ValueError: the forward calls other layers than when it was cut, or cannot be cut; on every rank.
        """
        plan, needed = ForwardPlan(), []
        values: dict[Root, torch.Tensor] = {}  # that this rank has made
        for stage in range(self.total):
            known: dict[Root, torch.Tensor] = {}
            asked: set[Root] = set()
            ran: dict[int, LayerResult] = {}
            while True:
                box: list = [None]
                if stage in stages:
                    box = [self._attempt(stages[stage], plan, ran, known)]
                dist.broadcast_object_list(box, group=ranks.group, group_src=owner(stage))
                found = box[0]
                if isinstance(found, Exception):
                    raise found
                if isinstance(found, ForwardPlan):
                    plan.results |= found.results
                    plan.written |= found.written
                    needed.append(asked)
                    values |= known
                    break
                for root in found:
                    holder = owner(self.stages[root[0]])
                    box = [values[root].cpu() if holder == ranks.rank else None]
                    dist.broadcast_object_list(box, group=ranks.group, group_src=holder)
                    known[root] = box[0].to(self.device)
                asked |= set(found)
        for stage in range(self.total - 1):
            later = set().union(*needed[stage + 1 :])
            plan.leaving.append(sorted(root for root in later if self.stages[root[0]] <= stage))
        return plan

    def _attempt(self, stage: "ModelStage", plan: ForwardPlan, ran, known) -> ForwardPlan | list[Root] | Exception:
        """Return the results of this stage's layers, the results of other stages that it needs, or an error.

        Args:
            ran: results of the layers that ran in an earlier attempt; they do not run again.
            known: values of these results, and of those of other stages that were fetched.
        """
        run = StageForward(self, stage.number, plan, known, ran)
        try:
            output = self.forward(run, stage.inputs[0])
            run.finish(output)
            if stage.last:
                stage.loss_of(output, 0)
        except AbsentValueError as error:
            asked = [origin for origin in error.origins if isinstance(origin, tuple)]
            others = [origin for origin in error.origins if not isinstance(origin, tuple)]
            if others or not asked or any(root in known for root in asked):
                return _uncut(self.model, f"{error} ({', '.join(map(str, others)) or 'of an unknown layer'})")
            return sorted(asked)
        except CommError:
            raise
        except Exception as error:
            known_type = isinstance(error, ValueError)
            return error if known_type and _pickles(error) else RuntimeError(f"{type(error).__name__}: {error}")
        finally:
            known |= run.made
        found = ForwardPlan(run.results, written=run.written())
        return found if _pickles(found) else _uncut(self.model, "a layer returns an object that cannot be sent")


class StageForward:
    """One forward of the model on one stage.

    Args:
        known: results of earlier stages.
        ran: if the plan is being made: results of this stage's layers that do not run again; their values are known.

    Attributes:
        inside: the layer that runs.
        results: structure of the results of this stage's layers.
        made: results of this stage's layers: all if the plan is being made, else those that leave.
    """

    def __init__(
        self, cut: ForwardCut, stage: int, plan: ForwardPlan, known, ran: dict[int, LayerResult] | None = None
    ):
        self.cut, self.stage, self.plan, self.known, self.plans = cut, stage, plan, known, ran is not None
        self.inside: CutLayer | None = None
        self.results: dict[int, LayerResult] = {} if ran is None else ran
        self.made: dict[Root, torch.Tensor] = {}
        self._leaving = set() if self.plans or stage + 1 == cut.total else set(plan.leaving[stage])
        self._copies: list[tuple[Root, torch.Tensor]] = []
        self._calls = 0

    def enter_nested(self, layer: CutLayer) -> None:
        """Note a layer that another layer calls; it is on the stage of that layer."""

    def call(self, layer: CutLayer, args, kwargs):
        number, self._calls = self._calls, self._calls + 1
        cut = self.cut
        if number >= len(cut.names) or cut.names[number] != layer.name:
            expected = cut.names[number] if number < len(cut.names) else "the end"
            raise ValueError(
                f"Pipeline: the forward of {type(cut.model).__name__} calls {layer.name} where it called {expected} "
                "when it was cut; every batch must run the same layers in the same order: pass example= like the "
                "batches (and set layerdrop to 0)"
            )
        if cut.stages[number] > self.stage:
            raise _StageEnd
        refuse_caches(layer.layer, args, kwargs, "and every stage would fill the part of its own layers alone")
        leaves, _ = tree_flatten((args, kwargs))
        result = (self.results if self.plans else {}).get(number) or self.plan.results.get(number)
        if result is not None and (self.plans or cut.stages[number] < self.stage):
            with cut.numbers_of_layer():
                return self._skipped(number, result, leaves)
        if (absent := absent_in(leaves)) != []:
            origins = frozenset().union(*(x.origins for x in absent))
            raise AbsentValueError(origins, f"{layer.name} needs values of another stage")
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        versions = [x._version for x in tensors if not x.is_inference()]
        self.inside = layer
        try:
            output = layer.seeded(args, kwargs)
        finally:
            self.inside = None
        if versions != [x._version for x in tensors if not x.is_inference()]:
            raise ValueError(
                f"Pipeline: {layer.name}, a {type(layer.layer).__name__}, changes its input in place, which other "
                "stages would not see: let it work on a new tensor (inplace=False)"
            )
        return self._noted(number, layer, output, leaves, result)

    def _noted(self, number: int, layer: CutLayer, output, leaves: list, expected: LayerResult | None):
        """Note the result of a layer that ran; return it with copies of what other code changes in place."""
        parts, structure = tree_flatten(output)
        if absent_in(parts):
            raise ValueError(f"Pipeline: {layer.name} uses a parameter or buffer of a layer on another stage")
        result = LayerResult(tuple(_kind_of(part, leaves) for part in parts), structure)
        if expected is not None and result != expected:
            raise ValueError(
                f"Pipeline: {layer.name} returned {result.parts} for this micro-batch, and {expected.parts} for the "
                "first one of these shapes; the shapes that cross stages must not depend on values"
            )
        self.results[number] = result
        for place, (part, kind) in enumerate(zip(parts, result.parts, strict=True)):
            root = (number, place)
            if isinstance(kind, Made):
                if self.plans or root in self._leaving:
                    self.made[root] = part
                parts[place] = self._handed_out(root, part)
        return tree_unflatten(parts, structure)

    def _skipped(self, number: int, result: LayerResult, leaves: list):
        """Return the result of a layer that does not run here."""

        def part_of(place: int, kind):
            if isinstance(kind, Argument):
                return leaves[kind.number]
            if not isinstance(kind, Made):
                return kind
            root = (number, place)
            value = self.known.get(root)
            return self._absent(kind, root) if value is None else self._handed_out(root, value)

        return tree_unflatten([part_of(*numbered) for numbered in enumerate(result.parts)], result.structure)

    def _absent(self, kind: Made, root: Root) -> Absent:
        return Absent(kind.empty("meta"), self.cut.device, {root})

    def _handed_out(self, root: Root, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the code between layers gets."""
        if not self.plans:
            return value.clone() if root in self.plan.written else value
        self._copies.append((root, value.clone()))
        return self._copies[-1][1]

    def written(self) -> set[Root]:
        """Return the results that the code between layers changed in place."""
        return {root for root, copy in self._copies if copy._version > 0}

    def finish(self, output) -> None:
        """Raise ValueError if the forward ended before this stage's layers."""
        missing = [name for name, stage in zip(self.cut.names, self.cut.stages, strict=True) if stage <= self.stage]
        if self._calls < len(missing):
            raise ValueError(
                f"Pipeline: the forward of {type(self.cut.model).__name__} does not call {missing[self._calls]}, which "
                "it called when it was cut: pass example= like the batches"
            )

    def leaving(self) -> tuple[torch.Tensor, ...]:
        """Return the results that the next stage gets."""
        values = {**self.known, **self.made}
        return tuple(cross(values[root]) for root in self.plan.leaving[self.stage])


class ModelStage(nn.Module):
    """One stage of a model that runs the model's own forward.

    Args:
        layers: the layers of this stage.
        outside: (module, name) of the other parameters and buffers that it uses.
        loss: loss(output, targets) -> scalar; None is the model's own.

    Attributes:
        first_unit: number of the first micro-batch's unit, with `invariant`.
    """

    first_unit: int | None = None

    def __init__(self, cut: ForwardCut, number: int, layers: Sequence[nn.Module], outside, loss):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.number, self.last = number, number + 1 == cut.total
        self.microbatch = 0
        self.inputs: list[Call] = []
        self._cut, self._outside, self._loss = cut, tuple(outside), loss
        self._targets: Sequence = ()
        self.plan, self._seed = ForwardPlan(), 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers, and those outside as they are now."""
        outside = (module._parameters.get(name) for module, name in self._outside)
        return iter(dict.fromkeys([*self.layers.parameters(), *(x for x in outside if x is not None)]))

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        outside = (module._buffers.get(name) for module, name in self._outside)
        return iter([*self.layers.buffers(), *(x for x in outside if x is not None)])

    def begin(self, inputs: list[Call], targets: Sequence, seed: int) -> None:
        """Prepare for the forwards of a batch, given by micro-batch."""
        self.inputs, self._targets, self._seed = inputs, targets, seed

    def forward(self, *values: torch.Tensor):
        """Run the stage on micro-batch `self.microbatch`; return the loss, or the results for the next stage."""
        cut, plan = self._cut, self.plan
        arriving = plan.leaving[self.number - 1] if self.number else []
        run = StageForward(cut, self.number, plan, dict(zip(arriving, values, strict=False)))
        first, seed = self.first_unit, self._seed + _PRIME * self.microbatch
        draws = nullcontext() if first is None else UnitDraws(self._seed + first + self.microbatch)
        with followed(cut.model), draws:
            output = cut.forward(run, self.inputs[self.microbatch], seed)
        run.finish(output)
        return self.loss_of(output, self.microbatch) if self.last else run.leaving()

    def loss_of(self, output, microbatch: int) -> torch.Tensor:
        """Return the loss of a micro-batch.

        Raises:
            ValueError: the model returns no loss of its own.
        """
        if self._loss is not None:
            loss = self._loss(output, self._targets[microbatch])
        else:
            loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", None)
            loss = output if isinstance(output, torch.Tensor) and output.dim() == 0 else loss
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise ValueError(
                f"Pipeline: the model returns {type(output).__name__} without a scalar loss: give it labels "
                "(step({..., 'labels': labels})), or pass loss="
            )
        if absent := absent_in(loss):
            raise AbsentValueError(absent[0].origins, "the loss needs values of another stage")
        return loss


class CallRecording:
    """A forward of the whole model that notes the order of its layers.

    Attributes:
        names: of each call.
        costs: of each call, if they were asked for.
        nested: calls in which a layer ran inside of another, by its name.
        first_use: id of a tensor -> number of calls before the code outside of layers first used it.
    """

    def __init__(self, measure: bool = False) -> None:
        self.inside: CutLayer | None = None
        self.measure = measure
        self.names: list[str] = []
        self.costs: list[LayerCost] = []
        self.nested: dict[str, set[int]] = {}
        self.first_use: dict[int, int] = {}

    def enter_nested(self, layer: CutLayer) -> None:
        self.nested.setdefault(layer.name, set()).add(len(self.names) - 1)

    def call(self, layer: CutLayer, args, kwargs):
        self.names.append(layer.name)
        self.inside = layer
        try:
            if not self.measure:
                return layer.forward(*args, **kwargs)
            values, seconds, saved = measured(layer.layer, layer.forward, args, kwargs)
            self.costs.append(LayerCost(seconds, saved))
            return values
        finally:
            self.inside = None


class _Uses:
    """Handler of functions that notes the first use of a parameter or buffer by the code outside of layers."""

    def __init__(self, run: CallRecording, model: nn.Module):
        self.run, self.held = run, {id(x) for x in [*model.parameters(), *model.buffers()]}

    def __call__(self, func, args: tuple, kwargs: dict):
        if self.run.inside is None and func not in NATIVE:
            for x in tree_leaves((args, kwargs)):
                if id(x) in self.held:
                    self.run.first_use.setdefault(id(x), len(self.run.names))
        return func(*args, **kwargs)


def recorded(cut: ForwardCut, inputs: Call, measure: bool = False) -> CallRecording:
    """Run the whole model once, without gradients and without a trace, and note the order of its layers."""
    run, opened = CallRecording(measure), opened_in(cut.model)
    before = numbers_in(cut.model, opened)
    with (
        undisturbed(cut.model),
        torch.no_grad(),
        _absent_for_meta(cut.model),
        FunctionMode(every=_Uses(run, cut.model)),
    ):
        cut.forward(run, inputs)
    for name, value in numbers_in(cut.model, opened).items():
        if value != before.get(name, value):
            owner, _, attribute = name.rpartition(".")
            setattr(cut.model.get_submodule(owner), attribute, before[name])
            raise CountingError(
                f"Pipeline: the forward of {type(cut.model).__name__} changes {name} outside of its layers, and every "
                "stage would count its own calls; make that a module of its own"
            )
    return run


@contextmanager
def _absent_for_meta(model: nn.Module) -> Iterator[None]:
    """Put absent tensors in the place of those on the meta device, which could not meet inputs with values."""
    slots = [
        (tensors, name, x)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, x in tensors.items()
        if x is not None and x.is_meta
    ]
    try:
        for tensors, name, x in slots:
            tensors[name] = Absent(x.detach(), torch.device("cpu"), {name})  # type: ignore[assignment]
        yield
    finally:
        for tensors, name, x in slots:
            tensors[name] = x  # type: ignore[assignment]


def stages_of(cut: ForwardCut, recording: CallRecording, loss) -> list[ModelStage]:
    """Return the stages of all ranks.

    A stage has the layers that it calls. A tensor that the code outside of layers uses is on every stage from its first
    use; one that the recording did not use is on all stages. Layers that were not called are on the last stage.
    """
    layers, total = layers_of(cut.model), cut.total
    calls: list[list[str]] = [[] for _ in range(total)]
    for name, stage in zip(cut.names, cut.stages, strict=True):
        calls[stage].append(name)
    for name, numbers in recording.nested.items():
        for number in numbers:
            calls[cut.stages[number]].append(name)
    called = set().union(*calls)
    calls[-1] += [name for name in layers if name not in called]
    first = {key: cut.stages[min(number, len(cut.stages) - 1)] for key, number in recording.first_use.items()}
    own = {id(x) for x in tensors_outside(cut.model)}
    slots = [
        (module, name, first.get(id(x), 0))
        for module in cut.model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, x in tensors.items()
        if x is not None and (id(x) in first or id(x) in own)
    ]
    return [
        ModelStage(
            cut,
            stage,
            [layers[name] for name in dict.fromkeys(calls[stage])],
            [(module, name) for module, name, begin in slots if begin <= stage],
            loss,
        )
        for stage in range(total)
    ]


def leave_out(cut: ForwardCut, own: Sequence[ModelStage]) -> None:
    """Put absent tensors in the place of those that this rank's stages do not use."""
    held = {id(x) for stage in own for x in [*stage.parameters(), *stage.buffers()]}
    names = {id(x): name for name, x in [*cut.model.named_parameters(), *cut.model.named_buffers()]}
    running = {id(module) for stage in own for module in stage.modules()}
    for layer in layers_of(cut.model).values():
        if id(layer) not in running and hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = False  # type: ignore[assignment]
    stand_ins: dict[int, Absent] = {}
    for module in cut.model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None and id(x) not in held and not isinstance(x, Absent):
                    stand_ins.setdefault(id(x), like(x, names[id(x)]))
                    tensors[name] = stand_ins[id(x)]  # type: ignore[assignment]


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Turn off the caches of keys and values of transformers models, which a step has no use for."""
    configurations = [
        part
        for config in {id(part.config): part.config for part in models_of_transformers(model)}.values()
        for part in [config, *vars(config).values()]
        if getattr(part, "use_cache", False) is True
    ]
    try:
        for config in configurations:
            config.use_cache = False
        yield
    finally:
        for config in configurations:
            config.use_cache = True


def refuse_layerdrop(model: nn.Module) -> None:
    """Raise ValueError if a training model of transformers skips layers at random: stages have their layers."""
    configurations = [part.config for part in models_of_transformers(model) if part.training]
    for holder in [*configurations, *(part for part in model.modules() if part.training)]:
        for name, value in vars(holder).items():
            if name.endswith("layerdrop") and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"Pipeline: {name}={value} of {type(model).__name__} skips layers at random, and every micro-batch "
                    f"must run the layers of all stages: set {name} to 0"
                )


def _has_means(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def _kind_of(part: Any, arguments: list):
    for number, argument in enumerate(arguments):
        if part is argument and not isinstance(part, bool | int | float | str | None):
            return Argument(number)
    return Made(part.shape, part.dtype) if isinstance(part, torch.Tensor) else part


def _uncut(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"Pipeline: the forward of {type(model).__name__} cannot be cut here: {reason}. Cut elsewhere (balance=[...]), "
        "or use weft.LayerSplit"
    )


def _sent(parts: tuple, numbered) -> LayerResult:
    return LayerResult(parts, tree_flatten(numbered)[1])


def _pickles(value) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
