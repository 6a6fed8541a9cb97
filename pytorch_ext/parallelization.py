"""parallelize: one call that puts a model on a mesh, with tensor, context, pipeline and data parallelism."""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.activation_checkpoint import recompute as recompute_modules
from weft.activation_checkpoint import recomputed_in
from weft.adapters.peft_import import register_with_peft
from weft.arguments import check_choice, check_module
from weft.checkpoint.pretrained_files import save_pretrained
from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.context_parallel.between_layers import refuse_adapters, share_between_layers
from weft.context_parallel.region import entry_of, share, sharing_in, sharing_of
from weft.context_parallel.shared_sequence import Sharing
from weft.data_parallel.batch_units import check_units
from weft.data_parallel.data_parallel import DataParallel
from weft.data_parallel.fully_sharded import ShardedParameters, zero_options
from weft.data_parallel.grad_norm import mark_invariant
from weft.forward import ForwardChain
from weft.invariant.exact_functions import with_same_bits
from weft.mesh import MeshRanks, ranks_along
from weft.metadata import set_metadata
from weft.ops.kernel_choice import check_kernels
from weft.output_gradients import SameLoss
from weft.pipeline.cut import dimensions_of
from weft.pipeline.layer_split import LayerSplit, check_layers
from weft.pipeline.pipeline import Pipeline
from weft.replicas import CHECKS, SameCalls, check_replicas, check_same_model
from weft.rng import name_modules, restore_rng_state, rng_states
from weft.sharding.optimizer_check import refuse_replaced
from weft.sharding.shard import shard_of
from weft.tensor_parallel.auto import AutomaticPlan
from weft.tensor_parallel.gather_outputs import return_whole
from weft.tensor_parallel.peft_wrappers import refuse_other_tuners, without_peft, wrappers_in
from weft.tensor_parallel.plan_check import PlanCheck
from weft.tensor_parallel.split import SplitLayers, chosen_plan
from weft.tensor_parallel.styles import Plan
from weft.tools.explanation.summary import log_summary


