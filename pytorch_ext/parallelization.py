"""parallelize: one call that puts a model on a mesh: layers split, sequence shared, stages cut, batches averaged."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.activation_checkpoint import recompute as recompute_these
from weft.activation_checkpoint import recomputed_in
from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.context_parallel.region import share, sharing_in, sharing_of
from weft.data_parallel.data_parallel import DataParallel
from weft.explanation.summary import log_summary
from weft.metadata import set_metadata
from weft.nn import sum_gradients
from weft.pipeline.layer_split import LayerSplit, check_layers
from weft.replicas import FIRST_CALLS, SameCalls, check_replicas, check_same_model
from weft.rng import restore_rng_state, rng_states
from weft.tensor_parallel.auto import AutomaticPlan, automatic_plan
from weft.tensor_parallel.call_check import call_checks
from weft.tensor_parallel.gather_outputs import return_whole
from weft.tensor_parallel.local_sizes import is_summed
from weft.tensor_parallel.part_uses import PartUses
from weft.tensor_parallel.patterns import match
from weft.tensor_parallel.plan_check import check_flow, check_meeting, own_plan
from weft.tensor_parallel.styles import KEPT, Plan, part_of
from weft.tensor_parallel.ties import keep_parameters, tie


def parallelize(
    model: nn.Module,
    mesh: Group = None,
    *,
    plan: Plan | AutomaticPlan | str | None = "auto",
    sequence_parallel: bool = False,
    context: str | Mapping = "auto",
    recompute: str = "none",
    strict: bool = False,
    check_calls: int = FIRST_CALLS,
    check_replicas_every: int = 0,
) -> nn.Module:
    """The model on the whole mesh. It is called as before, and returns what it returned.

        model = weft.parallelize(model, weft.init_mesh(pp=2, dp=2, cp=1, tp=2))

        weft.parallelize(model, mesh["tp"], plan={
            "layers.*.mlp.up": "column",
            "layers.*.mlp.down": "row",
            "layers.*.attention.query": {"style": "column", "unit": head_dim},
            "embedding": "vocabulary",
        })

    Each dimension of the mesh that is larger than 1 does its part:
        tp: layers are replaced, in place, by their parallel counterparts that hold this rank's part of the weights. The
            ranks go on with the first one's random numbers, and draw alike from then on: seed them alike if at all.
        cp: the model shares its sequence among the ranks.
        pp: the model is cut with `weft.LayerSplit`: each rank keeps its layers, one computes at a time, and every rank
            calls with the same inputs and the same loss. The way in which all of them compute is
            `weft.Pipeline(weft.parallelize(model, mesh["cp", "tp"]), mesh, ...)`.
        dp: the result is wrapped in `weft.DataParallel`: each of these ranks gives its own part of the batch. For its
            options leave dp out (`mesh["pp", "cp", "tp"]`) and wrap what comes back.

    Args:
        model: every rank has the same whole model. Weights that layers share (tied embeddings, layers that stand in
            several places) stay shared.
        mesh: of init_mesh, or some of its dimensions (`mesh["cp", "tp"]`). Any other one-dimensional DeviceMesh, a
            ProcessGroup, or None for the default group are the ranks that split the layers.
        plan: "auto" finds what can be split (docs/automatic_plans.md); or what `automatic_plan` has found. None splits
            nothing. Or module names to "column" or "row" (nn.Linear), "vocabulary" (nn.Embedding) or another style
            (docs/tensor_parallel.md), or to a dict with such a "style" and its options; or any module to "sequence",
            which leaves it as it is and sums its gradients over the ranks, for what stands between layers with
            sequence_parallel; or to "tokenwise", which says that it treats every position alone, whatever it calls:
            with cp it gets this rank's part. A `*` in a name stands for one component of it, `**` for any number, none
            included.
        sequence_parallel: asks plan="auto" that between split layers each rank of "tp" has its part of the sequence;
            it raises where it cannot show that to be right. In a plan of your own it is an option of each layer.
        context: how the sequence is shared: a method of `weft.context_attention`, or a dict of
            method, layout: as there;
            dim: the dimension of the model's arguments that is the sequence, 1 by default. Arguments of another length
                along it, or with fewer dimensions, are taken as they are;
            parts: False: the model takes and returns the whole, as before. True: every rank calls it with its own
                part (`weft.shard_sequence`) and gets its part of the outputs; the whole loss is the sum of the ranks';
            strict: raise where a function of the model has no rule and the sequence would be gathered for it.
            See docs/sequence_parallel.md.
        recompute: what backward computes again instead of keeping it: "none"; "full": each block (an element of the
            outermost lists of modules); "selective": of each block its attention and MLP, where these are modules.
        strict: raise where plan="auto" leaves a layer whole, and for pp, whose ranks would wait for one another.
        check_calls: how many calls are checked to be alike on the ranks that compute one model together ("tp", "pp"):
            arguments, mode, and random numbers where the model draws some. The first one looks at the split weights
            too. 0 turns it off, for ranks that call with different tensors on purpose; so does a plan of your own with
            sequence_parallel, which a rank may call with its part of the sequence.
        check_replicas_every: run `weft.check_replicas` in every so many calls that train; 0 is never. Whenever you
            like: `model.check_replicas()`.

    Returns:
        The model itself, in place, where only tp and cp are larger than 1. With pp a LayerSplit of it; with dp a
        DataParallel around the model or that. `weft.explain` takes any of them.

    Raises:
        ValueError: a mesh with other dimensions; a pattern that matches nothing (with the names there are), a layer
            that cannot be split over these ranks, layers that do not meet or have an operation between them that needs
            all features (softmax, a norm), as far as the model can be followed, a tied weight that only one of its
            layers splits; more stages than layers, a model that cannot be cut; a context or a recompute that does not
            exist.
        TypeError: a layer of a kind that the style does not take. The model is unchanged then and nothing was sent.
            Also ranks whose models differ: on every rank.
    """
    ranks = _ranks_of(mesh)
    sharing = None if ranks.cp is None else sharing_of(ranks.cp, context)
    if sharing is not None and "" in sharing_in(model):
        raise ValueError("parallelize: the model shares its sequence already")
    if sharing is None and context != "auto":
        raise ValueError(
            f'parallelize: context={context!r}, and the mesh has no dimension "cp" to share a sequence over'
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    automatic, plan = _plan_of(model, plan, ranks, sequence_parallel, strict)
    entries = match(plan, model)
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
    summed = [*between, *(name for name, layer in replacements.items() if is_summed(layer))]
    own = None
    if automatic is None and ranks.tp is not None:
        check_meeting(model, replacements)
        own = own_plan(model, replacements, summed, ranks.tp.world_size)
        check_flow(model, own)
    recomputed = recomputed_in(model, recompute)
    if ranks.stages is not None:
        _check_stages(model, ranks.stages, strict)
    for group in (ranks.tp, ranks.cp, None if ranks.stages is None else communicator(ranks.stages)):
        if group is not None:
            check_same_model(model, group)
    if ranks.tp is not None:
        _draw_alike(ranks.tp, model)

    checks = call_checks(model, automatic or own, ranks.tp)
    for name, layer in replacements.items():
        parent, _, child = name.rpartition(".")
        keep_parameters(model.get_submodule(name), layer)
        setattr(model.get_submodule(parent), child, layer)
    for layer in dict.fromkeys(map(model.get_submodule, summed)):
        sum_gradients(layer, ranks.tp)
    return_whole(model)
    if recompute != "none":
        recompute_these({name: model.get_submodule(name) for name in recomputed})
    if sharing is not None and sharing.ranks.world_size > 1:
        share(model, sharing, tokenwise)
    if automatic is not None and automatic.plan and "" not in automatic.parts:
        PartUses(automatic.parts).install(model)
    called = {name: model.get_submodule(name) for name in checks}
    if ranks.stages is not None:
        model = LayerSplit(model, ranks.stages, check_calls=check_calls)
    else:
        model.check_replicas = partial(check_replicas, model)  # type: ignore[assignment]
    for name, check in checks.items():
        watched = called[name] if name else model
        check.watch(watched)
        watched.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    wrapped = model if ranks.replicas is None else DataParallel(model, group=ranks.replicas)
    # By a plan of one's own with sequence_parallel a model may be called with this rank's part of the sequence.
    by_parts = automatic is None and any(getattr(layer, "sequence_parallel", False) for layer in replacements.values())
    alike = {} if ranks.tp is None or by_parts else {ranks.tp: True}
    SameCalls(alike, check_calls, check_replicas_every).install(wrapped, model)
    log_summary(model, ranks.sizes, parameters, automatic.whole if automatic else {})
    set_metadata(model, "mesh", ranks.sizes)
    return _noted(wrapped, automatic)


@dataclass(frozen=True)
class _Ranks:
    """Who does what. `stages` and `replicas` are there where they are more than one."""

    tp: Communicator | None
    cp: Communicator | None
    stages: DeviceMesh | None
    replicas: DeviceMesh | None

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension of the mesh to its ranks."""
        split = {name: one.world_size for name, one in (("cp", self.cp), ("tp", self.tp)) if one is not None}
        outer = {name: one.size() for name, one in (("pp", self.stages), ("dp", self.replicas)) if one is not None}
        return {**outer, **split}


