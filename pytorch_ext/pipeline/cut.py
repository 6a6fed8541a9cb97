"""The cut of a model into the stages of a pipeline, the same on all ranks, and the checks before it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from logging import getLogger
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft._C import CommError
from weft.activation_checkpoint import recomputes
from weft.arguments import check_choice, check_module
from weft.comm.registry import communicator
from weft.context_parallel.region import agreed, sharing_in
from weft.context_parallel.shared_sequence import Sharing
from weft.data_parallel.data_parallel import DataParallel
from weft.pipeline.balance import ROUNDS, balanced
from weft.pipeline.forward_cut import ForwardCut, UncuttableError, has_state
from weft.pipeline.forward_plan import Call
from weft.pipeline.layer_split import LayerSplit
from weft.pipeline.model_stage import ModelStage, stages_of
from weft.pipeline.recording import CallRecording, recorded, rehearse
from weft.pipeline.schedules import SCHEDULES, Schedule
from weft.tensor_parallel.auto.example_inputs import calls

_log = getLogger("weft")


class PipelineCut(ForwardCut):
    """A model cut into the stages of a pipeline.

    Attributes:
        layers_per_stage: number of layers of each stage.
        stage_of_layer: stage of each layer, if no call was recorded; the first step finds the order of the calls.
    """

    way_out = "Cut elsewhere (balance=[...]), pass example=, or make what needs that a module of its own"
    layers_per_stage: tuple[int, ...]
    stage_of_layer: Mapping[str, int] = MappingProxyType({})

    def __init__(self, model: nn.Module, device: torch.device, layers, plan: Schedule, ranks: int, total: int):
        super().__init__("Pipeline", model, device, None if layers is None else _named_layers(model, layers))
        self._rank_of = [plan.rank_of(stage, ranks) for stage in range(total)]

    @property
    def total(self) -> int:
        return len(self._rank_of)

    def rank_of(self, stage: int) -> int:
        return self._rank_of[stage]

    def stage_of_new(self, name: str, running: int) -> int | None:
        stage = self.stage_of_layer.get(name)
        if stage is not None and stage < (self.stages[-1] if self.stages else 0):
            raise ValueError(
                f"Pipeline: the forward of {type(self.model).__name__} calls {name} later than the model has it, and "
                "that layer is on an earlier stage: pass example=, a micro-batch of its inputs"
            )
        return stage

    def calls(self) -> Iterator[tuple[nn.Module, int]]:
        """Yield the layer of each call and the number of its stage."""
        yield from zip(map(self.layers.__getitem__, self.names), self.stages, strict=True)


def check_arguments(model: nn.Module, schedule: str, loss, reduction: str) -> None:
    """Raise ValueError for a model, schedule, loss or reduction that Pipeline cannot use."""
    check_module("Pipeline", model)
    if isinstance(model, LayerSplit | DataParallel):
        raise ValueError(
            f"Pipeline: the model is a {type(model).__name__}, as weft.parallelize returns it for a mesh with pp "
            'or dp: call weft.parallelize(model, mesh["cp", "tp"]), and give the whole mesh to Pipeline'
        )
    if made := [name for name, parameter in model.named_parameters() if parameter.is_inference()]:
        raise ValueError(
            f"Pipeline: {made[0]!r} was made inside of torch.inference_mode, and has no gradient: make the model "
            "outside"
        )
    check_choice("Pipeline: schedule", schedule, SCHEDULES)
    check_choice("Pipeline: reduction", reduction, ("mean", "sum"))
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise ValueError(
            "Pipeline: the loss has parameters, which the last rank alone would train: make what they compute a "
            "layer of the model"
        )
    checkpoints = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    if SCHEDULES[schedule].halves and (recomputes(model) or checkpoints):
        whole = ", ".join(repr(name) for name, plan in SCHEDULES.items() if not plan.halves)
        raise ValueError(
            f"Pipeline: schedule={schedule!r} takes each backward in parts, and every part would compute the "
            f'activations again: use {whole}, or recompute="none" in weft.parallelize '
            "(model.gradient_checkpointing_disable() in transformers)"
        )


def dimensions_of(mesh) -> dict[str, DeviceMesh]:
    """Return the mesh's dimensions by name. Raise ValueError if "pp" is not among them."""
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else None
    if names is None or "pp" not in names:
        kind = type(mesh).__name__ if names is None else f"one with the dimensions {names}"
        raise ValueError(f'Pipeline: mesh must be a DeviceMesh with a dimension "pp", got {kind}: weft.init_mesh(pp=2)')
    return {name: mesh if mesh.ndim == 1 else mesh[name] for name in names}


