"""parallelize: one call that puts a model on a mesh, with tensor, context, pipeline and data parallelism."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.activation_checkpoint import recompute as recompute_modules
from weft.activation_checkpoint import recomputed_in
from weft.adapters.peft_import import register_with_peft
from weft.arguments import check_choice
from weft.checkpoint.pretrained import save_pretrained
from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.context_parallel.between_layers import refuse_adapters, share_between_layers
from weft.context_parallel.region import share, sharing_in, sharing_of
from weft.context_parallel.shared_sequence import Sharing
from weft.data_parallel.batch_units import check_units
from weft.data_parallel.data_parallel import DataParallel
from weft.data_parallel.grad_norm import mark_invariant
from weft.explanation.summary import log_summary
from weft.forward import ForwardChain
from weft.mesh import expert_mesh, ranks_of_experts
from weft.metadata import set_metadata
from weft.nn import sum_gradients
from weft.ops.kernel_choice import check_kernels
from weft.pipeline.layer_split import LayerSplit, check_layers
from weft.pipeline.pipeline import Pipeline
from weft.replicas import CHECKS, SameCalls, check_replicas, check_same_model
from weft.rng import name_modules, restore_rng_state, rng_states
from weft.sharding.shard import shard_of
from weft.tensor_parallel.auto import AutomaticPlan, automatic_plan
from weft.tensor_parallel.call_check import call_checks
from weft.tensor_parallel.gather_outputs import return_whole
from weft.tensor_parallel.invariant_plan import check_same_layers, in_units
from weft.tensor_parallel.local_sizes import is_summed
from weft.tensor_parallel.part_uses import PartUses
from weft.tensor_parallel.patterns import match
from weft.tensor_parallel.peft_wrappers import refuse_other_tuners, through_wrappers, without_peft, wrappers_in
from weft.tensor_parallel.plan_check import check_flow, own_plan
from weft.tensor_parallel.styles import KEPT, Plan, part_of
from weft.tensor_parallel.ties import keep_parameters, tie
from weft.units.functions import with_same_bits


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
            too. The first call of each kind (shapes, types, modes) shows whether the plan is right for it, and over
            "cp" what later calls can leave out.
            "always": every call is compared and runs in full, and `weft.check_replicas` runs in every training call.
            "off": no call is compared, for ranks that call with different tensors on purpose.
            With a plan of your own and sequence_parallel no arguments are compared over "tp", because a rank may then
            call with its part of the sequence. `model.check_replicas()` compares replicas at any time.
        tune: start the first call with a `weft.warm_up` on its arguments: it measures each product of the model on this
            GPU, unless an earlier run has. WEFT_TUNE=1 in the environment means the same for every model, WEFT_TUNE=0
            turns it off.
        invariant: a number of units, which "tp" and "dp" must divide: outputs and gradients have the same bits on every
            such mesh, one process included (docs/invariance.md). With a mesh that has "dp", of any size, as that of
            init_mesh, the batch is in units too, and the result is a DataParallel, or with `pipeline` a Pipeline. With
            context={"units": ...} the sequence is, and the mesh may have "cp".
        pipeline: options of `weft.Pipeline`, {"microbatches": 8, ...}, for a mesh with pp: the result is a Pipeline,
            which has `step` and covers "dp" too.

    Returns:
        The model itself, changed in place, if only tp and cp are larger than 1. With pp, a LayerSplit of it, or a
        Pipeline if `pipeline` is given. With dp, a DataParallel around the model or the LayerSplit, with
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
    check_choice("parallelize: checks", checks, CHECKS)
    ranks = _ranks_of(mesh, invariant is not None)
    if invariant is not None:
        _check_invariant(model, ranks, invariant, pipeline is not None)
    if pipeline is not None:
        if sequence_parallel or getattr(plan, "sequence_parallel", False):
            _check_sequence_parallel(ranks, invariant)
        within = _within_stages(mesh, ranks, invariant is not None)
        options = {"checks": checks, **pipeline}
        if within is not None:
            model = parallelize(
                model,
                within,
                plan=plan,
                sequence_parallel=sequence_parallel,
                context=context,
                recompute=recompute,
                strict=strict,
                checks=checks,
                tune=tune,
                invariant=invariant,
            )
        elif recompute != "none":
            recompute_modules(recomputed_in(model, recompute))
        return Pipeline(model, mesh, invariant=invariant, **options)  # type: ignore[arg-type]
    sharing = None if ranks.cp is None else sharing_of(ranks.cp, context, checks)
    if sharing is not None and "" in sharing_in(model):
        raise ValueError("parallelize: the model shares its sequence already")
    if sharing is None and context != "auto":
        raise ValueError(
            f'parallelize: context={context!r}, and the mesh has no dimension "cp" to share a sequence over'
        )
    if sharing is not None:
        _check_position_units(sharing, invariant)
    refuse_other_tuners(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    automatic, plan = _plan_of(model, plan, ranks, sequence_parallel, strict, invariant)
    sequence_parallel = sequence_parallel or (automatic is not None and automatic.sequence_parallel)
    if sequence_parallel:
        _check_sequence_parallel(ranks, invariant)
        refuse_adapters(model)
    entries = through_wrappers(match(plan, model), model)
    if ranks.experts is not None:
        entries = _with_experts(entries, ranks.experts)
    elif ranks.replicas is not None:
        entries = {name: _counted_over(entry, ranks.replicas) for name, entry in entries.items()}
    if invariant is not None:
        entries = in_units(entries, model, invariant)
    between, tokenwise = ([name for name, entry in entries.items() if entry == kind] for kind in KEPT)
    replacements: dict[str, nn.Module] = {}
    made: dict[tuple[int, str], nn.Module] = {}  # a module that stands in several places stays one
    for name, entry in entries.items():
        if name not in (*between, *tokenwise):
            module = model.get_submodule(name)
            key = id(module), repr(entry)
            if key not in made:
                made[key] = part_of(name, module, entry, ranks.tp)
            replacements[name] = made[key]
    tie(model, replacements)
    adapters = _split_adapters(model, replacements)
    summed = [*between, *(name for name, layer in replacements.items() if is_summed(layer))]
    own = None
    if automatic is None and ranks.tp is not None:
        own = own_plan(model, replacements, summed, ranks.tp.world_size, in_units=invariant is not None)
        check_flow(model, own)
    recomputed = recomputed_in(model, recompute)
    if strict:
        check_kernels({parameter.device for parameter in model.parameters()})
    if ranks.stages is not None:
        _check_stages(model, ranks.stages, strict)
    of_experts = None if ranks.experts is None else communicator(ranks.experts["ep_group"])
    for group in (ranks.tp, ranks.cp, of_experts, None if ranks.stages is None else communicator(ranks.stages)):
        if group is not None:
            check_same_model(model, group)
    if ranks.tp is not None:
        _draw_alike(ranks.tp, model)
    if ranks.cp is not None and invariant is not None:
        _draw_alike(ranks.cp, model)

    of_plans = {} if checks == "off" else call_checks(model, automatic or own, ranks.tp)
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in replacements.items():
        parent, _, child = name.rpartition(".")
        keep_parameters(model.get_submodule(name), layer)
        replaced[model.get_submodule(name)] = layer
        setattr(model.get_submodule(parent), child, layer)
    _replace_in_lists(model, replaced)
    for install in adapters:
        install()
    for layer in dict.fromkeys(map(model.get_submodule, summed)):
        sum_gradients(layer, ranks.tp)
    if sequence_parallel and automatic is not None and ranks.tp is not None:
        share_between_layers(model, ranks.tp, strict)
    return_whole(model)
    if recompute != "none":
        recompute_modules({name: model.get_submodule(name) for name in recomputed})
    if sharing is not None and (sharing.ranks.world_size > 1 or sharing.units is not None):
        share(model, sharing, tokenwise)
    if invariant is not None:
        ForwardChain.of(model).add("bits", with_same_bits)
        name_modules(model)
    if automatic is not None and automatic.plan and automatic.parts != ("",) and checks != "off":
        PartUses(automatic.parts).install(model)
    called = {name: model.get_submodule(name) for name in of_plans}
    if ranks.stages is not None:
        model = LayerSplit(model, ranks.stages, checks=checks)
    else:
        model.check_replicas = partial(check_replicas, model)  # type: ignore[assignment]
        of_parts = without_peft(model) is model and any(map(shard_of, model.parameters()))
        if hasattr(type(model), "save_pretrained") and of_parts:
            model.save_pretrained = partial(save_pretrained, model, model)  # type: ignore[assignment]
    for name, check in of_plans.items():
        watched = called[name] if name else model
        check.watch(watched)
        watched.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    if invariant is not None:
        mark_invariant(model, invariant)
    wrapped = model if ranks.replicas is None else DataParallel(model, group=ranks.replicas, invariant=invariant)
    # With a user's plan and sequence_parallel, a caller may pass this rank's part of the sequence.
    by_parts = automatic is None and any(getattr(layer, "sequence_parallel", False) for layer in replacements.values())
    alike = {} if ranks.tp is None or by_parts else {ranks.tp: True}
    SameCalls(alike, checks).install(wrapped, model)
    if tune or os.environ.get("WEFT_TUNE") == "1":
        from weft.tuning import before_first_call  # imports Triton, which takes a second

        before_first_call(wrapped)
    log_summary(model, ranks.sizes, parameters, automatic.whole if automatic else {})
    set_metadata(model, "mesh", ranks.sizes)
    return _noted(wrapped, automatic)


@dataclass(frozen=True)
class _Ranks:
    """Groups of ranks by kind of parallelism. `stages` and `replicas` are None for a single rank."""

    tp: Communicator | None
    cp: Communicator | None
    stages: DeviceMesh | None
    replicas: DeviceMesh | None
    experts: dict[str, Any] | None = None  # options of ParallelExperts, where ranks of dp hold experts

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks by mesh dimension."""
        split = {name: comm.world_size for name, comm in (("cp", self.cp), ("tp", self.tp)) if comm is not None}
        outer = {name: mesh.size() for name, mesh in (("pp", self.stages), ("dp", self.replicas)) if mesh is not None}
        return {**outer, **split}