def parallelize(
    model: nn.Module,
    mesh: Group = None,
    *,
    plan: Plan | AutomaticPlan | str | None = "auto",
    sequence_parallel: bool = False,
    context: str | Mapping = "auto",
    recompute: str = "none",
    strict: bool = False,
    checks: str = "first",
    tune: bool = False,
    invariant: int | None = None,
    pipeline: Mapping | None = None,
    zero: int | Mapping = 0,
) -> nn.Module:
    """Put a model on the whole mesh. Its arguments and outputs stay the same.

        model = weft.parallelize(model, weft.init_mesh(pp=2, dp=2, cp=1, tp=2))

        weft.parallelize(model, mesh["tp"], plan={
            "layers.*.mlp.up": "column",
            "layers.*.mlp.down": "row",
            "layers.*.attention.query": {"style": "column", "unit": head_dim},
            "embedding": "vocabulary",
        })

    Each mesh dimension larger than 1 adds one kind of parallelism:
        tp: parallel layers replace the model's layers in place and hold this rank's part of the weights. All ranks
            continue with the first rank's random state and draw alike from then on. If you seed the ranks later, seed
            them alike.
        cp: the ranks share the model's sequence.
        pp: `weft.LayerSplit` cuts the model. Each rank keeps its layers, one rank computes at a time, and every rank
            calls the model with the same inputs and the same loss. To let all ranks compute at once, pass `pipeline`:
            a pipeline needs micro-batches and runs backward itself, so it is not called like the model.
        dp: `weft.DataParallel` wraps the result. Each of these ranks passes its own part of the batch. To set the
            options of DataParallel, leave dp out (`mesh["pp", "cp", "tp"]`) and wrap the result yourself.
        ep: layers of experts are split over these ranks of dp, and tokens travel between them (docs/experts.md).

    Args:
        model: the same whole model on every rank. Weights that layers share (tied embeddings, a layer with several
            names) stay shared.
        mesh: the mesh of init_mesh, or some of its dimensions (`mesh["cp", "tp"]`). Any other one-dimensional
            DeviceMesh, a ProcessGroup, or None for the default group is the group that splits the layers.
        plan: "auto" finds the layers that can be split (docs/automatic_plans.md); a result of `automatic_plan` is also
            taken. None splits nothing. A dict maps module names to styles (docs/tensor_parallel.md):
            a style is "column" or "row" (nn.Linear), "vocabulary" (nn.Embedding) or another name, or a dict of "style"
                and its options;
            "sequence" keeps a module whole and sums its gradients over the ranks, for modules between layers with
                sequence_parallel;
            "tokenwise" keeps a module whole and declares that it treats every position alone, including all functions
                that it calls. With cp it gets this rank's part;
            in a name, `*` matches one component and `**` any number, including none.
        sequence_parallel: with plan="auto", each rank of "tp" has its part of the sequence between split layers.
            The model takes and returns whole tensors. Functions that do not treat each position alone get the whole,
            gathered (`weft.explain` names them). In a plan of your own it is an option of each layer.
        context: how the ranks share the sequence: a method of `weft.context_attention`, or a dict of
            method, layout: as there;
            dim: the sequence dimension of the model's arguments, 1 by default. An argument with another length along
                it, or with fewer dimensions, is passed as it is;
            parts: False: the model takes and returns the whole sequence, as before. True: every rank calls it with its
                own part (`weft.shard_sequence`) and gets its part of the outputs; the whole loss is the sum over ranks;
            strict: raise if a function of the model has no rule, instead of gathering the sequence for it;
            deterministic: as there;
            units: with `invariant`, the number of units of the sequence, which "cp" must divide, also where it is 1.
            See docs/sequence_parallel.md.
        recompute: the activations that backward recomputes instead of keeping them: "none"; "full": each block (an
            element of the outermost lists of modules); "selective": the attention and the MLP of each block, if these
            are modules.
        strict: raise if plan="auto" leaves a layer whole, if the mesh has pp, because its ranks wait for one another,
            or if weft's kernels do not run on the model's GPU.
        checks: "first": in the first three calls, the ranks that compute one model together ("tp", "pp", "cp") compare
            arguments, mode, and random numbers if the model draws some. In the first one they compare the split weights
            too, and in the first backwards the gradients of outputs over "tp" and "cp". The first call of each kind
            (shapes, types, modes) shows whether the plan is right for it, and over "cp" what later calls can leave out.
            "always": every call is compared and runs in full, and `weft.check_replicas` runs in every training call.
            "off": no call is compared, for ranks that call with different tensors on purpose.
            With a plan of your own and sequence_parallel nothing of calls is compared over "tp", because a rank may
            then call with its part of the sequence. `model.check_replicas()` compares replicas at any time.
        tune: start the first call with a `weft.warm_up` on its arguments: it measures each product of the model on this
            GPU, unless an earlier run has. WEFT_TUNE=1 in the environment means the same for every model, WEFT_TUNE=0
            turns it off.
        invariant: a number of units, which "tp" and "dp" must divide: outputs and gradients have the same bits on every
            such mesh, one process included (docs/invariance.md). With a mesh that has "dp", of any size, as that of
            init_mesh, the batch is in units too, and the result is a DataParallel, or with `pipeline` a Pipeline. With
            context={"units": ...} the sequence is, and the mesh may have "cp".
        zero: what the ranks of dp share of their equal models (Rajbhandari et al. 2020). 0: nothing. 1: the optimizer's
            state; the result is a DataParallel with shard_optimizer, which makes the optimizer. 3: parameters,
            gradients and state, by torch's FSDP2, block by block, and the ranks of cp share them too
            (docs/data_parallel.md). The result is then the model itself, and its parameters are DTensors. A dict has
            "stage": 3 and options of `torch.distributed.fsdp.fully_shard`: mp_policy, offload_policy,
            reshard_after_forward.
        pipeline: options of `weft.Pipeline`, {"microbatches": 8, ...}, for a mesh with pp, of any size: the result is a
            Pipeline, which has `step` and covers "dp" too.

    Returns:
        The model itself, changed in place, if only tp and cp are larger than 1. With pp, a LayerSplit of it, or a
        Pipeline if `pipeline` is given. With dp and no zero=3, a DataParallel around the model or the LayerSplit, with
        `invariant` for a dp of 1 too. `weft.explain` takes any of them.

    Raises:
        ValueError: the mesh has other dimensions; a pattern matches nothing (the message lists the names); a layer
            cannot be split over these ranks, or into `invariant` units; layers do not meet, or an operation between
            them needs all features (softmax, a norm), as far as the model can be followed; only one layer of a tied
            weight is split; there are more stages than layers, or the model cannot be cut; the context or recompute
            does not exist. Models that differ between ranks raise on every rank.
        TypeError: the style does not take this kind of layer.
        The model is unchanged after an error. Only the comparison of the ranks' models sends data before that.

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> model = weft.parallelize(model, weft.init_mesh(tp=2))
        >>> model[0].weight.shape, model(torch.ones(4, 16)).shape
        (torch.Size([32, 16]), torch.Size([4, 16]))
    """
    check_module("parallelize", model)
    check_choice("parallelize: checks", checks, CHECKS)
    ranks = ranks_along(mesh, invariant is not None)
    stage, sharding = zero_options(zero, ranks.sizes, invariant)
    if stage == 3:
        _sharers_of_experts(ranks)
    parameters = list(model.parameters())
    if invariant is not None:
        _check_invariant(model, ranks, invariant, pipeline is not None)
    if pipeline is not None:
        if stage == 1:
            raise ValueError(
                "parallelize: zero=1 is not supported with pipeline: its stages reduce whole gradients, once a step. "
                "Use zero=3, or torch.distributed.optim.ZeroRedundancyOptimizer"
            )
        options: dict[str, Any] = {"plan": plan, "sequence_parallel": sequence_parallel, "context": context}
        options |= {"recompute": recompute, "strict": strict, "checks": checks, "tune": tune, "invariant": invariant}
        made = _in_stages(model, mesh, ranks, pipeline, options)
        if stage == 3:
            made.shard_parameters(_sharers(mesh, ranks), _sharers_of_experts(ranks), sharding)
            _give_out_by_block(made)
        refuse_replaced(parameters, made, "weft.parallelize")
        return made

    sharing = _sharing_of(model, ranks, context, checks, invariant)
    refuse_other_tuners(model, _several(ranks.tp) is not None, ranks.experts is not None)
    automatic, entries = chosen_plan(model, plan, ranks, sequence_parallel, strict, invariant)
    between = _ranks_between_layers(model, ranks, automatic, sequence_parallel, invariant)
    split = SplitLayers.of(model, automatic, entries, ranks, invariant)
    plan_check = PlanCheck(model, split, ranks.tp, in_units=invariant is not None, checks=checks)
    adapters = _split_adapters(model, split.replacements)
    recomputed = recomputed_in(model, recompute)
    _check_ranks(model, ranks, strict)
    _draw_alike(model, ranks, invariant is not None)

    size = sum(parameter.numel() for parameter in model.parameters())
    split.install(model, ranks, adapters)
    if between is not None:
        share_between_layers(model, between, strict)
    return_whole(model)
    recompute_modules({name: model.get_submodule(name) for name in recomputed})
    if sharing is not None:
        share(model, sharing, split.tokenwise)
    if invariant is not None:
        _give_same_bits(model, invariant)
    cut = _cut(model, ranks, checks)
    plan_check.install(model, cut)
    shared = None if sharing is None or sharing.parts else sharing.ranks
    SameLoss(None if split.by_parts else _several(ranks.tp), _several(shared), checks).install(cut)
    wrapped = _over_replicas(cut, mesh, ranks, stage, sharding, invariant)
    SameCalls({} if ranks.tp is None or split.by_parts else {ranks.tp: True}, checks).install(wrapped, cut)
    _tune_at_first_call(wrapped, tune)
    refuse_replaced(parameters, wrapped, "weft.parallelize")
    return _recorded(wrapped, cut, ranks, automatic, size)