def sharing_of(model: nn.Module, along: dict[str, DeviceMesh]) -> Sharing | None:
    """Return how the model shares its sequence. Raise ValueError if the mesh says otherwise."""
    sharing = sharing_in(model).get("")
    ranks = communicator(along["cp"]) if "cp" in along else None
    if ranks is not None and ranks.world_size > 1 and (sharing is None or sharing.ranks != ranks):
        raise ValueError(
            f'Pipeline: the mesh has "cp" of {ranks.world_size}, and the model does not share its sequence among these '
            'ranks: call weft.parallelize(model, mesh["cp", "tp"]) first'
        )
    if sharing is not None and sharing.dim == 0:
        raise ValueError(
            "Pipeline: micro-batches are cut along dimension 0 of the arguments, and the model shares its sequence "
            "along that: make the sequence another dimension"
        )
    return sharing


def cut_of(
    model: nn.Module,
    along: dict[str, DeviceMesh],
    schedule: str,
    microbatches: int,
    stages_per_rank: int | None,
    layers: Sequence[str] | None,
    balance: str | Sequence[int],
    memory: float | None,
    example,
    loss,
    device: torch.device,
) -> tuple[PipelineCut, list[ModelStage]]:
    """Cut a model into stages as the first rank would cut it; return the stages of all ranks. A collective call.

    Raises:
        ValueError: as in Pipeline.
    """
    plan, ranks = SCHEDULES[schedule], along["pp"].size()
    total = _number_of_stages(plan, schedule, ranks, stages_per_rank, microbatches)
    cut = PipelineCut(model, device, layers, plan, ranks, total)
    with ExitStack() as failing:
        failing.callback(cut.undo)
        inputs, recording = _recorded(cut, sharing_of(model, along), example)
        cut.names = recording.names
        try:
            measured = None if example is None else inputs
            sizes: list[int] | str = _sizes(cut, along["pp"], schedule, microbatches, balance, memory, measured)
        except _RankError as error:  # raised below, on every rank
            sizes = str(error)
        cut.layers_per_stage = _agreed(along, (schedule, microbatches, total, len(cut.names)), sizes)
        cut.stages = [stage for stage, size in enumerate(cut.layers_per_stage) for _ in range(size)]
        if recording.results:
            _rehearse(cut, inputs, recording)
        else:
            cut.stage_of_layer = dict(zip(cut.names, cut.stages, strict=True))
        stages = stages_of(cut, total, recording, loss)
        _refuse_shared_means(model, stages, [cut.rank_of(stage) for stage in range(total)])
        failing.pop_all()
    return cut, stages


def _agreed(along: dict[str, DeviceMesh], own: tuple, sizes: list[int] | str) -> tuple[int, ...]:
    """Return the layers of each stage as the first rank would cut. A collective call.

    Args:
        own: this rank's (schedule, microbatches, stages, layers).
        sizes: its layers of each stage, or why there are none; they may differ, as shards and times do.

    Raises:
        ValueError: ranks differ, or one has no sizes; on every rank.
    """
    for dimension in along.values():
        ranks = communicator(dimension)
        found = ranks.all_gather_object((own, sizes))
        if any(of_rank != found[0][0] for of_rank, _ in found):
            raise ValueError(
                "Pipeline: ranks differ in (schedule, microbatches, stages, layers): "
                + "; ".join(f"rank {n} has {own}" for n, (own, _) in zip(ranks.global_ranks, found, strict=True))
            )
        sizes = next((why for _, why in found if isinstance(why, str)), found[0][1])
    if isinstance(sizes, str):
        raise ValueError(sizes)
    return tuple(sizes)