_DIMENSIONS = ("pp", "dp", "cp", "tp")


def _replace_in_lists(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules where others hold them in a list, tuple or dict besides, as MaskFormer holds its convolutions."""
    for module in model.modules():
        for key, value in vars(module).items():
            kind = type(value)
            held = value.items() if kind is dict else enumerate(value) if kind in (list, tuple) else ()
            found = {at: replaced[x] for at, x in held if isinstance(x, nn.Module) and x in replaced}
            if found and kind is tuple:
                vars(module)[key] = tuple(found.get(at, x) for at, x in enumerate(value))
                continue
            for at, layer in found.items():
                value[at] = layer


def _within_stages(mesh, ranks: _Ranks, in_units: bool) -> DeviceMesh | None:
    """Return the dimensions of a mesh that split the layers of a stage, or cut them into units; None without any."""
    if ranks.stages is None:
        raise ValueError(
            f'parallelize: pipeline={{...}} is for a mesh with "pp" larger than 1; this one has {ranks.sizes}'
        )
    there = [name for name in ("cp", "tp") if name in mesh.mesh_dim_names]
    names = tuple(name for name in there if in_units or mesh[name].size() > 1)
    return mesh[names] if names else None


def _ranks_of(mesh, in_units: bool) -> _Ranks:
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    if not isinstance(mesh, DeviceMesh) or (mesh.ndim == 1 and not set(names) & set(_DIMENSIONS)):
        return _Ranks(communicator(mesh), None, None, None)
    if not names or not set(names) <= set(_DIMENSIONS):
        raise ValueError(
            f"parallelize: the mesh has the dimensions {names or 'without names'}; it takes those of weft.init_mesh, "
            f"{', '.join(_DIMENSIONS)}, or one dimension alone"
        )
    along = {name: mesh if mesh.ndim == 1 else mesh[name] for name in names}
    tp, cp = (communicator(along[name]) if name in along else None for name in ("tp", "cp"))
    stages = along["pp"] if "pp" in along and along["pp"].size() > 1 else None
    replicas = along["dp"] if "dp" in along and (along["dp"].size() > 1 or in_units) else None
    apart = expert_mesh(mesh)
    experts: dict[str, Any] | None = None
    if apart is not None:
        experts = {"ep_group": apart["ep"], "replica_group": apart["edp"]}
        if tp is not None and tp.world_size > 1:
            experts["all_group"] = ranks_of_experts(mesh)
    return _Ranks(tp, cp, stages, replicas, experts)


def _with_experts(entries: Mapping, experts: Mapping[str, Any]) -> dict:
    """Return the entries with the ranks of "ep" in those of experts."""
    if not any(_splits_experts(entry) for entry in entries.values()):
        raise ValueError(
            "parallelize: the mesh has ep, and the plan splits no layer of experts: leave ep out of weft.init_mesh, or "
            'name the layers in the plan, {"layers.*.mlp.experts": "experts"} (docs/experts.md)'
        )
    found = {name: {"style": entry} if entry == "experts" else entry for name, entry in entries.items()}
    return {name: {**entry, **experts} if _splits_experts(entry) else entry for name, entry in found.items()}


def _counted_over(entry: str | Mapping, replicas: DeviceMesh) -> str | Mapping:
    """Return the entry with the ranks that have tokens of the same batch, if a capacity counts them."""
    counts = isinstance(entry, Mapping) and _splits_experts(entry) and entry.get("capacity_factor") is not None
    return {**entry, "replica_group": replicas} if counts else entry  # type: ignore[dict-item]


def _splits_experts(entry: str | Mapping) -> bool:
    return (entry if isinstance(entry, str) else entry.get("style")) == "experts"


def _plan_of(
    model: nn.Module,
    plan: Plan | AutomaticPlan | str | None,
    ranks: _Ranks,
    sequence_parallel: bool,
    strict: bool,
    invariant: int | None,
) -> tuple[AutomaticPlan | None, Plan]:
    if plan == "auto" or isinstance(plan, AutomaticPlan):
        if ranks.tp is None or (ranks.tp.world_size == 1 and invariant is None):
            return None, {} if ranks.experts is None else _plan_of_experts(model, plan)
        automatic = plan if isinstance(plan, AutomaticPlan) else None
        automatic = automatic or automatic_plan(model, ranks.tp.world_size, sequence_parallel=sequence_parallel)
        if invariant is not None:
            automatic = automatic.without_gathered()  # the same bits need no such layer
            check_same_layers(automatic, automatic_plan(model, invariant).without_gathered(), invariant)
        if strict and automatic.whole:
            reasons = "; ".join(f"{name}: {why}" for name, why in automatic.whole.items())
            raise ValueError(f"parallelize: strict, and these layers would stay whole on every rank: {reasons}")
        return automatic, automatic.plan
    if isinstance(plan, str):
        raise ValueError(f'parallelize: plan={plan!r} is not "auto", None or a dict of module names')
    if sequence_parallel:
        raise ValueError(
            'parallelize: sequence_parallel=True belongs to plan="auto"; in a plan of your own it is an option of each '
            'layer: {"style": "row", "sequence_parallel": True}'
        )
    plan = plan or {}
    elsewhere = ranks.experts is not None
    split = [p for p, entry in plan.items() if entry != "tokenwise" and not (elsewhere and _splits_experts(entry))]
    if ranks.tp is None and split:
        raise ValueError(f'parallelize: the plan splits {", ".join(split)}, and the mesh has no dimension "tp"')
    return None, plan


def _plan_of_experts(model: nn.Module, plan: str | AutomaticPlan) -> Plan:
    """Return the part of an automatic plan that splits experts."""
    automatic = plan if isinstance(plan, AutomaticPlan) else automatic_plan(model, 1)
    return {name: entry for name, entry in automatic.plan.items() if _splits_experts(entry)}


def _check_invariant(model: nn.Module, ranks: _Ranks, invariant: int, in_stages: bool) -> None:
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


def _check_stages(model: nn.Module, stages: DeviceMesh, strict: bool) -> None:
    if strict:
        raise ValueError(
            f'parallelize: strict, and of the {stages.size()} ranks along "pp" one would compute at a time: pass '
            'pipeline={"microbatches": ..., "loss": ...} for a weft.Pipeline'
        )
    check_layers(model, stages.size())


def _split_adapters(model: nn.Module, replacements: dict[str, nn.Module]) -> list[Callable[[], None]]:
    """Return functions that split the adapters of peft around the replaced layers. From now on peft knows weft's."""
    register_with_peft()
    if not any(True for _ in wrappers_in(model)):
        return []
    from weft.adapters.peft import split_wrappers

    return list(split_wrappers(model, replacements))


def _check_sequence_parallel(ranks: _Ranks, invariant: int | None) -> None:
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


def _draw_alike(group: Communicator, model: nn.Module) -> None:
    """Set the random state of all ranks that split the layers to the first rank's.

    These ranks must drop the same elements of whole tensors. Ranks that loaded their weights may never have been
    seeded.
    """
    if group.world_size == 1:
        return
    for kind in rng_states(model):
        per_rank = group.all_gather_object(rng_states(model)[kind])
        restore_rng_state(kind, per_rank[0], model)


def _noted(model: nn.Module, automatic: AutomaticPlan | None) -> nn.Module:
    """Attach the automatic plan to the model, for `weft.explain`."""
    if automatic is not None:
        set_metadata(model, "plan", automatic)
    return model
