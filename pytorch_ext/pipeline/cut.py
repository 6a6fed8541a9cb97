"""The cut of a model into the stages of a pipeline, the same on all ranks, and the checks before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.activation_checkpoint import recomputes
from weft.arguments import check_choice
from weft.comm.registry import communicator
from weft.context_parallel.region import sharing_in
from weft.context_parallel.shared_sequence import Sharing
from weft.data_parallel.data_parallel import DataParallel
from weft.pipeline.balance import balanced, times
from weft.pipeline.layer_graph import Chain, ReadAttributes, chain_of
from weft.pipeline.layer_split import LayerSplit
from weft.pipeline.schedules import SCHEDULES, Schedule


@dataclass(frozen=True)
class StageCut:
    """A model cut into stages.

    Attributes:
        stages: the stages of all ranks.
        layers_per_stage: number of layers of each stage.
        inputs: names of the arguments of the model's forward that a step gives.
        settings: attributes of the model that its code has read and that must stay as they were.
    """

    stages: list[fx.GraphModule]
    layers_per_stage: tuple[int, ...]
    inputs: list[str]
    settings: ReadAttributes


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
    if SCHEDULES[schedule].halves and recomputes(model):
        whole = ", ".join(repr(name) for name, plan in SCHEDULES.items() if not plan.halves)
        raise ValueError(
            f"Pipeline: schedule={schedule!r} takes each backward in parts, and every part would compute the "
            f'activations again: use {whole}, or recompute="none" in weft.parallelize'
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
    example,
) -> StageCut:
    """Cut a model into stages as the first rank would cut it. A collective call.

    Raises:
        ValueError: as in Pipeline.
    """
    plan, ranks = SCHEDULES[schedule], along["pp"].size()
    total = _number_of_stages(plan, schedule, ranks, stages_per_rank, microbatches)
    chain = chain_of("Pipeline", model, layers, arguments)
    sizes = _sizes(chain, total, schedule, balance, example)
    for dimension in along.values():  # shards and times may differ between ranks, the cut must not
        cuts = communicator(dimension).all_gather_object((schedule, microbatches, total, len(chain.layers), sizes))
        if any(cut[:4] != cuts[0][:4] for cut in cuts):
            raise ValueError(
                "Pipeline: ranks differ in (schedule, microbatches, stages, layers): "
                + "; ".join(f"rank {rank} has {cut[:4]}" for rank, cut in enumerate(cuts))
            )
        sizes = cuts[0][4]
    stages = chain.stages(sizes)
    _refuse_shared_means(stages, [plan.rank_of(stage, ranks) for stage in range(total)])
    return StageCut(stages, tuple(sizes), [str(node.target) for node in chain.inputs], chain.settings)


def _refuse_shared_means(stages: Sequence[fx.GraphModule], owners: Sequence[int]) -> None:
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


def _sizes(chain: Chain, stages: int, name: str, balance, example) -> list[int]:
    """Return the number of layers of each stage."""
    layers = len(chain.layers)
    if layers < stages:
        raise ValueError(
            f"Pipeline: schedule {name!r} needs {stages} stages, and the model has {layers} layers with parameters "
            f'({", ".join(layer.name for layer in chain.layers)}). Use fewer ranks along "pp", a schedule with one '
            'stage on a rank ("1f1b"), or split containers further with layers=[...]'
        )
    if not isinstance(balance, str):
        sizes = list(balance)
        if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != layers:
            raise ValueError(
                f"Pipeline: balance={sizes} must be {stages} numbers, 1 or more, that add up to {layers} layers"
            )
        return sizes
    if balance == "parameters":
        return balanced([layer.elements for layer in chain.layers], stages)
    if balance != "time":
        raise ValueError(f'Pipeline: balance={balance!r} is not "parameters", "time" or the layers of each stage')
    if example is None:
        raise ValueError('Pipeline: balance="time" measures the layers on a micro-batch of inputs: pass it as example=')
    return balanced(times(chain, (example,) if isinstance(example, torch.Tensor) else tuple(example)), stages)
