"""The order in which a model's own forward calls its layers, and what each stage uses outside of them.

One call of the whole model gives the order. When the stages are known, a rehearsal of each finds the parameters and
buffers whose values the code between layers needs there; layers do not run again for it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from weft.pipeline.absent import Absent, blank, like
from weft.pipeline.balance import LayerCost, measured, undisturbed
from weft.pipeline.forward_cut import CutLayer, ForwardCut, UncuttableError
from weft.pipeline.forward_plan import Call, LayerResult, Root, layer_root, result_of
from weft.pipeline.stage_forward import StageTrial
from weft.pipeline.stage_params import restored_slots
from weft.pipeline.transfers import AllHere
from weft.pipeline.walk import walk


class CallRecording:
    """A forward of the whole model that notes the order of its layers.

    Attributes:
        names: of each call.
        results: structure of the result of each call, by its number.
        values: their parts; zeros for tensors of a model on the meta device.
        costs: of each call, if they were asked for.
        nested: calls in which a layer ran inside of another, by its name.
        uses: for each stage the ids of the parameters and buffers whose values the code between layers needs.
    """

    inside: CutLayer | None = None
    ended = follows = False

    def __init__(self, measure: bool = False) -> None:
        self.measure = measure
        self.names: list[str] = []
        self.results: dict[int, LayerResult] = {}
        self.values: dict[Root, Any] = {}
        self.costs: list[LayerCost] = []
        self.nested: dict[str, set[int]] = {}
        self.uses: list[set[int]] = []

    def started(self) -> None:
        """Note that the model's forward begins."""

    def enter_nested(self, layer: CutLayer) -> None:
        self.nested.setdefault(layer.name, set()).add(len(self.names) - 1)

    def call(self, layer: CutLayer, forward: Callable, args, kwargs):
        number, arguments = len(self.names), tree_leaves((args, kwargs))
        self.names.append(layer.name)
        self.inside = layer
        try:
            if self.measure:
                result, seconds, saved = measured(layer.layer, forward, args, kwargs)
                self.costs.append(LayerCost(seconds, saved))
            else:
                result = forward(*args, **kwargs)
        finally:
            self.inside = None
        parts, structure = tree_flatten(result)
        self.results[number] = result_of(parts, structure, arguments)
        for place, x in enumerate(parts):
            x = blank(x) if isinstance(x, Absent) else x
            self.values[layer_root(number, place)] = x.clone() if isinstance(x, torch.Tensor) else x
        return result


def recorded(cut: ForwardCut, inputs: Call, measure: bool = False) -> CallRecording:
    """Run the whole model once, without gradients, and note the order of its layers.

    Raises:
        UncuttableError: its code keeps a count of its calls.
    """
    run, before = CallRecording(measure), cut.numbers()
    with undisturbed(cut.model), torch.no_grad(), restored_slots(cut.model) as slots:
        for _, tensors, name, x in slots:
            if x.is_meta:  # which could not meet inputs with values
                tensors[name] = like(x, name, cut.device)
        cut.forward(run, inputs)
    for (module, attribute), value in cut.numbers().items():
        old = before.get((module, attribute), getattr(type(module), attribute, value))
        if value != old:
            setattr(module, attribute, old)
            raise UncuttableError(
                f"{cut.caller}: the forward of {type(cut.model).__name__} changes {attribute} outside of its layers, "
                "and every stage would count its own calls; make that a module of its own"
            )
    return run


class _StageRehearsal(StageTrial):
    """A trial of a stage whose layers ran in a recording, and that has weights when they are asked for.

    Args:
        weights: tensor and places of each parameter and buffer, by name.
    """

    def __init__(
        self, recording: CallRecording, weights: dict[str, tuple[torch.Tensor, list]], cut, stage, plan, known, _
    ):
        known |= {root: x for root, x in recording.values.items() if cut.stages[root[0][0]] == stage}
        super().__init__(cut, stage, plan, known, recording.results)
        self._weights, self._uses = weights, recording.uses[stage]
        for name, (x, places) in weights.items():
            value = x
            if id(x) not in self._uses:
                value = like(x, name, self.cut.device)
            elif x.is_meta:
                value = torch.zeros((), dtype=x.dtype, device=self.cut.device).expand(x.shape)
            for tensors, own in places:
                tensors[own] = value

    def gives(self, origin) -> bool:
        x, _ = self._weights[origin]
        new = id(x) not in self._uses
        self._uses.add(id(x))
        return new


def rehearse(cut: ForwardCut, stages: int, inputs: Call, recording: CallRecording) -> None:
    """Note in the recording what each stage uses outside of layers."""
    names = {id(x): name for name, x in [*cut.model.named_parameters(), *cut.model.named_buffers()]}
    weights: dict[str, tuple[torch.Tensor, list]] = {}
    recording.uses = [set() for _ in range(stages)]
    with undisturbed(cut.model), restored_slots(cut.model) as slots, torch.enable_grad():  # as in a step
        for _, tensors, own, x in slots:
            weights.setdefault(names[id(x)], (x, []))[1].append((tensors, own))
        walk(cut, lambda run: cut.forward(run, inputs), AllHere(), partial(_StageRehearsal, recording, weights))
