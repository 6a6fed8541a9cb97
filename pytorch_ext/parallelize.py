"""parallelize: splits the layers of an existing model as a plan says."""

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.communicator import Communicator, communicator
from weft.context.region import share, sharing_in, sharing_of, sum_of_bits
from weft.nn import ParallelEmbedding, ParallelLinear, sum_gradients
from weft.shard import shard_of

Plan = Mapping[str, str | Mapping]


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
    layers: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)
    }
    entries = _match(plan, model, layers)
    between, tokenwise = ([name for name, entry in entries.items() if entry == kind] for kind in _KEPT)
    replacements = {
        name: _parallel_layer(name, model.get_submodule(name), entry, group)
        for name, entry in entries.items()
        if name not in (*between, *tokenwise)
    }
    _tie(model, replacements)
    for ranks in (group, sequence):
        if ranks is not None:
            _check_same_model(model, ranks)
    for name in between:
        sum_gradients(model.get_submodule(name), group)
    for name, layer in replacements.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    if sharing is not None and sharing.ranks.world > 1:
        share(model, sharing, tokenwise)
    return model


_KEPT = ("sequence", "tokenwise")  # what a plan says of modules that it leaves whole


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


def _check_same_model(model: nn.Module, group: Communicator) -> None:
    """Ranks that drew different weights would train a model that is none of theirs, and nothing else would tell."""
    names, sums = [], []
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            names.append(name)
            sums.append(sum_of_bits(parameter))
    if not sums or group.world == 1:
        return
    ranks = group.all_gather(torch.stack(sums).unsqueeze(0), 0, [1] * group.world)
    for rank in range(1, group.world):
        different = (ranks[rank] != ranks[0]).nonzero()
        if len(different):
            raise ValueError(
                f"parallelize: {names[int(different[0])]} differs between rank 0 and rank {rank} ({len(different)} of "
                f"{len(names)} parameters do). Every rank must have the same whole model: seed all ranks alike "
                "(torch.manual_seed), or load the same weights, before you build it"
            )


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


def _match(plan: Plan, model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str | Mapping]:
    """Module name to plan entry. A module may be named by one pattern only."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    matched: dict[str, str | Mapping] = {}
    by: dict[str, str] = {}
    for pattern, entry in plan.items():
        expression = re.compile(_as_regex(pattern))
        hits = [name for name in names if expression.fullmatch(name)]
        if not hits:
            raise ValueError(
                f"parallelize: the plan names {pattern!r}, and no module is called that. "
                f"Linear and embedding layers of the model: {', '.join(layers) or 'none'}"
            )
        for name in hits:
            if name in by:
                raise ValueError(f"parallelize: {name} is named by both {by[name]!r} and {pattern!r}; keep one of them")
            matched[name], by[name] = entry, pattern
    return matched


def _as_regex(pattern: str) -> str:
    pieces = re.split(r"(\*\*\.|\*\*|\*)", pattern)
    wild = {"**.": r"(?:.+\.)?", "**": ".*", "*": r"[^.]+"}
    return "".join(wild.get(piece) or re.escape(piece) for piece in pieces)


def _parallel_layer(name: str, module: nn.Module, entry: str | Mapping, group) -> nn.Module:
    options = {"style": entry} if isinstance(entry, str) else dict(entry)
    style = options.pop("style", None)
    takes = {"column": nn.Linear, "row": nn.Linear, "vocabulary": nn.Embedding}
    if style not in takes:
        known = ", ".join(map(repr, [*takes, *_KEPT]))
        raise ValueError(f"parallelize: {name}: style {style!r} is not one of {known}")
    if type(module) is not takes[style]:  # a subclass does something that the replacement would not do
        raise TypeError(
            f"parallelize: {name} is {type(module).__name__}; style {style!r} takes nn.{takes[style].__name__} itself"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(f"parallelize: {name} has hooks, which its replacement would lose: remove them first")
    try:
        if style == "vocabulary":
            return ParallelEmbedding.from_embedding(module, group=group, **options)
        return ParallelLinear.from_linear(module, style=style, group=group, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"parallelize: {name}: {error}") from error


def _tie(model: nn.Module, replacements: dict[str, nn.Module]) -> None:
    """Parameters that were one stay one; refuses a plan under which they could not."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, key))
    for places in owners.values():
        split = [place for place in places if place[0] in replacements]
        if len(places) == 1 or not split:
            continue
        first = getattr(replacements[split[0][0]], split[0][1])
        for name, key in places:
            layer = replacements.get(name)
            if layer is None or shard_of(getattr(layer, key)) != shard_of(first):
                told = ", ".join(f"{owner}.{parameter}" for owner, parameter in places)
                raise ValueError(
                    f"parallelize: {told} are one parameter, and the plan does not split them in the same way; "
                    "name all of them, along the same dimension"
                )
            setattr(layer, key, first)
