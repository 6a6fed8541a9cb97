"""Search for the layers of a model, or of parts that run alone, that can be split: trace, follow, rehearse."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from torch import nn

from weft.nn.dropout import SEVERAL, split_dim
from weft.nn.expert_form import inner_of
from weft.tensor_parallel.auto.dry_run import Numbers, rehearse
from weft.tensor_parallel.auto.example_inputs import calling, calls
from weft.tensor_parallel.auto.layer_specs import is_experts, known, sizes_of
from weft.tensor_parallel.auto.propagation import RETURNED, SPLIT, Flow, Propagation
from weft.tensor_parallel.auto.trace import Trace, UntraceableError, Value, trace, without_values
from weft.tensor_parallel.peft_wrappers import is_of_adapter, wrappers_in
from weft.tensor_parallel.styles import kind_of
from weft.tensor_parallel.transformers_calls import attentions, prepare

DENSE = ("nn.Linear", "transformers.Conv1D")
_MOST_CLOSED = 200  # modules that cannot be followed inside
_BY_HAND = "a plan by hand can still split layers of it"
_AROUND = "the code around it could not be followed"
_PASSED_ON = ("view", "_to_copy", "slice", "unsqueeze", "squeeze")
GATHERED = {"style": "column", "gather_output": True}
_LARGE = 0.01  # the share of the model's parameters from which layers of one kind are split and gathered


@dataclass
class Structure:
    """Search result for one traced module. Names are relative to the module.

    Attributes:
        prefix: name of the module in the model.
        found: the layers that can be split.
        numbers: the numbers that modules must have on each rank.
        alone: entries of layers that are split by themselves and give a whole output.
        summed: modules with gradients that are summed over the ranks.
        reasons: other layers, to the reason why they are not split.
        gathered: layers that are split and give a whole output, to the reason why their features do not stay split.
    """

    prefix: str
    found: Propagation
    numbers: Numbers
    alone: dict[str, str | Mapping] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    gathered: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """Copy of the model without values, the function that calls it, and the trace of that call."""

    twin: nn.Module
    call: Callable
    whole: Trace


def structures(model: nn.Module, world: int, loss_parallel: bool, example=None) -> Iterator:
    """Yield a Structure for the model, or for each part that runs alone; (name, reason) for parts that do not run."""
    runs = runs_of(model, calls(model)) if example is None else runs_of(model, [calling(example)], "the example")
    if isinstance(runs, str):
        way_out = "see `example` of weft.tensor_parallel.auto.automatic_plan" if example is None else _BY_HAND
        yield "", f"{runs}: {way_out}"
        yield from _parts(model, world, [name for name, _ in model.named_children()])
    else:
        yield Search("", runs, world, loss_parallel).structure()
        yield from _parts(model, world, _unfollowed(model, runs))


def _parts(model: nn.Module, world: int, names: Iterable[str], prefix: str = "") -> Iterator:
    """Yield the results for parts of a module that its own run does not look into.

    The code around the parts is checked when the model is called (plan_check.py).
    """
    for name in names:
        part, full = model.get_submodule(name), f"{prefix}.{name}".lstrip(".")
        if not any(True for _ in part.parameters()):
            continue
        runs = runs_of(part, calls(part))
        if isinstance(runs, str):
            yield full, runs
            yield from _parts(part, world, [child for child, _ in part.named_children()], full)
        else:
            yield Search(full, runs, world, False).structure()
            yield from _parts(part, world, _unfollowed(part, runs), full)


def _unfollowed(model: nn.Module, runs: list[Run]) -> Iterator[str]:
    """Yield the outermost modules that no run calls (the images' part of a model of text, say) or looks into.

    They share no parameters with the rest, and no run uses their parameters without calling them.
    """
    nodes = [node for run in runs for node in run.whole.nodes]
    closed = {name for run in runs for name in run.whole.closed}
    followed = {node.layer for node in nodes} - closed - {""}  # and, below, the modules that are found
    ran = {node.where for node in nodes} - closed | followed
    ran |= {name for place in ran for name in names_above(place)}
    used = {name for node in nodes for value in node.inputs for name in value.origin or ()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    wrappers = dict(wrappers_in(model))
    for name, module in model.named_modules():
        if not name or name in ran or not followed.isdisjoint(names_above(name)) or is_of_adapter(name, wrappers):
            continue
        own = [other for parameter in module.parameters() for other in names[id(parameter)]]
        if own and used.isdisjoint(own) and all(other.startswith(f"{name}.") for other in own):
            followed.add(name)
            yield name


def runs_of(model: nn.Module, tries, given: str = "a guess") -> list[Run] | str:
    """Return the model's runs in training and evaluation with each attention implementation; or why there are none.

    Args:
        tries: calls to try, in order.
        given: what they are, in words.
    """
    reason = "it is not known how to call it"
    tries, runs = list(tries), list[Run]()
    for attention, training in product(attentions(model), (True, False)):
        try:
            twin = without_values(model, training)
        except Exception as error:  # copying a user's objects may raise anything
            return f"it cannot be copied: {type(error).__name__}: {error}"
        prepare(twin, attention)
        for call, closing in [(call, closing) for closing in (False, True) for call in tries]:
            try:
                runs.append(Run(twin, call, _traced(twin, call, closing)))
                tries = tries[tries.index(call) :]
                break
            except UntraceableError as error:
                reason = f"it was called with {given}, and {error}"
        else:
            return reason
    return runs


def _traced(twin: nn.Module, call, closing: bool) -> Trace:
    """Trace a call of the model.

    Args:
        closing: close a module that cannot run without values. A closed module gets its inputs whole.
    """
    closed: dict[str, str] = {}
    while True:
        try:
            return trace(twin, call, closed)
        except UntraceableError as error:
            name = error.module
            if not closing or not name or name in closed or len(closed) >= _MOST_CLOSED:
                raise
            inside = [why for other, why in closed.items() if other.startswith(f"{name}.")]
            reason = inside[0] if inside else f"what it computes cannot be followed: {error}"
            closed = {other: why for other, why in closed.items() if not other.startswith(f"{name}.")}
            kind = type(twin.get_submodule(name))
            general = kind.__module__.startswith("torch.nn")  # for example a Sequential, which may contain anything
            alike = (other for other, module in twin.named_modules() if other and type(module) is kind)
            closed |= dict.fromkeys([name] if general else alike, reason)


class Search:
    """Search that splits layers together, then layers alone, until both agree about shared weights."""

    def __init__(self, prefix: str, runs: list[Run], world: int, loss_parallel: bool):
        self.prefix, self.runs, self.whole = prefix, runs, runs[0].whole
        self.world_size, self.loss_parallel = world, loss_parallel
        self.flow = Flow(runs[0].twin, self.whole, world)
        self.modules = self.flow.modules
        self.kept: dict[str, str] = {}  # layers that would be split alone, and are not
        self.made = {output: node for node in self.whole.nodes for output in node.outputs if output is not None}
        self.called = {node.layer: node for node in self.whole.nodes if node.op == "layer"}

    def structure(self) -> Structure:
        while True:
            found = self.flow.find()
            numbers, wrong = self._rehearsed(found)
            if wrong:
                if not set(wrong) - set(self.flow.refused):
                    wrong = dict.fromkeys(found.columns, "the model does not do the same when it is called again")
                self.flow.refused = wrong | self.flow.refused
                continue
            alone = self._alone(found)
            unlike = self._dropped_unlike(found)
            if unlike:
                self.flow.refuse(
                    unlike,
                    "one module drops random elements both of its features and of whole tensors",
                )
                continue
            returned = frozenset(layer for layer, entry in alone.items() if entry == GATHERED)
            if self.loss_parallel and returned and not self.flow.returned:
                self.flow.allow_returned(returned)
                continue
            partial = self._returned_in_parts(found)
            if partial:
                self.flow.refuse(partial, RETURNED)
                continue
            gathered = self._gathered(found, alone)
            if self._ties_hold(found, alone):
                for name, places in self._dropped(found).items():
                    own = kind_of(self.modules[name]) == "nn.Dropout"
                    entry = {"style": "dropout"} if own else {"style": "attributes", "own_random_numbers": True}
                    unusual = {} if places == [None] else {"drops": places[0] if len(places) == 1 else SEVERAL}
                    alone[name] = {**entry, **unusual}
                for name, results in found.asides(self.whole).items():
                    alone[name] = {"style": "attributes", **dict(alone.get(name, ())), "results": results}  # type: ignore[arg-type]
                reasons = {**self.whole.closed, **found.refused, **self.kept}
                if self.prefix:
                    reasons = {layer: why.replace(RETURNED, _AROUND) for layer, why in reasons.items()}
                summed = sorted({owner for name in found.summed for owner in self.flow.owners[name]})
                return Structure(
                    self.prefix, found, numbers, alone, summed, reasons, {layer: reasons[layer] for layer in gathered}
                )

    def _returned_in_parts(self, found: Propagation) -> set[str]:
        """Return layers with features that the model returns and that cannot be gathered rank after rank."""
        aside = found.asides(self.whole)
        partial = set()
        for value in self.whole.outputs:
            name, place = self.whole.aside.get(value, ("", 0))
            if value in found.layouts and value in self.whole.aside and place not in aside.get(name, {}):
                partial.add(found.layouts[value].axis.layer)
        return partial

    def _dropped(self, found: Propagation) -> dict[str, list[tuple[int, int] | None]]:
        """Return the modules that drop random elements of split tensors, with the places of the split features there.

        A place is a dimension, and the size of its inner part that is split over the ranks; None if it is the whole
        dimension where features or heads usually are.
        """
        places: dict[str, list[tuple[int, int] | None]] = {}
        for node in self.whole.nodes:
            for value in node.inputs if node.drops else ():
                if (layout := found.layouts.get(value)) is not None:
                    dims = len(value.shape)
                    usual = dims - 3 if node.op == "attention" and dims > 3 else split_dim(dims)
                    place = None if (layout.dim, layout.before) == (usual, 1) else (layout.dim, layout.extent)
                    if place not in places.setdefault(node.where, []):
                        places[node.where].append(place)
        return places

    def _dropped_unlike(self, found: Propagation) -> set[str]:
        """Return layers with features that a module drops although it also drops whole tensors.

        Drops of whole tensors in an nn.Dropout of their own do not count.
        """
        layers = set()
        for name in self._dropped(found):
            module = self.modules[name]
            can_be_marked = kind_of(module) == "nn.Dropout" or (name and type(module) is not nn.Dropout)
            if can_be_marked and self._only_split(found, name):
                continue
            for node in self.whole.nodes:
                if node.where == name and node.drops:
                    layers |= {found.layouts[v].axis.layer for v in node.inputs if v in found.layouts}
        return layers

    def _only_split(self, found: Propagation, name: str) -> bool:
        inside = (node for node in self.whole.nodes if node.drops and f"{node.where}.".startswith(f"{name}."))
        own = (node for node in inside if node.where == name or not isinstance(self.modules[node.where], nn.Dropout))
        return all(any(value in found.layouts for value in node.inputs) for node in own)

    def _rehearsed(self, found: Propagation) -> tuple[Numbers, dict[str, str]]:
        """Return the numbers that modules must have, and the layers that fail in spite of them, with the reason."""
        numbers: Numbers = {}
        for run in self.runs:
            flow = Flow(run.twin, run.whole, self.world_size)
            flow.fixed, flow.refused = self.flow.fixed, dict(self.flow.refused)
            flow.ambiguous, flow.returned = self.flow.ambiguous, self.flow.returned
            other = found if run is self.runs[0] else flow.find()
            unlike = other.unlike(found)
            if unlike:
                return {}, {
                    layer: flow.refused.get(layer, "its attention is computed in ways that differ") for layer in unlike
                }
            numbers, mismatch = rehearse(run.twin, run.call, run.whole, other, numbers)
            if mismatch is not None:
                layers = _layers_at(run.whole, other, mismatch.step)
                way_out = _way_out(run.whole, other, mismatch.step)
                return {}, dict.fromkeys(layers, f"its code counts all of the features: {mismatch}{way_out}")
        return numbers, {}

    def _alone(self, found: Propagation) -> dict[str, str | Mapping]:
        entries: dict[str, str | Mapping] = {}
        for layer, node in {**self.called, **self.flow.lookups}.items():
            module = self.modules[layer]
            kind, (width, wide) = kind_of(module), sizes_of(module)
            if layer in self.flow.fixed or layer in self.kept:
                continue
            experts = is_experts(module)
            if self.prefix and kind != "nn.MultiheadAttention" and not experts:
                continue  # the caller of this part might use the layer's weights in another way
            if isinstance(module, nn.Embedding):
                reason = self._not_a_vocabulary(module, node.inputs[-1])
                entry: str | Mapping = self._rows_of(module)
            elif kind == "nn.MultiheadAttention":
                reason = self._not_by_heads(module)
                entry = "heads"
            elif experts:
                reason, entry = self._too_few_experts(module), "experts"
            elif kind in DENSE and self._scores(found, layer) and wide != width:
                reason = None if wide > width and wide >= self.world_size else f"{RETURNED}, and there are few of them"
                entry = GATHERED
            else:
                continue
            if reason is None:
                entries[layer] = entry
            else:
                self.kept[layer] = reason
        return entries

    def _gathered(self, found: Propagation, alone: dict) -> list[str]:
        """Add entries for large layers that stay whole otherwise; return their names.

        Such a layer takes and gives whole features. Each rank computes some of its outputs, and all are gathered. That
        is right in any surroundings. It costs a collective, so layers that have little of the model stay whole.
        """
        total = sum(module_size(module) for module in self.modules.values())
        sizes = Counter[str]()
        for name, module in self.modules.items():
            sizes[_numberless(name)] += module_size(module)
        layers = []
        for layer, node in self.called.items():
            module = self.modules[layer]
            if kind_of(module) not in SPLIT or node.inputs[0] in found.layouts or layer in alone:
                continue
            if layer not in found.refused or layer in self.flow.fixed or layer in self.kept:
                continue
            if getattr(module, "groups", 1) != 1 or sizes_of(module)[1] < self.world_size:
                continue
            if sizes[_numberless(layer)] >= _LARGE * total:
                alone[layer] = GATHERED
                layers.append(layer)
        return layers

    def _scores(self, found: Propagation, layer: str) -> bool:
        """Return whether an otherwise whole layer gives the model's output or is tied to an embedding."""
        tied = {owner for owners in self.flow.owners.values() if layer in owners for owner in owners}
        embedded = any(isinstance(self.modules[owner], nn.Embedding) for owner in tied)
        return found.refused.get(layer) == RETURNED or (layer in found.refused and embedded)

    def _rows_of(self, module: nn.Embedding) -> str:
        return "vocabulary" if type(module) is nn.Embedding else "lookup"

    def _not_a_vocabulary(self, module: nn.Embedding, tokens: Value) -> str | None:
        while tokens in self.made and self.made[tokens].op in _PASSED_ON:
            tokens = self.made[tokens].inputs[0]
        if not tokens.given:
            return "its rows are looked up by numbers that the model makes (positions, say), not by tokens"
        options = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
        if options:
            return f"it has {options[0]}={getattr(module, options[0])}"
        if module.num_embeddings < self.world_size:
            return f"{module.num_embeddings} rows are fewer than {self.world_size} ranks"
        return None

    def _not_by_heads(self, module: nn.MultiheadAttention) -> str | None:
        if module.num_heads < self.world_size:
            return f"{module.num_heads} heads are fewer than {self.world_size} ranks"
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds keys of its own (add_bias_kv, add_zero_attn)"
        return None

    def _too_few_experts(self, module: nn.Module) -> str | None:
        experts = next(module.parameters()).size(0)
        if experts >= self.world_size:
            return None
        few, inner = f"{experts} experts are fewer than {self.world_size} ranks", inner_of(module)
        if isinstance(inner, str):
            return f"{few}, and the intermediate dimension cannot be split: {inner}"
        return None if inner.size >= self.world_size else f"{few}, and so are the {inner.size} features inside of each"

    def _ties_hold(self, found: Propagation, alone: dict) -> bool:
        """Return whether shared weights are split alike. If not, note for the next pass not to split their layers."""
        hold = True
        for name, owners in self.flow.owners.items():
            if len(owners) == 1:
                continue
            layers = [owner for owner in owners if self._is_layer(owner)]
            alone |= self._uncalled(layers, alone)
            split = {owner for owner in layers if self._is_split(found, alone, owner)}
            alike = len(layers) == 1 or all(self._by_rows(found, alone, owner) for owner in layers)
            if split == set(layers) and alike and "" not in owners:
                # The other owners do not compute with the weight, or the flow would have fixed the layer.
                alone |= {owner: {"style": "attributes"} for owner in owners if owner not in layers and split}
                continue
            for owner in layers:
                others = ", ".join(other for other in owners if other != owner)
                reason = f"its {name.rpartition('.')[2]} is also that of {others}, which cannot be split so"
                if owner in alone:
                    self.kept[owner] = reason
                    hold = False
                elif owner in split:
                    self.flow.fixed[owner] = reason
                    hold = False
        return hold

    def _is_layer(self, name: str) -> bool:
        return known(self.modules[name]) is not None or isinstance(self.modules[name], nn.Embedding)

    def _uncalled(self, layers: list[str], alone: dict) -> dict[str, str]:
        """Return entries for embeddings that only share their weight with others (T5's) and are not called."""
        embeddings = [layer for layer in layers if isinstance(self.modules[layer], nn.Embedding)]
        if not any(alone.get(layer) in ("vocabulary", "lookup") for layer in embeddings):
            return {}
        idle = (layer for layer in embeddings if layer not in self.called and layer not in self.flow.lookups)
        kept = {*self.kept, *self.flow.fixed}
        return {layer: self._rows_of(self.modules[layer]) for layer in idle if layer not in kept}

    def _is_split(self, found: Propagation, alone: dict, owner: str) -> bool:
        return owner in alone or owner in found.rows or (owner in found.columns and owner not in found.refused)

    def _by_rows(self, found: Propagation, alone: dict, owner: str) -> bool:
        if owner in alone:
            return alone[owner] in ("vocabulary", "lookup", GATHERED)
        return owner in self.flow.returned and owner not in found.refused


def names_above(name: str) -> list[str]:
    """Return the names of the modules that a module is in, the innermost first, without the model's own."""
    return [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]


def module_size(module: nn.Module) -> int:
    """Return the number of elements of a module's own parameters."""
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _layers_at(whole: Trace, found: Propagation, step: int) -> set[str]:
    """Return the layers with features in the operation at this step; all column layers if there are none."""
    node = whole.nodes[min(step, len(whole.nodes) - 1)]
    values = [*node.inputs, *(value for value in node.outputs if value is not None)]
    layers = {found.layouts[value].axis.layer for value in values if value in found.layouts}
    return layers or set(found.columns)


def _way_out(whole: Trace, found: Propagation, step: int) -> str:
    """Suggest how to write a view so that it counts nothing."""
    node = whole.nodes[min(step, len(whole.nodes) - 1)]
    layout = found.layouts.get(node.outputs[0]) if node.op == "view" and node.outputs[0] is not None else None
    if layout is None:
        return ""
    shape = node.outputs[0].shape  # type: ignore[union-attr]
    return f"; write -1 instead of {shape[layout.dim]} in its view as {shape}"
