"""A stage with its own random numbers, and with shared tensors if the model shares its sequence.

Such a stage sends this rank's parts to the next stage, with marks that name the sequence dimension. The next stage is
on the same rank of "cp" and makes shared tensors of them again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from weft.context_parallel.region import SharedCall, agreed, leave
from weft.context_parallel.shared_sequence import (
    SequenceCut,
    SharedSequence,
    Sharing,
    refuse_results_of_custom_functions,
    without_guards,
)
from weft.forward.running import followed
from weft.pipeline.stage_boundary import received, to_send
from weft.rng import UnitDraws, random_numbers_of

_PRIME = 1_000_003  # keeps the seeds of stages and of calls apart


@dataclass(frozen=True)
class Mark:
    """Mark of a value between stages: this rank has its part along `axis`; blocks and region as in SequenceCut."""

    axis: int
    blocks: int
    region: tuple[int, int] | None


Marks = tuple[Mark | None, ...]


class Stage(nn.Module):
    """One stage of a model.

    Attributes:
        arriving: marks of the values from the stage before; the caller sets them.
        leaving: marks of the values that this stage sends.
        microbatch: number of the micro-batch; the caller sets it.
        watched: watched(name) is a context around the layers.
        around: returns a context for each forward, as the whole model's forward has it.
        first_unit: number of the first micro-batch's unit, with `invariant`.
    """

    watched: Callable[[str], AbstractContextManager] = nullcontext
    around: Callable[[], AbstractContextManager] = nullcontext
    first_unit: int | None = None

    def __init__(self, stage: fx.GraphModule, number: int, total: int):
        super().__init__()
        self.stage, self.number, self.last = stage, number, number + 1 == total
        self.arriving: Marks = ()
        self.leaving: Marks = ()
        self.microbatch = 0
        # A tuple, so that they are not registered again. Their containers belong to the trace, and their `training` is
        # not the model's.
        names = [str(node.target) for node in stage.graph.nodes if node.op == "call_module"]
        self._called = tuple(stage.get_submodule(name) for name in names)
        self._begun: tuple[SharedCall | None, int] = (None, 0)
        self._trains = False

    def begin(self, call: SharedCall | None, seed: int) -> None:
        """Prepare for the forwards of a batch."""
        self._begun = call, seed
        self._trains = any(part.training for module in self._called for part in module.modules())

    def forward(self, *values):
        call, seed = self._begun
        device = next((x.device for x in values if isinstance(x, torch.Tensor)), torch.device("cpu"))
        own = random_numbers_of((seed + _PRIME * self.number + self.microbatch) % 2**63, device)
        named = f"a layer of stage {self.number}"
        draws = nullcontext() if self.first_unit is None else UnitDraws(seed + self.first_unit + self.microbatch)
        follows = call is not None or self.first_unit is not None  # notes and draws go by the running module
        with (
            own if self._trains else nullcontext(),
            followed(self.stage) if follows else nullcontext(),
            draws,
            self.around(),
            self.watched(named),
        ):
            if call is None:
                return self.stage(*values)
            output = self.stage(*(call.enter(values) if self.number == 0 else self._shared(values, call)))
        return leave(output, call.sharing) if self.last else self._parts(output)

    def _shared(self, values, call: SharedCall):
        cut = SequenceCut(call.sharing, call.layout)
        return [
            x if mark is None else received(x, mark.axis, replace(cut, blocks=mark.blocks, region=mark.region))
            for x, mark in zip(values, self.arriving, strict=True)
        ]

    def _parts(self, output: tuple) -> tuple[torch.Tensor, ...]:
        refuse_results_of_custom_functions(output)
        self.leaving = tuple(
            Mark(x.axis, x.cut.blocks, x.cut.region) if isinstance(x, SharedSequence) else None for x in output
        )
        return without_guards(tuple(to_send(x) if isinstance(x, SharedSequence) else x for x in output))


def begin(caller: str, sharing: Sharing | None, inputs, alike=None) -> tuple[SharedCall | None, int]:
    """Return the arguments of `Stage.begin` for a batch. A collective call if the sequence is shared."""
    if sharing is None:
        return None, int(torch.randint(2**62, (1,)))
    call = agreed(caller, sharing, inputs, alike)
    return call, call.seed
