"""Automatic plans: the layers of a model that can be split, and their styles.

The model is called without values, and each layer's output is followed, operation by operation (propagation.py). A
layer is split by columns if every operation up to the layers that take its features works on each unit alone; those
layers are then split by rows. Names play no part. Then every rank's part is rehearsed (dry_run.py). A layer that cannot
be shown to be right stays whole, with the reason. See docs/automatic_plans.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from weft.nn.expert_form import form_of, has_form
from weft.tensor_parallel.auto.axis_layout import Axis
from weft.tensor_parallel.auto.layer_specs import known
from weft.tensor_parallel.auto.propagation import Propagation
from weft.tensor_parallel.auto.search import GATHERED, Search, Structure, names_above, runs_of, structures
from weft.tensor_parallel.peft_wrappers import is_of_adapter, through_wrappers, wrappers_in
from weft.tensor_parallel.styles import kind_of


@dataclass(frozen=True)
class AutomaticPlan:
    """Result of `automatic_plan`.

    Attributes:
        plan: module name, as in `named_modules`, to an entry of a plan of `weft.parallelize`.
        whole: module name to the reason why it stays whole on every rank, for modules with matrices.
        loss_parallel: the argument of `automatic_plan`.
        parts: names of the modules that were followed by themselves; "" is the model.
        sequence_parallel: the argument of `automatic_plan`.
        gathered: layers with split outputs that are gathered at once, to the reason why they do not stay split.
    """

    plan: dict[str, str | Mapping]
    whole: dict[str, str]
    loss_parallel: bool = False
    parts: tuple[str, ...] = ("",)
    gathered: Mapping[str, str] = field(default_factory=dict)
    sequence_parallel: bool = False

    def without_gathered(self) -> "AutomaticPlan":
        """Return the plan with the layers whole that are split alone and gathered."""
        plan = {name: entry for name, entry in self.plan.items() if name not in self.gathered}
        return replace(self, plan=plan, whole={**self.whole, **self.gathered}, gathered={})

    def of_part(self, name: str) -> "AutomaticPlan":
        """Return the plan of one part, with names relative to the part."""
        if not name:
            return self
        inside = {
            full.removeprefix(name): entry for full, entry in self.plan.items() if f"{full}.".startswith(f"{name}.")
        }
        return AutomaticPlan({full.removeprefix("."): entry for full, entry in inside.items()}, {})


def automatic_plan(
    model: nn.Module,
    world: int,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    example: Any = None,
) -> AutomaticPlan:
    """Return a plan for `world` ranks. It is the same on every rank with the same model; nothing is communicated.

    Args:
        model: the model. It is not changed and may be on the meta device.
        sequence_parallel: each rank has its part of the sequence between split layers
            (weft.context_parallel.between_layers). The plan has the same layers.
        loss_parallel: a last layer over a vocabulary gives each rank its part of the scores, for
            `weft.parallel_cross_entropy`; otherwise every rank gets all scores.
        example: input of the model: a tensor, a tuple of arguments or a dict of named arguments. Pass it if the model
            cannot be called with only tokens, an image or features. A small input is enough; only the shapes of
            floating-point tensors matter.

    Raises:
        ValueError: world is below 1.
    """
    if world < 1:
        raise ValueError(f"automatic_plan: world={world} must be at least 1")
    plan: dict[str, str | Mapping] = {}
    reasons: dict[str, str] = {}
    parts: list[str] = []
    gathered: dict[str, str] = {}
    for part in structures(model, world, loss_parallel, example):
        if not isinstance(part, Structure):
            name, reasons[name] = part
            continue
        parts.append(part.prefix)
        for layer, entry in _entries(part).items():
            plan[_joined(part.prefix, layer)] = entry
        for layer, reason in part.reasons.items():
            reasons[_joined(part.prefix, layer)] = reason
        gathered |= {_joined(part.prefix, layer): reason for layer, reason in part.gathered.items()}
    if len(parts) > 1:
        reasons |= _leave_torn_ties(model, plan)
    plan = through_wrappers(plan, model)
    whole = _whole(model, plan, reasons)
    entries = _under_all_names(model, plan)
    return AutomaticPlan(entries, whole, loss_parallel, tuple(parts), gathered, sequence_parallel)


def conflict_in(model: nn.Module, world: int, automatic: AutomaticPlan, call: Callable) -> str | None:
    """Describe why the plan is wrong for a call; None if it is right, or if the call cannot be followed.

    Args:
        model: the unsplit model. It may be on the meta device.
        call: call(model) runs the call.
    """
    runs = runs_of(model, [call])
    if isinstance(runs, str):
        return None
    search = Search("", runs, world, automatic.loss_parallel)
    planned = {name: entry for name, entry in automatic.plan.items() if not _is_whole_outside(entry)}
    search.flow.fixed |= {name: "the plan leaves it whole" for name in search.modules if name not in planned}
    part = search.structure()
    needed = _under_all_names(model, {n: e for n, e in _entries(part).items() if not _is_whole_outside(e)})
    for name, entry in needed.items():
        if planned.get(name) != entry:
            return f"{name} needs {entry!r}, and the plan has {planned.get(name)!r}"
    for name in planned:
        if name not in needed and name in search.called:
            return f"{name}: {part.reasons.get(name, 'its features are used in another way')}"
    return None


def _is_whole_outside(entry: str | Mapping) -> bool:
    """Return whether the layer takes and gives whole tensors in any surroundings."""
    return entry in ("vocabulary", "lookup", "heads", "experts", GATHERED)


def _joined(prefix: str, name: str) -> str:
    return ".".join(filter(None, (prefix, name)))


def _entries(part: Structure) -> dict[str, str | Mapping]:
    """Return the plan of one part of the model, with names relative to the part."""
    found = part.found
    entries: dict[str, str | Mapping] = dict(part.alone)
    for layer, axis in found.columns.items():
        if layer not in found.refused:
            entries[layer] = _column(found, axis)
    for layer, layout in found.rows.items():
        entries[layer] = {"style": "row", **found.systems[layout.axis].cut(layout.axis, layout.extent)}
    for layer, axis in found.norms.items():
        entries[layer] = {"style": "channels", **found.systems[axis].cut(axis, axis.size)}
    for (layer, attribute), local in part.numbers.items():
        entries[layer] = {"style": "attributes", **entries.get(layer, {}), attribute: local}  # type: ignore[dict-item]
    for layer in part.summed:
        entries[layer] = {**entries[layer], "summed": True} if layer in entries else "sequence"  # type: ignore[dict-item]
    return {layer: _short(entry) for layer, entry in entries.items()}


def _short(entry: str | Mapping) -> str | Mapping:
    if isinstance(entry, str):
        return entry
    options = {key: value for key, value in entry.items() if (key, value) != ("unit", 1)}
    return options["style"] if list(options) == ["style"] else options


def _column(found: Propagation, axis: Axis) -> Mapping:
    leaves = axis.leaves()
    cuts = [found.systems[leaf].cut(leaf, leaf.size) for leaf in leaves]
    if len(leaves) == 1:
        return {"style": "column", **cuts[0]}
    units = tuple(cut["unit"] for cut in cuts)
    parts = {"parts": tuple(leaf.size for leaf in leaves), "unit": units[0] if len(set(units)) == 1 else units}
    return {"style": "column", **cuts[0], **parts}


def _leave_torn_ties(model: nn.Module, plan: dict[str, str | Mapping]) -> dict[str, str]:
    """Take layers out of the plan that share a weight with a layer of another part that stays whole; return reasons."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(name)
    reasons = {}
    for names in owners.values():
        absent = ", ".join(name for name in names if name not in plan)
        for name in names:
            if absent and _is_whole_outside(plan.get(name, "")):
                del plan[name]
                reasons[name] = f"its weight is also that of {absent}, which stays whole"
    return reasons