@torch.inference_mode(False)
def _in_stages(model: nn.Module, mesh, ranks: MeshRanks, pipeline: Mapping, options: Mapping[str, Any]) -> Pipeline:
    """Return the Pipeline of a model whose layers are split, or its sequence shared, within a stage first."""
    plan, invariant = options["plan"], options["invariant"]
    if options["sequence_parallel"] or getattr(plan, "sequence_parallel", False):
        _check_sequence_parallel(ranks, invariant)
    dimensions_of(mesh)
    known = list(inspect.signature(Pipeline.__init__).parameters)[3:]  # behind self, model and mesh
    if unknown := sorted(set(pipeline) - set(known)):
        raise TypeError(f"parallelize: pipeline has no option {unknown[0]!r}; it has {', '.join(known)}")
    within = _within_stages(mesh, invariant is not None)
    if within is not None:
        model = parallelize(model, within, **options)
    else:
        recompute_modules(recomputed_in(model, options["recompute"]))
    return Pipeline(model, mesh, invariant=invariant, **{"checks": options["checks"], **pipeline})


def _within_stages(mesh, in_units: bool) -> DeviceMesh | None:
    """Return the dimensions of a mesh that split the layers of a stage, or cut them into units; None without any."""
    there = [name for name in ("cp", "tp") if name in mesh.mesh_dim_names]
    names = tuple(name for name in there if in_units or mesh[name].size() > 1)
    return mesh[names] if names else None


