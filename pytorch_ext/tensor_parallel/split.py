"""The split of a model's layers by a plan: first the layers, made beside the model, then the change of the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.mesh import MeshRanks
from weft.nn import sum_gradients
from weft.tensor_parallel.auto import AutomaticPlan, automatic_plan
from weft.tensor_parallel.invariant_plan import check_same_layers, in_units
from weft.tensor_parallel.local_sizes import is_summed
from weft.tensor_parallel.patterns import match
from weft.tensor_parallel.peft_wrappers import through_wrappers
from weft.tensor_parallel.styles import KEPT, Plan, part_of
from weft.tensor_parallel.ties import keep_parameters, tie


@dataclass
class SplitLayers:
    """A model's split layers.

    Attributes:
        automatic: the automatic plan that splits them, or None.
        replacements: the split layers, by the name of the layer that they replace.
        summed: names of the layers whose gradients are summed over the ranks.
        tokenwise: names of the modules that treat every position alone.
    """

    automatic: AutomaticPlan | None
    replacements: dict[str, nn.Module]
    summed: list[str]
    tokenwise: list[str]

    @classmethod
    def of(
        cls, model: nn.Module, automatic: AutomaticPlan | None, plan: Plan, ranks: MeshRanks, invariant: int | None
    ) -> "SplitLayers":
        """Make the split layers of a plan. The model stays as it is.

        Raises:
            ValueError, TypeError: as `weft.parallelize` says of plans.
        """
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
        summed = [*between, *(name for name, layer in replacements.items() if is_summed(layer))]
        return cls(automatic, replacements, summed, tokenwise)

    @property
    def by_parts(self) -> bool:
        """A caller may pass this rank's part of the sequence: a plan of the user's own with sequence_parallel."""
        layers = self.replacements.values()
        return self.automatic is None and any(getattr(layer, "sequence_parallel", False) for layer in layers)

    def install(self, model: nn.Module, ranks: MeshRanks, adapters: Sequence[Callable[[], None]]) -> None:
        """Put the layers into the model.

        Args:
            adapters: functions that split the adapters around replaced layers.
        """
        replaced: dict[nn.Module, nn.Module] = {}
        for name, layer in self.replacements.items():
            parent, _, child = name.rpartition(".")
            keep_parameters(model.get_submodule(name), layer)
            replaced[model.get_submodule(name)] = layer
            setattr(model.get_submodule(parent), child, layer)
        _replace_in_lists(model, replaced)
        for install in adapters:
            install()
        for layer in dict.fromkeys(map(model.get_submodule, self.summed)):
            sum_gradients(layer, ranks.tp)


def chosen_plan(
    model: nn.Module,
    plan: Plan | AutomaticPlan | str | None,
    ranks: MeshRanks,
    sequence_parallel: bool,
    strict: bool,
    invariant: int | None,
) -> tuple[AutomaticPlan | None, Plan]:
    """Return the automatic plan, or None, and the plan as a dict; the arguments are those of `weft.parallelize`.

    Raises:
        ValueError: the plan is of another kind, or leaves layers whole with `strict`, or has no ranks to split over.
    """
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