def _under_all_names(model: nn.Module, plan: dict) -> dict:
    """Return the plan with an entry for each name of a module that has several."""
    first = {id(module): name for name, module in model.named_modules()}
    names = ((name, first[id(module)]) for name, module in model.named_modules(remove_duplicate=False))
    return {name: plan[own] for name, own in names if own in plan}


def _whole(model: nn.Module, plan: Mapping, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the modules with matrices that no entry splits, with the reasons."""
    whole = {}
    wrappers = dict(wrappers_in(model))
    for name, module in model.named_modules():
        if is_of_adapter(name, wrappers):
            continue
        above = names_above(name)
        if any(_splits(plan.get(place)) for place in [name, *above]):
            continue
        if not any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            continue
        if known(module) is None and (name not in reasons or not isinstance(module, nn.Embedding)):
            form = form_of(module) if has_form(module) else ""
            whole[name] = form if isinstance(form, str) and form else f"there is no style for {kind_of(module)}"
            continue
        places = (place for place in [name, *above, ""] if place in reasons)
        whole[name] = next((reasons[place] for place in places), "it is not called when the model is")
    return whole


def _splits(entry: str | Mapping | None) -> bool:
    """Return whether the entry splits the module; other entries only add information about it."""
    style = entry if isinstance(entry, str | None) else entry["style"]
    return style not in (None, "sequence", "attributes", "dropout")