def _sharing_of(
    model: nn.Module, ranks: MeshRanks, context: str | Mapping, checks: str, invariant: int | None
) -> Sharing | None:
    if ranks.cp is None:
        if context != "auto":
            raise ValueError(
                f'parallelize: context={context!r}, and the mesh has no dimension "cp" to share a sequence over'
            )
        return None
    sharing = sharing_of(ranks.cp, context, checks)
    if "" in sharing_in(model):
        raise ValueError("parallelize: the model shares its sequence already")
    _check_position_units(sharing, invariant)
    return sharing if sharing.ranks.world_size > 1 or sharing.units is not None else None


def _ranks_between_layers(
    model: nn.Module, ranks: MeshRanks, automatic: AutomaticPlan | None, wanted: bool, invariant: int | None
) -> Communicator | None:
    """Return the ranks that share the sequence between the layers of an automatic plan, if they do."""
    if not wanted and (automatic is None or not automatic.sequence_parallel):
        return None
    _check_sequence_parallel(ranks, invariant)
    refuse_adapters(model)
    return None if automatic is None else ranks.tp


def _check_invariant(model: nn.Module, ranks: MeshRanks, invariant: int, in_stages: bool) -> None:
    if ranks.sizes.get("pp", 1) > 1 and not in_stages:
        raise ValueError(
            'parallelize: invariant with "pp" is for a Pipeline: pass pipeline={"loss": ..., "schedule": ...}'
        )
    if ranks.tp is None or ranks.experts is not None:
        raise ValueError(
            f'parallelize: invariant takes a mesh of "pp", "dp", "cp" and "tp"; this one has {ranks.sizes}'
        )
    if ranks.replicas is not None:
        check_units(model, communicator(ranks.replicas), invariant)


def _check_position_units(sharing: Sharing, invariant: int | None) -> None:
    shares = sharing.ranks.world_size > 1 or sharing.units is not None
    if shares and (invariant is None) != (sharing.units is None):
        raise ValueError(
            'parallelize: invariant on a mesh with cp needs context={"units": ...}, and the units need invariant: a '
            "sequence has the same bits on any number of ranks if it is in units, on one rank too. Got "
            f"invariant={invariant} and units={sharing.units}"
        )


def _check_sequence_parallel(ranks: MeshRanks, invariant: int | None) -> None:
    for used, what, way_out in (
        (ranks.sizes.get("cp", 1) > 1, "a mesh with cp", "the ranks of cp share the whole sequence already"),
        (ranks.sizes.get("pp", 1) > 1, "a mesh with pp", "its stages hand on whole tensors"),
        (invariant is not None, "invariant", "its sums do not depend on parts of the sequence"),
    ):
        if used:
            raise ValueError(
                f'parallelize: sequence_parallel=True of plan="auto" is not supported with {what}: {way_out}. Leave '
                "out one of the two, or write a plan of your own"
            )


def _check_ranks(model: nn.Module, ranks: MeshRanks, strict: bool) -> None:
    """Check that the ranks can compute the model together, and have the same one."""
    if strict:
        check_kernels({parameter.device for parameter in model.parameters()})
    if ranks.stages is not None:
        _check_stages(model, ranks.stages, strict)
    of_experts = None if ranks.experts is None else communicator(ranks.experts["ep_group"])
    for group in (ranks.tp, ranks.cp, of_experts, None if ranks.stages is None else communicator(ranks.stages)):
        if group is not None:
            check_same_model(model, group)


def _check_stages(model: nn.Module, stages: DeviceMesh, strict: bool) -> None:
    if strict:
        raise ValueError(
            f'parallelize: strict, and of the {stages.size()} ranks along "pp" one would compute at a time: pass '
            'pipeline={"microbatches": ..., "loss": ...} for a weft.Pipeline'
        )
    check_layers(model, stages.size())


def _several(ranks: Communicator | None) -> Communicator | None:
    return None if ranks is None or ranks.world_size == 1 else ranks