_DIMENSIONS = ("pp", "dp", "cp", "tp")


def _ranks_of(mesh) -> _Ranks:
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
    stages, replicas = (along[name] if name in along and along[name].size() > 1 else None for name in ("pp", "dp"))
    return _Ranks(tp, cp, stages, replicas)


def _plan_of(
    model: nn.Module, plan: Plan | AutomaticPlan | str | None, ranks: _Ranks, sequence_parallel: bool, strict: bool
) -> tuple[AutomaticPlan | None, Plan]:
    if plan == "auto" or isinstance(plan, AutomaticPlan):
        if ranks.tp is None or ranks.tp.world_size == 1:
            return None, {}
        automatic = plan if isinstance(plan, AutomaticPlan) else None
        automatic = automatic or automatic_plan(model, ranks.tp.world_size, sequence_parallel=sequence_parallel)
        if strict and automatic.whole:
            told = "; ".join(f"{name}: {why}" for name, why in automatic.whole.items())
            raise ValueError(f"parallelize: strict, and these layers would stay whole on every rank: {told}")
        return automatic, automatic.plan
    if isinstance(plan, str):
        raise ValueError(f'parallelize: plan={plan!r} is not "auto", None or a dict of module names')
    if sequence_parallel:
        raise ValueError(
            'parallelize: sequence_parallel=True is of plan="auto"; in a plan of your own it is an option of each '
            'layer: {"style": "row", "sequence_parallel": True}'
        )
    plan = plan or {}
    split = [pattern for pattern, entry in plan.items() if entry != "tokenwise"]
    if ranks.tp is None and split:
        raise ValueError(f'parallelize: the plan splits {", ".join(split)}, and the mesh has no dimension "tp"')
    return None, plan


def _check_stages(model: nn.Module, stages: DeviceMesh, strict: bool) -> None:
    if strict:
        raise ValueError(
            f'parallelize: strict, and of the {stages.size()} ranks along "pp" one would compute at a time: call '
            'weft.Pipeline(weft.parallelize(model, mesh["cp", "tp"]), mesh, microbatches=..., loss=...) instead'
        )
    check_layers(model, stages.size())


def _draw_alike(group: Communicator, model: nn.Module) -> None:
    """The ranks that split the layers go on with the first one's random numbers: what they have whole they must drop
    alike, and a model whose weights were loaded comes with ranks that were never seeded."""
    if group.world_size == 1:
        return
    for kind in rng_states(model):
        told = group.all_gather_object(rng_states(model)[kind])
        restore_rng_state(kind, told[0], model)


def _noted(model: nn.Module, automatic: AutomaticPlan | None) -> nn.Module:
    """With what the automatic plan says, for `weft.explain`."""
    if automatic is not None:
        set_metadata(model, "plan", automatic)
    return model