def _rehearse(cut: PipelineCut, inputs: Call, recording: CallRecording) -> None:
    try:
        rehearse(cut, cut.total, inputs, recording)
    except (UncuttableError, CommError):
        raise
    except Exception as error:
        recording.uses.clear()
        _log.warning(
            "Pipeline: every stage has all parameters around the layers, because a forward without the layers failed "
            "(%s: %s)",
            type(error).__name__,
            error,
        )


def _recorded(cut: PipelineCut, sharing: Sharing | None, example) -> tuple[Call, CallRecording]:
    """Return a call of the model and its recording.

    If no guessed call runs, the layers are taken in the order in which the model has them.

    Raises:
        ValueError: the example does not run, or the model has no layers.
    """
    if not cut.layers:
        raise ValueError("Pipeline: the model has no layer with parameters; there is nothing to split")
    for inputs in [call_with(example)] if example is not None else _guesses(cut.model, cut.device):
        try:
            cut.shared = None if sharing is None else agreed("Pipeline", sharing, inputs)
            recording = recorded(cut, inputs)
        except (UncuttableError, CommError):
            raise
        except Exception as error:
            if example is None:
                continue
            raise ValueError(
                f"Pipeline: the forward of {type(cut.model).__name__} did not run with example= "
                f"({type(error).__name__}: {error}): pass a micro-batch of its inputs (a dict for arguments by name)"
            ) from error
        if recording.names:
            return inputs, recording
    recording = CallRecording()
    recording.names = list(cut.layers)
    return ((), {}), recording


