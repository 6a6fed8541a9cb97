"""parallelize: splits the layers of an existing model as a plan says."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.communicator import Communicator, communicator
from weft.context.region import share, sharing_in, sharing_of
from weft.nn import sum_gradients
from weft.splitting.agreement import check_same_model
from weft.splitting.matching import match
from weft.splitting.styles import KEPT, Plan, part_of
from weft.splitting.ties import tie


def parallelize(model: nn.Module, mesh=None, *, plan: Plan | None = None, context: str | Mapping = "auto") -> nn.Module:
    """Replaces layers of `model`, in place, by their parallel counterparts that hold this rank's part of the weights;
    where the mesh has ranks along "cp", the model shares its sequence among them.

        weft.parallelize(model, mesh["tp"], plan={
            "layers.*.mlp.up": "column",
            "layers.*.mlp.down": "row",
            "layers.*.attention.query": {"style": "column", "unit": head_dim},
            "embedding": "vocabulary",
        })

    Args:
        model: every rank has the same whole model. Weights that layers share (tied embeddings) stay shared.
        mesh: a mesh of init_mesh of which only "cp" and "tp" are larger than 1, one of these two or both
            (`mesh["cp", "tp"]`); any other one-dimensional DeviceMesh, a ProcessGroup, or None for the default group
            are the ranks that split the layers.
        plan: module names to "column" or "row" (nn.Linear) or "vocabulary" (nn.Embedding), or to a dict with such a
            "style" and further options of ParallelLinear; or any module to "sequence", which leaves it as it is and
            sums its gradients over the ranks, for what stands between layers with sequence_parallel; or to
            "tokenwise", which says that it treats every position alone, whatever it calls: with cp it gets this rank's
            part. A `*` in a name stands for one component of it, `**` for any number, none included.
        context: how the sequence is shared: a method of `weft.context_attention`, or a dict of
            method, layout: as there;
            dim: the dimension of the model's arguments that is the sequence, 1 by default. Arguments of another length
                along it, or with fewer dimensions, are taken as they are;
            parts: False: the model takes and returns the whole, as before. True: every rank calls it with its own
                part (`weft.shard_sequence`) and gets its part of the outputs; the whole loss is the sum of the ranks';
            strict: raise where a function of the model has no rule and the sequence would be gathered for it.
            See docs/sequence_parallel.md.

    Returns:
        The model.

    Raises:
        ValueError: a pattern that matches nothing (with the names there are), a layer that cannot be split over these
            ranks, a tied weight that only one of its layers splits, ranks whose models differ, a context that does not
            exist. TypeError: a layer of a kind that the style does not take. The model is unchanged then.
    """
    group, sequence = _groups(mesh)
    sharing = None if sequence is None else sharing_of(sequence, context)
    if sharing is not None and "" in sharing_in(model):
        raise ValueError("parallelize: the model shares its sequence already")
    plan = _checked_plan(plan, context, group, sharing)
    entries = match(plan, model)
    between, tokenwise = ([name for name, entry in entries.items() if entry == kind] for kind in KEPT)
    replacements = {
        name: part_of(name, model.get_submodule(name), entry, group)
        for name, entry in entries.items()
        if name not in (*between, *tokenwise)
    }
    tie(model, replacements)
    for ranks in (group, sequence):
        if ranks is not None:
            check_same_model(model, ranks)
    for name in between:
        sum_gradients(model.get_submodule(name), group)
    for name, layer in replacements.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    if sharing is not None and sharing.ranks.world > 1:
        share(model, sharing, tokenwise)
    return model


def _checked_plan(plan: Plan | None, context, group: Communicator | None, sharing) -> Plan:
    if sharing is None and context != "auto":
        raise ValueError(
            f'parallelize: context={context!r}, and the mesh has no dimension "cp" to share a sequence over'
        )
    if plan is None:
        if sharing is None:
            raise ValueError('parallelize: no plan, and no mesh with ranks along "cp": say which layers to split')
        return {}
    split = [pattern for pattern, entry in plan.items() if entry != "tokenwise"]
    if group is None and split:
        raise ValueError(
            f'parallelize: the plan splits {", ".join(split)}, and the mesh has "cp" alone; pass mesh["cp", "tp"]'
        )
    return plan


def _groups(mesh) -> tuple[Communicator | None, Communicator | None]:
    """The ranks that split the layers, and those that share the sequence."""
    if not isinstance(mesh, DeviceMesh):
        return communicator(mesh), None
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and names != ("cp",):
        return communicator(mesh), None
    if not {"cp", "tp"} & set(names):
        raise ValueError(
            f'parallelize: the mesh has the dimensions {names}, none of them "tp" or "cp"; pass the one to use'
        )
    others = [name for name in names if name not in ("cp", "tp") and mesh[name].size() > 1]
    if others:
        raise NotImplementedError(
            f'parallelize splits over "tp" and "cp" alone for now, and the mesh also has {", ".join(others)} larger '
            'than 1: pass mesh["cp", "tp"], and wrap the result in torch\'s DistributedDataParallel over '
            'mesh["dp"].get_group()'
        )
    along = {name: mesh if mesh.ndim == 1 else mesh[name] for name in names if name in ("cp", "tp")}
    group, sequence = (communicator(along[name]) if name in along else None for name in ("tp", "cp"))
    return group, sequence
