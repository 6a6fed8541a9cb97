"""The cut of a model into the stages of a pipeline, the same on all ranks, and the checks before it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.activation_checkpoint import recomputes
from weft.arguments import check_choice
from weft.comm.registry import communicator
from weft.context_parallel.region import sharing_in
from weft.context_parallel.shared_sequence import Sharing
from weft.data_parallel.data_parallel import DataParallel
from weft.pipeline.balance import ROUNDS, LayerCost, balanced, layer_costs
from weft.pipeline.forward_cut import Call, CallRecording, CountingError, ForwardCut, recorded, stages_of
from weft.pipeline.layer_graph import ReadAttributes, UncuttableError, chain_of
from weft.pipeline.layer_split import LayerSplit
from weft.pipeline.schedules import SCHEDULES, Schedule
from weft.tensor_parallel.auto.example_inputs import calls


@dataclass(frozen=True)
class StageCut:
    """A model cut into stages.

    Attributes:
        stages: the stages of all ranks.
        layers_per_stage: number of layers of each stage.
        inputs: names of the arguments of the model's forward that a step gives.
        settings: attributes of the model that its code has read and that must stay as they were.
        forward: the cut of the model's own forward, if it cannot be traced; else None.
    """

    stages: list
    layers_per_stage: tuple[int, ...]
    inputs: list[str]
    settings: ReadAttributes
    forward: ForwardCut | None = None

    def calls(self) -> Iterator[tuple[nn.Module, int]]:
        """Yield each call of a module that one stage runs whole, and the number of the stage."""
        if self.forward is not None:
            yield from zip(map(self.forward.model.get_submodule, self.forward.names), self.forward.stages, strict=True)
            return
        for number, stage in enumerate(self.stages):
            for node in stage.graph.nodes:
                if node.op == "call_module":
                    yield stage.get_submodule(node.target), number


def check_arguments(model: nn.Module, schedule: str, loss, reduction: str) -> None:
    """Raise ValueError for a model, schedule, loss or reduction that Pipeline cannot use."""
    if isinstance(model, LayerSplit | DataParallel):
        raise ValueError(
            f"Pipeline: the model is a {type(model).__name__}, as weft.parallelize returns it for a mesh with pp "
            'or dp: call weft.parallelize(model, mesh["cp", "tp"]), and give the whole mesh to Pipeline'
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
    arguments: Sequence[str] | None,
    balance: str | Sequence[int],
    memory: float | None,
    example,
    loss,
    device: torch.device,
) -> StageCut:
    """Cut a model into stages as the first rank would cut it. A collective call.

    A model that torch.fx cannot trace is cut by the order in which its own forward calls its layers.

    Raises:
        ValueError: as in Pipeline.
    """
    plan, ranks = SCHEDULES[schedule], along["pp"].size()
    total = _number_of_stages(plan, schedule, ranks, stages_per_rank, microbatches)
    own = None
    try:
        if loss is None or isinstance(example, Mapping):
            raise UncuttableError("Pipeline: a loss or arguments by name")
        chain = chain_of("Pipeline", model, layers, arguments)
        names, elements = [layer.name for layer in chain.layers], [layer.elements for layer in chain.layers]
    except UncuttableError as error:
        if layers is not None or arguments is not None:
            raise
        own = _recorded(model, sharing_of(model, along), example, device, error)
        names, elements = own[0].names, _elements(model, own[0].names)

    def costs() -> list[tuple[list[LayerCost], float | None]]:
        """Return what every layer takes on each stage's rank, and that rank's memory."""
        if example is None:
            raise ValueError(
                'Pipeline: balance="time" measures the layers on a micro-batch of inputs: pass it as example='
            )
        if own is None:
            found = layer_costs(chain, (example,) if isinstance(example, torch.Tensor) else tuple(example))
        else:
            runs = [recorded(own[0], own[1], measure=True).costs for _ in range(ROUNDS)]
            found = [min(run, key=lambda cost: cost.seconds) for run in zip(*runs, strict=True)]
        of_rank = communicator(along["pp"]).all_gather_object((found, memory))
        if len({len(layers) for layers, _ in of_rank}) > 1:
            of_rank = [(found, memory)] * ranks  # refused below
        return [of_rank[plan.rank_of(stage, ranks)] for stage in range(total)]

    sizes: list[int] | str  # or why there are none
    try:
        if memory is not None and (balance != "time" or total != ranks):
            raise _RankError('Pipeline: memory= is for balance="time" and schedules with one stage on a rank')
        size = 4 * max((x.element_size() for x in model.parameters()), default=0)  # gradients and two moments as well
        kept = [plan.kept(rank, ranks, microbatches) for rank in range(ranks)]
        sizes = _sizes(names, [size * count for count in elements], costs, kept, total, schedule, balance)
    except _RankError as error:  # raised below, on every rank
        sizes = str(error)
    except ValueError:
        if own is not None:
            own[0].undo()
        raise
    for dimension in along.values():  # shards and times may differ between ranks, the cut must not
        cuts = communicator(dimension).all_gather_object((schedule, microbatches, total, len(names), sizes))
        if any(cut[:4] != cuts[0][:4] for cut in cuts):
            raise ValueError(
                "Pipeline: ranks differ in (schedule, microbatches, stages, layers): "
                + "; ".join(f"rank {rank} has {cut[:4]}" for rank, cut in enumerate(cuts))
            )
        misfit = next((cut[4] for cut in cuts if isinstance(cut[4], str)), None)
        sizes = misfit or cuts[0][4]
    if isinstance(sizes, str):
        if own is not None:
            own[0].undo()
        raise ValueError(sizes)
    if own is None:
        inputs = [str(node.target) for node in chain.inputs]
        cut = StageCut(chain.stages(sizes), tuple(sizes), inputs, chain.settings)
    else:
        forward, _, recording = own
        forward.stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        stages = stages_of(forward, recording, loss)
        cut = StageCut(stages, tuple(sizes), [], ReadAttributes("Pipeline"), forward)
    _refuse_shared_means(cut.stages, [plan.rank_of(stage, ranks) for stage in range(total)])
    return cut


def _recorded(model, sharing, example, device, error: UncuttableError) -> tuple[ForwardCut, Call, CallRecording]:
    """Cut the model's own forward; return it with the example call that ran, and its recording.

    Raises:
        ValueError: no example call runs.
    """
    if sharing is not None:
        raise UncuttableError(
            f'{error} (With "cp", Pipeline takes only models that torch.fx can trace: use weft.LayerSplit)'
        ) from error
    cut, reasons = ForwardCut(model, device), []
    for inputs in [call_with(example)] if example is not None else _guesses(model, device):
        try:
            recording = recorded(cut, inputs)
        except CountingError:
            cut.undo()
            raise
        except Exception as reason:
            reasons.append(f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}")
            continue
        cut.names = recording.names
        if not cut.names:
            break
        return cut, inputs, recording
    cut.undo()
    if not reasons:
        raise ValueError("Pipeline: the model has no layer with parameters; there is nothing to split") from error
    raise UncuttableError(
        f"{error} Its own forward can be cut instead, but it did not run with "
        f"{'example=' if example is not None else 'a guessed example'} ({reasons[0]}): pass "
        "example=, a micro-batch of its inputs (a dict for arguments by name)"
    ) from error


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


def _elements(model: nn.Module, names: Sequence[str]) -> list[int]:
    """Return the number of parameters of each call's layer that no earlier call has."""
    seen: set[int] = set()
    elements = []
    for name in names:
        new = {id(x): x.numel() for x in model.get_submodule(name).parameters() if id(x) not in seen}
        seen |= set(new)
        elements.append(sum(new.values()))
    return elements


