"""The stages of a model that run its own forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from weft.forward.running import followed
from weft.invariant.exact_functions import draws_of_units
from weft.invariant.unit_outputs import tensors_of
from weft.pipeline.absent import Absent, AbsentValueError
from weft.pipeline.forward_cut import ForwardCut
from weft.pipeline.forward_plan import Call, ForwardPlan
from weft.pipeline.recording import CallRecording
from weft.pipeline.stage_forward import StageForward
from weft.pipeline.stage_params import HeldLayers, slots_of

_PRIME = 1_000_003  # keeps the seeds of micro-batches apart
_APART = 7_368_787  # and those of stages, where the code between layers draws nothing


@contextmanager
def outside_of_inference(tree: Any) -> Iterator[Any]:
    """Compute without gradients inside of torch.inference_mode, whose tensors do not show that they were written to.

    Yields:
        The tree, with copies of the tensors of inference_mode.
    """
    if not torch.is_inference_mode_enabled():
        yield tree
        return
    with torch.inference_mode(False), torch.no_grad():
        yield tree_map_only(torch.Tensor, lambda x: x.clone() if x.is_inference() else x, tree)


class ModelStage(HeldLayers):
    """One stage of a pipeline.

    Args:
        layers: the layers of this stage.
        outside: (module, name) of the other parameters and buffers that it uses.
        loss: loss(output, targets) -> scalar; None is the model's own.

    Attributes:
        microbatch: number of the micro-batch; the caller sets it.
        first_unit: number of the first micro-batch's unit, with `invariant`.
    """

    first_unit: int | None = None

    def __init__(self, cut: ForwardCut, number: int, last: bool, layers: Sequence[nn.Module], outside, loss):
        super().__init__(layers, outside)
        self.number, self.last = number, last
        self.microbatch = 0
        self._cut, self._loss = cut, loss
        self._batch: tuple[list[Call], Sequence, int] = [], (), 0
        self._plan: ForwardPlan | None = None

    def begin(self, inputs: list[Call], targets: Sequence, seed: int) -> None:
        """Prepare for the forwards of a batch, given by micro-batch."""
        self._batch = inputs, targets, seed

    def follow(self, plan: ForwardPlan) -> None:
        """Run by this plan from now on."""
        if plan is self._plan:
            return
        self._plan = plan
        self._arriving = plan.leaving(self.number - 1) if self.number else []
        self._leaving = [] if self.last else plan.leaving(self.number)

    def forward(self, *values: torch.Tensor):
        """Run the stage on micro-batch `self.microbatch`; return the loss, or the values for the next stage."""
        plan, shared = self._plan, self._cut.shared
        assert plan is not None
        known = {root: plan.made(root).arrived(x, shared) for root, x in zip(self._arriving, values, strict=False)}
        run = StageForward(self._cut, self.number, plan, known, self._leaving)
        loss = self.run(run, self.microbatch)
        run.finish()
        if type(loss) is Absent:
            raise AbsentValueError(loss.origins, "the loss needs values of another stage")
        return loss if self.last else run.leaving()

    def run(self, run: StageForward, microbatch: int) -> torch.Tensor | None:
        """Run the model's forward on a micro-batch; return the loss on the last stage."""
        cut, first = self._cut, self.first_unit
        inputs, _, begun = self._batch
        seed = (begun + _PRIME * microbatch + (0 if cut.draws else _APART * self.number)) % 2**63
        if first is None:
            output = cut.forward(run, inputs[microbatch], seed)
        else:
            with followed(cut.model), draws_of_units(begun + first + microbatch):
                output = cut.forward(run, inputs[microbatch], seed)
        if not self.last or run.ended:
            return None
        with run.following():
            return self.loss_of(output, microbatch)

    def loss_of(self, output: Any, microbatch: int) -> torch.Tensor:
        """Return the loss of a micro-batch.

        Raises:
            ValueError: the model returns no loss of its own.
        """
        if self._loss is not None:
            loss = self._loss(output, self._batch[1][microbatch])
        else:
            loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", None)
            if loss is None:  # the only scalar, of (logits, loss), say
                scalars = [x for x in tensors_of(output) if x.dim() == 0 and x.is_floating_point()]
                loss = scalars[0] if len(scalars) == 1 else None
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise ValueError(
                f"Pipeline: the model returns {type(output).__name__} without a scalar loss: give it labels "
                "(step({..., 'labels': labels})), or pass loss="
            )
        return loss


def stages_of(cut: ForwardCut, total: int, recording: CallRecording, loss) -> list[ModelStage]:
    """Return the stages of all ranks.

    A stage has the layers that it calls. A tensor that the code outside of layers uses is on every stage that needs its
    value; one that the recording did not use is on all stages. Layers that were not called are on the last stage.
    """
    calls: list[list[str]] = [[] for _ in range(total)]
    for name, stage in zip(cut.names, cut.stages, strict=True):
        calls[stage].append(name)
    for name, numbers in recording.nested.items():
        for number in numbers:
            calls[cut.stages[number]].append(name)
    called, used = set().union(*calls), set().union(*recording.uses)
    calls[-1] += [
        name
        for name, layer in cut.layers.items()
        if name not in called and not used.issuperset(map(id, [*layer.parameters(), *layer.buffers()]))
    ]
    unused = {id(x) for *_, x in slots_of(cut.model)} - set(map(id, _inside(cut))) - used
    return [
        ModelStage(
            cut,
            stage,
            stage + 1 == total,
            [cut.layers[name] for name in dict.fromkeys(calls[stage])],
            [(module, name) for module, _, name, x in slots_of(cut.model) if id(x) in unused | uses],
            loss,
        )
        for stage, uses in enumerate(recording.uses or [set()] * total)
    ]


def _inside(cut: ForwardCut) -> Iterator[torch.Tensor]:
    for layer in cut.layers.values():
        yield from layer.parameters()
        yield from layer.buffers()
