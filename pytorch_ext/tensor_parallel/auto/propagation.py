"""Propagation of split features through a trace: layers that can be split together, and reasons why others cannot."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from math import gcd

from torch import nn

from weft.nn.sharded import lost_with
from weft.sharding.quantized import uneven_groups
from weft.sharding.sizes import Heads, split_sizes
from weft.tensor_parallel.auto.axis_layout import Axis, AxisLayout, ConflictError
from weft.tensor_parallel.auto.layer_specs import known, sizes_of
from weft.tensor_parallel.auto.op_rules import AxisJoin, Layouts, UnknownOperationError, rule_of
from weft.tensor_parallel.auto.trace import ACTIVATION, Node, Trace, Value
from weft.tensor_parallel.peft_wrappers import inseparable
from weft.tensor_parallel.styles import kind_of
from weft.tensor_parallel.transformers_calls import is_transformers

CONVOLUTIONS = ("nn.Conv1d", "nn.Conv2d", "nn.Conv3d")
SPLIT = ("nn.Linear", "transformers.Conv1D", *CONVOLUTIONS)  # by columns and rows
# Norms that treat each channel, or each group of channels, alone.
NORMS = ("nn.GroupNorm", *(f"nn.{kind}Norm{space}d" for kind in ("Batch", "Instance") for space in (1, 2, 3)))
RETURNED = "the model returns its features"


@dataclass(eq=False)
class System:
    """Group of axes that meet, so their layers are cut alike.

    Attributes:
        units: number of units to distribute. If there are more ranks than KV heads, these are units of the fine axes,
            the query heads.
        kv_units: in that case the number of units of the coarse axes, the KV heads, which several ranks have; else 0.
        coarse: the coarse axes.
        copies: number of fine units that use one coarse unit.
    """

    units: int
    kv_units: int = 0
    coarse: set[Axis] = field(default_factory=set)
    copies: int = 1

    def shares(self, world: int) -> list[tuple[int, int]]:
        """Return each rank's number of units of fine and of coarse axes."""
        if not self.kv_units:
            return [(share, share) for share in split_sizes(self.units, world)]
        heads = Heads.held(self.units, self.kv_units, world)
        return [(count, len(keys)) for (_, count), keys in zip(heads.queries, heads.keys, strict=True)]

    def local(self, layout: AxisLayout, world: int) -> list[int]:
        """Return each rank's part of the layout's extent."""
        of_keys = layout.axis in self.coarse and layout.copies == 1
        units = self.kv_units if of_keys else self.units
        return [layout.extent // units * share[of_keys] for share in self.shares(world)]

    def cut(self, axis: Axis, size: int) -> dict:
        """Return the options of ParallelLinear for `size` features of the axis."""
        if not self.kv_units:
            return {"unit": size // self.units}
        units = self.kv_units if axis in self.coarse else self.units
        return {"unit": size // units, "heads": (self.units, self.kv_units)}


@dataclass
class Propagation:
    """Result of one pass over a trace.

    Attributes:
        layouts: tensor to the layout of its split features.
        columns: layer to the axis of its output features.
        rows: layer to the layout of its input.
        norms: norm, or convolution with groups, to the axis of its channels.
        systems: the System of each axis that is not divided into pieces.
        whole: layers that take and give whole features.
        refused: layer to the reason why its output is not split.
        summed: parameters that stay whole and have gradients that are summed over the ranks.
        met: pairs of axes that operations use together.
        shared: (query heads, KV heads) of attentions in which several query heads use each KV head.
    """

    world_size: int
    layouts: Layouts = field(default_factory=dict)
    columns: dict[str, Axis] = field(default_factory=dict)
    rows: dict[str, AxisLayout] = field(default_factory=dict)
    norms: dict[str, Axis] = field(default_factory=dict)
    systems: dict[Axis, System] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    met: list[tuple[Axis, Axis]] = field(default_factory=list)
    shared: list[tuple[Axis, Axis]] = field(default_factory=list)

    def local_size(self, axis: Axis) -> list[int]:
        """Return each rank's number of features of the axis."""
        if not axis.pieces:
            return self.systems[axis].local(AxisLayout(0, 1, axis.size, axis, 1), self.world_size)
        return [sum(sizes) for sizes in zip(*map(self.local_size, axis.leaves()), strict=True)]

    def unlike(self, other: "Propagation") -> set[str]:
        """Return the layers that `other` splits and that are whole or split differently here."""
        cuts = self._cuts()
        return {layer for layer, cut in other._cuts().items() if cuts.get(layer) != cut}

    def _cuts(self) -> dict[str, list]:
        kept = {layer: axis for layer, axis in self.columns.items() if layer not in self.refused}
        return {layer: [(leaf.size, self.local_size(leaf)) for leaf in axis.leaves()] for layer, axis in kept.items()}

    def local_shapes(self, value: Value) -> list[tuple[int, ...]]:
        """Return each rank's shape of a tensor."""
        layout = self.layouts.get(value)
        if layout is None:
            return [value.shape] * self.world_size
        dim, sizes = layout.dim, []
        if not layout.axis.pieces:
            sizes = [layout.before * extent for extent in self.systems[layout.axis].local(layout, self.world_size)]
        elif layout.axis.apart:
            leaf = layout.axis.leaves()[0]
            if layout.minor:
                dim = layout.minor[0][0]
                sizes = self.systems[leaf].local(AxisLayout(0, 1, value.shape[dim], leaf, 1), self.world_size)
            else:
                sizes = [layout.extent // layout.axis.size * size for size in self.local_size(layout.axis)]
        else:
            each = layout.axis.size // layout.extent  # features of a head
            sizes = [size // each for size in self.local_size(layout.axis)]
        shapes = [(*value.shape[:dim], size, *value.shape[dim + 1 :]) for size in sizes]
        return self._repeated(layout, shapes)

    def asides(self, trace: Trace) -> dict[str, dict[int, tuple[int, ...]]]:
        """Return the split outputs of each module that no operation uses afterwards.

        Returns:
            Module name to index in the returned tuple, to (split dimension, every rank's size).
        """
        found: dict[str, dict[int, tuple[int, ...]]] = {}
        for value, (name, place) in trace.aside.items():
            layout = self.layouts.get(value)
            if layout is not None and _stretches(layout):
                sizes = [shape[layout.dim] for shape in self.local_shapes(value)]
                if sum(sizes) == value.shape[layout.dim]:
                    found.setdefault(name, {})[place] = (layout.dim, *sizes)
        return found

    def _repeated(self, layout: AxisLayout, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the shapes with each rank's number of query heads per KV head, if KV heads were expanded for them."""
        system, next_to = self.systems.get(layout.axis), layout.dim + 1
        if system is None or layout.axis not in system.coarse or next_to not in layout.constant:
            return shapes
        if layout.copies != 1 or any(shape[next_to] != system.copies for shape in shapes):
            return shapes
        each = [fine // coarse for fine, coarse in system.shares(self.world_size)]
        return [(*shape[:next_to], n, *shape[next_to + 1 :]) for shape, n in zip(shapes, each, strict=True)]


class Flow:
    """Passes over a trace, repeated without the refused layers until a pass refuses none.

    Args:
        model: the model, or a copy of it without values.
        world: number of ranks.

    Attributes:
        owners: parameter to the modules that have it.
        elsewhere: layer to the use of its weights outside of its own forward.
        fixed: layer to the reason why it cannot be replaced.
        lookups: modules derived from nn.Embedding, to the operation that looks up their weight's rows.
        refused: layer to the reason why its output is not split.
        returned: layers with a split output that the model may return.
    """

    def __init__(self, model: nn.Module, trace: Trace, world: int):
        self.trace, self.world_size, self.returned = trace, world, frozenset[str]()
        self.modules = dict(model.named_modules())
        self.owners: dict[str, list[str]] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for owner, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(names[id(parameter)], []).append(owner)
        self.lookups: dict[str, Node] = {}
        self.elsewhere = self._elsewhere()
        self.fixed = self._hooked() | self.elsewhere | inseparable(model) | uneven_groups(model, world)
        self.refused: dict[str, str] = {}
        self.ambiguous = frozenset[str]()

    def refuse(self, layers, reason: str) -> None:
        for layer in layers:
            self.refused.setdefault(layer, reason)

    def allow_returned(self, layers: frozenset[str]) -> None:
        self.returned = layers
        for layer in layers:
            self.refused.pop(layer, None)

    def find(self) -> Propagation:
        while True:
            self.refused |= self.fixed
            found, failed = self._pass()
            if not failed:
                found.refused = dict(self.refused)
                return found
            axes = {layout.axis for layout in found.layouts.values()}
            ambiguous = {axis.layer for axis in axes if axis.ambiguous and axis.layer in failed} - self.ambiguous
            if ambiguous:
                self.ambiguous |= ambiguous
            else:
                self.refused |= {layer: reason for layer, reason in failed.items() if layer not in self.refused}

    def misuse(self, columns: Collection[str], rows: Collection[str]) -> tuple[str, str] | str | Propagation:
        """Follow a given plan: the features of its columns must reach its rows feature by feature.

        Results of an operation without a rule are not checked.

        Returns:
            The layer with misused features, and the misuse; or the name of a row layer that gets all features; or the
            Propagation if there is no misuse.
        """
        self.fixed = {name: "the plan leaves it whole" for name in self.modules if name not in {*columns, *rows}}
        self.refused = {**self.fixed, **dict.fromkeys(rows, "it is split by rows")}
        found, meeting, unknown = Propagation(self.world_size), AxisJoin(self.ambiguous), set[Value]()
        for node in self.trace.nodes:
            outputs = {value for value in node.outputs if value is not None}
            if node.layer in rows and not any(value in found.layouts or value in unknown for value in node.inputs):
                return node.layer
            if any(value in unknown for value in node.inputs):
                if node.layer not in {*columns, *rows}:  # the plan fixes the output of these layers
                    unknown |= outputs
                    continue
                if node.layer in rows:
                    continue
            try:
                layouts = self._after(node, found, meeting)
            except UnknownOperationError:
                unknown |= outputs
                continue
            except ConflictError as conflict:
                axes = [found.layouts[value].axis for value in node.inputs if value in found.layouts]
                axes += conflict.axes
                ambiguous = {axis.layer for axis in axes if axis.ambiguous} - self.ambiguous
                if ambiguous:
                    self.ambiguous |= ambiguous
                    return self.misuse(columns, rows)
                return axes[0].layer, str(conflict)
            found.layouts |= {
                value: layout
                for value, layout in zip(node.outputs, layouts, strict=False)
                if value is not None and layout is not None
            }
        found.met, found.shared = meeting.same, [(fine, coarse) for fine, coarse, _ in meeting.copied]
        return found

    def _hooked(self) -> dict[str, str]:
        layers = (item for item in self.modules.items() if any(True for _ in item[1].parameters(recurse=False)))
        lost = {name: lost_with(module) for name, module in layers}
        return {name: f"it has {hooks}, which its replacement would lose" for name, hooks in lost.items() if hooks}

    def _elsewhere(self) -> dict[str, str]:
        """Return layers with weights that are used outside of their own forward. Note custom embeddings' lookups."""
        refused: dict[str, str] = {}
        for node in self.trace.nodes:
            if self._is_lookup(node):
                self.lookups[node.where] = node
                continue
            for value in node.inputs:
                for parameter in value.origin or ():
                    for owner in self.owners.get(parameter, ()):
                        if known(self.modules[owner]) is not None or isinstance(self.modules[owner], nn.Embedding):
                            used = f"its weight is also used by {node.op} in {node.where or 'the model'}"
                            refused.setdefault(owner, used)
        return refused

    def _is_lookup(self, node: Node) -> bool:
        module = self.modules[node.where]
        if node.op != "embedding" or not isinstance(module, nn.Embedding) or type(module) is nn.Embedding:
            return False
        return any(node.where in self.owners[name] for name in node.inputs[0].origin or ())

    def _pass(self) -> tuple[Propagation, dict[str, str]]:
        found, meeting = Propagation(self.world_size), AxisJoin(self.ambiguous)
        failed: dict[str, str] = {}

        def fail(values, reason):
            for value in values:
                if value in found.layouts:
                    failed.setdefault(found.layouts[value].axis.layer, reason)

        for node in self.trace.nodes:
            try:
                layouts = self._after(node, found, meeting)
            except ConflictError as conflict:
                fail(node.inputs, str(conflict))
                for axis in conflict.axes:
                    failed.setdefault(axis.layer, str(conflict))
                continue
            for value, layout in zip(node.outputs, layouts, strict=False):
                if value is not None and layout is not None:
                    found.layouts[value] = layout
        made_whole = is_transformers(self.modules[""])  # by gather_outputs.py; other models may be cut into stages
        for value in self.trace.outputs:
            layout = found.layouts.get(value)
            if layout is None or (made_whole and value in self.trace.aside and _stretches(layout)):
                continue
            if not (layout.axis.layer in self.returned and layout.raw):
                fail([value], RETURNED)
        self._solve(found, meeting, failed)
        return found, failed

    def _after(self, node: Node, found: Propagation, meeting: AxisJoin) -> list[AxisLayout | None]:
        """Return the layouts of a node's outputs."""
        layouts = found.layouts
        if node.op == "layer" and kind_of(self.modules[node.layer]) in SPLIT:
            return self._layer(node, found, meeting)
        if node.op == "layer" and kind_of(self.modules[node.layer]) in NORMS:
            return self._by_channels(node, found)
        if not any(value in layouts for value in node.inputs):
            return []
        if node.op in ("layer", "closed"):
            raise ConflictError(f"{node.layer} takes them whole")
        return rule_of(node)(node, layouts, meeting)

    def _layer(self, node: Node, found: Propagation, meeting: AxisJoin) -> list[AxisLayout | None]:
        name, value = node.layer, node.inputs[0]
        layer = self.modules[name]
        kind = known(layer)
        assert kind is not None  # the trace goes into unknown modules
        dim = kind.features
        layout = found.layouts.get(value)
        if getattr(layer, "groups", 1) != 1:
            self.refused.setdefault(name, "it has groups")
            return self._by_channels(node, found)
        if layout is None:
            if name in found.rows:
                raise ConflictError(f"{name} is called with split and with whole features", [found.rows[name].axis])
            if name in self.refused:
                found.whole.add(name)
                return []
            axis = found.columns.setdefault(name, Axis(name, 0, sizes_of(layer)[1]))
            return [AxisLayout(dim % len(node.output.shape), 1, axis.size, axis, axis.size)]
        if name in found.columns:
            raise ConflictError(f"{name} is called with split and with whole features", [found.columns[name]])
        if name in found.whole:
            raise ConflictError(f"{name} is called with split and with whole features")
        if layout.dim != dim % len(value.shape) or layout.before != 1:
            raise ConflictError(f"{name} takes something else than its features split")
        if name in self.fixed:
            raise ConflictError(f"{name} takes them, and {self.fixed[name]}")
        layout.use()
        before = found.rows.setdefault(name, layout)
        if before is not layout:
            first, second = (AxisLayout(0, 1, x.extent, x.axis, x.units, x.copies) for x in (before, layout))
            meeting.join(first, second, name)
        return []

    def _by_channels(self, node: Node, found: Propagation) -> list[AxisLayout | None]:
        """Follow a norm or a convolution that treats each of its groups of channels alone."""
        name, value = node.layer, node.inputs[0]
        layer, layout = self.modules[name], found.layouts.get(value)
        if layout is None:
            found.whole.add(name)
            if name in found.norms:
                raise ConflictError(f"{name} is called with split and with whole channels", [found.norms[name]])
            return []
        kind = known(layer)
        assert kind is not None  # the trace goes into unknown modules
        channels, out = kind.sizes(layer)
        groups = getattr(layer, "groups", getattr(layer, "num_groups", channels))
        if name in found.whole:
            raise ConflictError(f"{name} is called with split and with whole channels")
        if layout.dim != kind.features % len(value.shape) or not layout.raw or name in self.fixed:
            raise ConflictError(f"{name} takes something else than its channels split")
        if channels != out:
            raise ConflictError(f"{name} has groups that give other channels than they take")
        if found.norms.setdefault(name, layout.axis) is not layout.axis:
            raise ConflictError(f"{name} is called with the channels of several layers")
        after = layout.use()
        return [replace(after, units=gcd(after.units, groups))]

    def _solve(self, found: Propagation, meeting: AxisJoin, failed: dict[str, str]) -> None:
        """Give a System to each group of axes that meet, or record why the group fails."""
        leaves: dict[str, list[Axis]] = {}
        for layer, axis in found.columns.items():
            try:
                leaves[layer] = axis.leaves()
            except ValueError as error:
                failed.setdefault(layer, str(error))
                leaves[layer] = [axis]
            if len(leaves[layer]) > 1 and self._is_convolution(layer):
                failed.setdefault(layer, "pieces of its channels are used apart")
        groups = _joined(
            [(one, other) for one, other, _ in meeting.copied] + meeting.same, list(chain(*leaves.values()))
        )
        ends = {layout.axis for layout in found.rows.values()}
        for group in groups:
            layers = {axis.layer for axis in group}
            reason = next((failed[layer] for layer in sorted(layers) if layer in failed), None)
            if reason is None and not group & ends and not layers <= self.returned:
                reason = "no layer takes its features split"
            if reason is None:
                reason = self._units(found, group, meeting)
            if reason is not None:
                for layer in layers:
                    failed.setdefault(layer, reason)
            else:
                related = {other for axis in group for other in self._related(found, axis)}
                found.summed |= {name for axis in related for name in axis.summed}
        if not failed:
            self._check_pieces(found, leaves, failed)
            self._check_summed(found, failed)

    def _units(self, found: Propagation, group: set[Axis], meeting: AxisJoin) -> str | None:
        """Give the group its System; return the reason if there is none."""
        units = gcd(*(axis.units for axis in group))
        system = System(units)
        if units < self.world_size:
            heads = _heads(group, meeting)
            ends = [layout.axis for layout in found.rows.values()] + list(found.norms.values())
            layers = {axis.layer for axis in group} | {row for row, one in found.rows.items() if one.axis in group}
            if heads is not None and (heads.coarse & set(ends) or any(map(self._is_convolution, layers))):
                heads = None  # features on several ranks would count several times
            if heads is None or heads.units < self.world_size:
                most, layer = units if heads is None else heads.units, min(axis.layer for axis in group)
                counted = f"{most} unit{'s' * (most != 1)} ({layer}: {sizes_of(self.modules[layer])[1]} features)"
                return f"{counted} are fewer than {self.world_size} ranks"
            system = heads
        for axis in group:
            found.systems[axis] = system
        return None

    def _is_convolution(self, layer: str) -> bool:
        return kind_of(self.modules[layer]) in CONVOLUTIONS

    def _check_pieces(self, found: Propagation, leaves: Mapping[str, list[Axis]], failed: dict[str, str]) -> None:
        """Check that all pieces of a fused layer are heads of one attention, or none is."""
        for layer, pieces in leaves.items():
            kinds = {(found.systems[piece].kv_units, found.systems[piece].units) for piece in pieces}
            if len(kinds) > 1 and any(kv_units for kv_units, _ in kinds):
                failed[layer] = "its pieces are of attentions with different heads"

    def _check_summed(self, found: Propagation, failed: dict[str, str]) -> None:
        """Check that a summed parameter has no other use, and that all parameters of its module are summed."""
        for name in found.summed:
            reason = None
            for owner in self.owners[name]:
                inside = f"{owner}." if owner else ""
                others = {n for n, owners in self.owners.items() if any(f"{o}.".startswith(inside) for o in owners)}
                if not others <= found.summed:
                    reason = f"{name} meets its features, and {owner} has other parameters too"
            for node in self.trace.nodes:
                met = any(value.origin and name in value.origin for value in node.inputs)
                if met and any(
                    v is not None and v.origin is ACTIVATION and v not in found.layouts for v in node.outputs
                ):
                    reason = f"{name} meets its features, and others that are whole"
            if reason:
                for axis in found.systems:
                    if any(name in other.summed for other in self._related(found, axis)):
                        failed.setdefault(axis.layer, reason)

    def _related(self, found: Propagation, axis: Axis) -> set[Axis]:
        return {layout.axis for layout in found.layouts.values() if layout.axis.layer == axis.layer}


def _stretches(layout: AxisLayout) -> bool:
    """Return whether the ranks' parts, one after another, are the whole dimension."""
    return layout.before == 1 and not layout.axis.pieces


def _joined(pairs, members) -> list[set[Axis]]:
    """Return the groups of members that pairs connect. Members of one layer may be in different groups."""
    groups = {member: {member} for member in members}
    for one, other in pairs:
        first, second = groups.setdefault(one, {one}), groups.setdefault(other, {other})
        if first is not second:
            first |= second
            for member in second:
                groups[member] = first
    distinct: list[set[Axis]] = []
    for group in groups.values():
        if not any(group is other for other in distinct):
            distinct.append(group)
    return distinct


def _heads(group: set[Axis], meeting: AxisJoin) -> System | None:
    """Return the System for query heads over more ranks than KV heads; None if the axes also have other uses."""
    links = [link for link in meeting.copied if link[0] in group]
    each = {n for *_, n in links}
    fine, coarse = {one for one, _, _ in links}, {other for _, other, _ in links}
    if len(each) != 1:
        return None
    alike = _joined([pair for pair in meeting.same if pair[0] in group], list(group))
    for axes in alike:
        if axes & fine:
            fine |= axes
        if axes & coarse:
            coarse |= axes
    if fine & coarse or fine | coarse != group:
        return None
    (copies,) = each
    kv_units = gcd(*(axis.units for axis in coarse))
    units = kv_units * copies
    if any(axis.units % units for axis in fine):
        return None
    return System(units, kv_units, coarse, copies)