def _refuse_shared_means(stages: Sequence[nn.Module], owners: Sequence[int]) -> None:
    """Raise ValueError if stages of several ranks use one norm with running means.

    Gradients of a parameter on several ranks are summed, but each rank would keep its own running means.
    """
    users: dict[nn.Module, set[int]] = {}
    for owner, stage in zip(owners, stages, strict=True):
        for name, module in stage.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                users.setdefault(module, set()).add(owner)
                if len(users[module]) > 1:
                    raise ValueError(
                        f"Pipeline: {name} keeps running means, and stages of several ranks use it: each rank "
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
    names: Sequence[str],
    states: Sequence[int],
    costs: Callable[[], Sequence[tuple[Sequence[LayerCost], float | None]]],
    kept: Sequence[int],
    stages: int,
    name: str,
    balance,
) -> list[int]:
    """Return the number of layers of each stage.

    Args:
        states: bytes of each layer's parameters, gradients and AdamW's moments.
        costs: returns the measured layers and the memory of each stage's rank.
        kept: of each rank: micro-batches whose activations it keeps at once.
    """
    if len(names) < stages:
        raise ValueError(
            f"Pipeline: schedule {name!r} needs {stages} stages, and the model has {len(names)} layers with parameters "
            f'({", ".join(names)}). Use fewer ranks along "pp", a schedule with one '
            'stage on a rank ("1f1b"), or split containers further with layers=[...]'
        )
    if not isinstance(balance, str):
        sizes = list(balance)
        if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != len(names):
            raise ValueError(
                f"Pipeline: balance={sizes} must be {stages} numbers, 1 or more, that add up to {len(names)} layers"
            )
        return sizes
    if balance == "parameters":
        return balanced([states] * stages)
    if balance != "time":
        raise ValueError(f'Pipeline: balance={balance!r} is not "parameters", "time" or the layers of each stage')
    of_stage = costs()
    seconds = [[layer.seconds for layer in layers] for layers, _ in of_stage]
    if all(memory is None for _, memory in of_stage):
        return balanced(seconds)
    needed = [
        [state + kept[stage] * layer.saved for state, layer in zip(states, layers, strict=True)]
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
