"""Checks that each layer of a plan gives the part that the next one takes, by following the model."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from weft.nn import OwnDropout2d, ParallelEmbedding, ParallelLinear, ParallelMultiheadAttention, ShardedDropout
from weft.nn.sharded import ShardedModule
from weft.tensor_parallel.auto.example_inputs import calls
from weft.tensor_parallel.auto.propagation import Flow, Propagation
from weft.tensor_parallel.auto.trace import Trace, trace, without_values
from weft.tensor_parallel.local_sizes import draws_for_parts, has_numbers
from weft.tensor_parallel.transformers_calls import attentions, prepare

_log = logging.getLogger(__name__)
_FOLLOWED = (ParallelLinear, ParallelEmbedding, ParallelMultiheadAttention, ShardedDropout, OwnDropout2d)


@dataclass(frozen=True)
class OwnPlan:
    """User's plan of a model, in the form that the analysis of automatic plans can follow.

    Attributes:
        columns: layers that give each rank a part of their features, to the parts of a fused projection.
        rows: layers that take such a part.
        sizes: each of these layers to the numbers of split features on the ranks.
        summed: modules with gradients that are summed over the ranks.
        drops: modules whose random numbers differ between parts; None if they are not checked.
    """

    world_size: int
    columns: Mapping[str, tuple[int, ...] | None]
    rows: Collection[str]
    sizes: Mapping[str, Sequence[int]]
    summed: Collection[str]
    drops: Collection[str] | None = None

    def misuse(self, model: nn.Module, tries: Iterable[Callable], training: bool) -> str | None:
        """Describe the mistake in the plan, found in the first call that runs; None if there is no mistake.

        Args:
            model: the unsplit model. It is not changed and may be on the meta device.
            tries: calls to try, in order.
            training: whether to follow training or evaluation.
        """
        try:
            twin = without_values(model, training)
            prepare(twin, attentions(model)[0])
        except Exception as error:  # copying a user's objects may raise anything
            _log.debug("the plan is not followed: %s", error)
            return None
        for call in tries:
            try:
                whole = trace(twin, call, {})
                flow = Flow(twin, whole, self.world_size)
                found = flow.misuse(self.columns, self.rows)
            except Exception as error:  # the model's code may raise, and so may a rule on unexpected arguments
                _log.debug("the plan is not followed in a call: %s", error)
                continue
            if isinstance(found, str):
                return (
                    f"parallelize: {found} is a row layer, which takes a part of its input features, and gets all of "
                    'them: split the layer before it by columns, or say {"style": "row", "split_input": True}'
                )
            if isinstance(found, Propagation):
                misuse = self._of_pieces(found) or self._of_units(found) or self._of_sums(twin, flow, found)
                return self._message(*misuse) if misuse else self._of_drops(whole, found)
            return self._message(*found)
        return None

    def _of_drops(self, whole: Trace, found: Propagation) -> str | None:
        if self.drops is None:
            return None
        for node in whole.nodes:
            split = [found.layouts[value].axis.layer for value in node.inputs if value in found.layouts]
            if node.drops and split and node.where not in self.drops:
                style = '"dropout"' if node.op == "dropout" else '{"style": "attributes", "own_random_numbers": True}'
                return (
                    f"parallelize: {node.where or 'the model'} drops elements of a part of {split[0]}, and would "
                    f"drop others on another number of ranks: make it {style} (docs/tensor_parallel.md)"
                )
        return None

    def _of_pieces(self, found: Propagation) -> tuple[str, str] | None:
        for layer, axis in found.columns.items():
            try:
                sizes = [leaf.size for leaf in axis.leaves()]
            except ValueError as error:
                if self.columns[layer] is None:
                    return layer, str(error)
                continue
            ends = set(accumulate(self.columns[layer] or [axis.size]))
            if not ends >= set(accumulate(sizes)):
                return layer, f'the model takes pieces of {sizes} features of it: say "parts": {tuple(sizes)}'
        return None

    def _of_units(self, found: Propagation) -> tuple[str, str] | None:
        for row, layout in found.rows.items():
            column = layout.axis.layer
            given, taken = self.sizes.get(column, ()), self.sizes.get(row, ())
            if self.columns.get(column) is None and sum(given) == sum(taken) and given != taken:
                text = (
                    f"{row} takes {list(taken)} of them on the ranks, which have {list(given)}: give both the same unit"
                )
                return column, text
        return None

    def _of_sums(self, twin: nn.Module, flow: Flow, found: Propagation) -> tuple[str, str] | None:
        for layout in found.layouts.values():
            for name in layout.axis.summed:
                owners = [f"{owner}." for owner in flow.owners[name]]
                prefixes = [f"{module}." if module else "" for module in self.summed]
                summed = any(owner.startswith(prefix) for owner in owners for prefix in prefixes)
                if twin.get_parameter(name).requires_grad and not summed:
                    module = name.rpartition(".")[0] or "the model"
                    misuse = (
                        f'{name} meets them, and its gradient would be a part: make {module} "sequence", which sums it'
                    )
                    return layout.axis.layer, misuse
        return None

    def _message(self, layer: str, misuse: str) -> str:
        return (
            f"parallelize: {layer} gives each rank a part of its output features, and {misuse}. Otherwise let it give "
            'all of them, {"style": "column", "gather_output": True} (a row layer behind it then takes "split_input": '
            "True), or leave it whole"
        )


def own_plan(
    model: nn.Module, replacements: Mapping[str, nn.Module], summed: Collection[str], world: int, in_units: bool = False
) -> OwnPlan | None:
    """Return the plan in a form to follow; None if nothing can be wrong, or if some layers' splits cannot be followed.

    Args:
        model: the unsplit model.
        replacements: the split layers, by the name of the layer that they replace.
        summed: modules with gradients that are summed over the ranks.
        world: number of ranks that split the layers.
        in_units: check that what drops parts does so in units.
    """
    linear = {name: layer for name, layer in replacements.items() if isinstance(layer, ParallelLinear)}
    columns = {
        name: None if layer.parts is None else tuple(layer.parts)
        for name, layer in linear.items()
        if layer.style == "column" and not layer.gather_output
    }
    first = {id(module): name for name, module in model.named_modules()}
    names = set(first.values())
    rows = [name for name, layer in linear.items() if layer.style == "row" and not layer.split_input and name in names]
    everywhere = all(first[id(model.get_submodule(name))] in replacements for name in replacements)
    followed = all(isinstance(layer, _FOLLOWED) or has_numbers(layer) for layer in replacements.values())
    if world == 1 or not (columns or rows) or not everywhere or not followed:
        return None
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        return None  # such a module communicates
    drops = [name for name, layer in replacements.items() if draws_for_parts(layer)] if in_units else None
    columns = {name: parts for name, parts in columns.items() if name in names}
    sizes = {name: linear[name].shards["weight"].sizes for name in (*columns, *rows)}
    return OwnPlan(world, columns, rows, sizes, summed, drops)


def check_flow(model: nn.Module, plan: OwnPlan | None) -> None:
    """Check that the layers of a plan fit together, if a call of the model can be guessed.

    Raises:
        ValueError: they do not.
    """
    if plan is not None and (misuse := plan.misuse(model, calls(model, constants=True), model.training)):
        raise ValueError(misuse)