def _split_adapters(model: nn.Module, replacements: dict[str, nn.Module]) -> list[Callable[[], None]]:
    """Return functions that split the adapters of peft around the replaced layers. From now on peft knows weft's."""
    register_with_peft()
    if not any(True for _ in wrappers_in(model)):
        return []
    from weft.adapters.peft import split_wrappers

    return list(split_wrappers(model, replacements))


def _draw_alike(model: nn.Module, ranks: MeshRanks, in_units: bool) -> None:
    """Set the random state of all ranks that split the layers to the first rank's.

    These ranks must drop the same elements of whole tensors. Ranks that loaded their weights may never have been
    seeded.
    """
    for group in (ranks.tp, ranks.cp if in_units else None):
        if group is not None and group.world_size > 1:
            for kind in rng_states(model):
                per_rank = group.all_gather_object(rng_states(model)[kind])
                restore_rng_state(kind, per_rank[0], model)


def _give_same_bits(model: nn.Module, invariant: int) -> None:
    """Give the model's functions the same bits beside any others, and let its random numbers follow from names."""
    ForwardChain.of(model).add("bits", with_same_bits)
    name_modules(model)
    mark_invariant(model, invariant)


def _cut(model: nn.Module, ranks: MeshRanks, checks: str) -> nn.Module:
    """Return the model with its methods for replicas and files, or cut into stages if there are several."""
    if ranks.stages is not None:
        return LayerSplit(model, ranks.stages, checks=checks)
    model.check_replicas = partial(check_replicas, model)  # type: ignore[assignment]
    if any(map(shard_of, model.parameters())):
        _save_whole(model)
    return model


def _save_whole(model: nn.Module) -> None:
    """Let a model of transformers save the whole. A PeftModel saves its adapters, and the model inside itself."""
    inside: Any = without_peft(model)
    if hasattr(type(inside), "save_pretrained"):
        inside.save_pretrained = partial(save_pretrained, inside, inside)


def _over_replicas(
    cut: nn.Module, mesh, ranks: MeshRanks, stage: int, sharding: Mapping[str, Any], invariant: int | None
) -> nn.Module:
    """Return the model for the ranks of dp: wrapped, or with its parameters sharded over them and those of cp."""
    if stage != 3:
        replicas = ranks.replicas
        if replicas is None:
            return cut
        return DataParallel(cut, group=replicas, invariant=invariant, shard_optimizer=stage == 1)
    ShardedParameters(cut, _sharers(mesh, ranks), _sharers_of_experts(ranks), ranks.sizes.get("dp", 1), sharding)
    _give_out_by_block(cut)
    _save_whole(cut)
    return cut


def _sharers(mesh: Any, ranks: MeshRanks) -> DeviceMesh:
    """Return the ranks that share parameters with zero=3."""
    shared = tuple(name for name in ("dp", "cp") if ranks.sizes.get(name, 1) > 1)
    along = mesh if mesh.ndim == 1 else mesh[shared]
    return along._flatten("dp_cp") if along.ndim > 1 else along


def _sharers_of_experts(ranks: MeshRanks) -> DeviceMesh | None:
    if ranks.experts is None:
        return None
    along = ranks.experts["ep_group"]._get_root_mesh()
    if along["cp"].size() > 1:
        whole = ranks.sizes.get("dp", 1) * ranks.sizes["cp"]
        raise ValueError(
            'parallelize: zero=3 shares parameters over "dp" and "cp" together, and these experts lie on ranks of "dp" '
            f"alone: use init_mesh(ep={whole}), a mesh without cp, or zero=0"
        )
    return ranks.experts["replica_group"]


def _give_out_by_block(model: nn.Module) -> None:
    """Run every call in full, as the first: shorter calls would gather all parameters at once."""
    for module in model.modules():
        if (entry := entry_of(module)) is not None:
            entry.learns = False


def _tune_at_first_call(model: nn.Module, tune: bool) -> None:
    if tune or os.environ.get("WEFT_TUNE") == "1":
        from weft.tools.tuning import before_first_call  # imports Triton, which takes a second

        before_first_call(model)


def _recorded(
    wrapped: nn.Module, cut: nn.Module, ranks: MeshRanks, automatic: AutomaticPlan | None, size: int
) -> nn.Module:
    """Log what a rank holds of `size` parameters, and note the mesh and the automatic plan for `weft.explain`."""
    log_summary(cut, ranks.sizes, size, automatic.whole if automatic else {})
    set_metadata(cut, "mesh", ranks.sizes)
    if automatic is not None:
        set_metadata(wrapped, "plan", automatic)
    return wrapped