def _named_layers(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules of these names by name; a `*` stands for the elements of a list."""
    named = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, str] = {}
    for pattern in patterns:
        owner = pattern.removesuffix(".*")
        children = named[owner].named_children() if pattern.endswith(".*") and owner in named else []
        for name in [f"{owner}.{child}" for child, _ in children] or [pattern]:
            if name not in named:
                some = ", ".join([name for name in named if name.count(".") < 2 and name][:20])
                raise ValueError(f"Pipeline: layers names {pattern!r}, and no module is called that; there are {some}")
            if has_state(named[name]):
                found.setdefault(named[name], name)
    return {name: layer for layer, name in found.items()}


def call_with(inputs) -> Call:
    """Return the arguments of a call of the model: a tensor, several, or a mapping of names."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)), {}


RECORDED = ("output_hidden_states", "output_attentions")


def _guesses(model: nn.Module, device: torch.device) -> Iterator[Call]:
    """Yield the calls that an automatic plan tries, with zeros for tensors without values."""
    found: list[Call] = []

    def noted(*args: Any, **named: Any) -> None:
        found.append((args, {name: x for name, x in named.items() if name not in RECORDED}))

    def filled(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.zeros(x.shape, dtype=x.dtype, device=device) if x.is_meta else x.to(device)

    for call in calls(model):
        call(noted)  # type: ignore[arg-type]
        args, named = found.pop()
        yield tuple(map(filled, args)), {name: filled(x) for name, x in named.items()}


def _elements(cut: ForwardCut) -> list[int]:
    """Return the number of parameters of each call's layer that no earlier call has."""
    seen: set[int] = set()
    elements = []
    for name in cut.names:
        new = {id(x): x.numel() for x in cut.layers[name].parameters() if id(x) not in seen}
        seen |= set(new)
        elements.append(sum(new.values()))
    return elements


def _refuse_shared_means(model: nn.Module, stages: Sequence[nn.Module], owners: Sequence[int]) -> None:
    """Raise ValueError if stages of several ranks use one norm with running means.

    Gradients of a parameter on several ranks are summed, but each rank would keep its own running means.
    """
    users: dict[nn.Module, set[int]] = {}
    names = {module: name for name, module in model.named_modules()}
    for owner, stage in zip(owners, stages, strict=True):
        for module in stage.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                users.setdefault(module, set()).add(owner)
                if len(users[module]) > 1:
                    raise ValueError(
                        f"Pipeline: {names[module]} keeps running means, and stages of several ranks use it: each rank "
                        "would keep its own. Give each use a norm of its own, or cut elsewhere (balance=[...])"
                    )


def _number_of_stages(plan: Schedule, name: str, ranks: int, per_rank: int | None, microbatches: int) -> int:
    per_rank = plan.stages_per_rank if per_rank is None else per_rank
    if per_rank < 1 or (plan.fixed and per_rank != plan.stages_per_rank):
        raise ValueError(
            f"Pipeline: schedule {name!r} has {plan.stages_per_rank} stages on a rank, got stages_per_rank={per_rank}"
        )
    stages = ranks * per_rank
    obstacle = "" if microbatches >= 1 else "it needs at least one: microbatches=1 or more"
    obstacle = obstacle or plan.obstacle(ranks, stages, microbatches)
    if obstacle:
        raise ValueError(
            f"Pipeline: schedule {name!r} cannot run {microbatches} micro-batches on {ranks} ranks: {obstacle}"
        )
    return stages


class _RankError(ValueError):
    """Error that ranks of other pipelines, or with other arguments, may not have."""


def _sizes(
    cut: PipelineCut,
    pp: DeviceMesh,
    schedule: str,
    microbatches: int,
    balance,
    memory: float | None,
    inputs: Call | None,
) -> list[int]:
    """Return the number of layers of each stage. A collective call if balance="time".

    Args:
        inputs: a call to measure the layers on, if there is one.
    """
    names, stages, ranks = cut.names, cut.total, pp.size()
    if memory is not None and (balance != "time" or stages != ranks):
        raise _RankError('Pipeline: memory= is for balance="time" and schedules with one stage on a rank')
    if len(names) < stages:
        raise ValueError(
            f"Pipeline: schedule {schedule!r} needs {stages} stages, and the model has {len(names)} layers with "
            f'parameters ({", ".join(names)}). Use fewer ranks along "pp", a schedule with one '
            'stage on a rank ("1f1b"), or split containers further with layers=[...]'
        )
    if not isinstance(balance, str):
        sizes = list(balance)
        if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != len(names):
            raise ValueError(
                f"Pipeline: balance={sizes} must be {stages} numbers, 1 or more, that add up to {len(names)} layers"
            )
        return sizes
    size = 4 * max((x.element_size() for x in cut.model.parameters()), default=0)  # gradients, two moments as well
    states = [size * count for count in _elements(cut)]
    if balance == "parameters":
        return balanced([states] * stages)
    if balance != "time":
        raise ValueError(f'Pipeline: balance={balance!r} is not "parameters", "time" or the layers of each stage')
    if inputs is None:
        raise ValueError('Pipeline: balance="time" measures the layers on a micro-batch of inputs: pass it as example=')
    runs = [recorded(cut, inputs, measure=True).costs for _ in range(ROUNDS)]
    own = [min(run, key=lambda cost: cost.seconds) for run in zip(*runs, strict=True)], memory
    of_rank = communicator(pp).all_gather_object(own)
    if len({len(layers) for layers, _ in of_rank}) > 1:
        of_rank = [own] * ranks  # refused by `_agreed`
    of_stage = [of_rank[cut.rank_of(stage)] for stage in range(stages)]
    seconds = [[layer.seconds for layer in layers] for layers, _ in of_stage]
    if all(memory is None for _, memory in of_stage):
        return balanced(seconds)
    kept = SCHEDULES[schedule].kept
    needed = [
        [state + kept(stage, ranks, microbatches) * layer.saved for state, layer in zip(states, layers, strict=True)]
        for stage, (layers, _) in enumerate(of_stage)
    ]
    limits = [float("inf") if memory is None else memory for _, memory in of_stage]
    try:
        return balanced(seconds, lambda stage, begin, end: sum(needed[stage][begin:end]) <= limits[stage])
    except ValueError as error:
        raise _RankError(
            f"Pipeline: no cut fits: the ranks have memory={limits} bytes, and all layers together need {needed[0]} "
            "on the first"
        ) from error
