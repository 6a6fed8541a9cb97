"""Start and end of each action of a step: torch's pipeline stage with a clock."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from weft.data_parallel.reducer import Reducer
from weft.pipeline.split_backward import can_be_halved
from weft.pipeline.unit_gradients import UnitGradients


@dataclass(frozen=True)
class Action:
    """One computation of one stage on one micro-batch.

    Attributes:
        kind: "F" forward, "B" backward, or one of its two halves: "I" for the inputs, "W" for the weights.
        start, end: in seconds.
    """

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float

    @property
    def name(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class StageClock:
    """Time marks: of the host, or on CUDA of the device (events, which are read only on request).

    Attributes:
        runs: whether the step under way is measured.
    """

    def __init__(self, device: torch.device):
        self.on_cuda, self.runs = device.type == "cuda", False
        self.start()

    def start(self) -> None:
        """Forget the marks; times count from now on."""
        self.marks: list[tuple[int, str, int, Any, Any]] = []  # stage, kind, micro-batch, start, end
        self.origin = self.now()

    def now(self):
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def extend(self) -> None:
        """Move the end of the last action to now."""
        if not self.runs:
            return
        stage, kind, microbatch, start, _ = self.marks[-1]
        self.marks[-1] = (stage, kind, microbatch, start, self.now())

    def actions(self, rank: int) -> list[Action]:
        """Return the actions since the start."""
        return [
            Action(rank, stage, kind, microbatch, self._seconds(start), self._seconds(end))
            for stage, kind, microbatch, start, end in self.marks
        ]

    def _seconds(self, mark) -> float:
        if not self.on_cuda:
            return mark - self.origin
        mark.synchronize()
        return self.origin.elapsed_time(mark) / 1e3


class ClockedStage(PipelineStage):
    """PipelineStage that leaves marks on a clock, and halves a backward only if torch can.

    Attributes:
        gradients: takes the gradients of each micro-batch, with `invariant`.
        reducer: reduces gradients over "dp" from the last backward on; None without "dp".
        backwards_left: number of backwards in the step under way.
    """

    clock: StageClock
    gradients: UnitGradients | None = None
    reducer: Reducer | None = None
    backwards_left = 0
    halves_checked = False

    def forward_one_chunk(self, fwd_chunk_id, *arguments, **options):
        start = self._now()
        self.submod.microbatch = fwd_chunk_id
        if self.gradients is None:
            result = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        else:
            with self.gradients.within(fwd_chunk_id):
                result = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
            self.gradients.watch(self.stage_index, *self._kept(fwd_chunk_id))
        self._mark("F", fwd_chunk_id, start)
        return result

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        start = self._now()
        self.backwards_left -= 1
        if self.reducer is not None:
            self.reducer.set_sync(self.backwards_left == 0)
        if not full_backward and not self.is_first and not self.halves_checked:
            outputs, inputs = self._kept(bwd_chunk_id)
            if not can_be_halved(outputs if loss is None else [loss], inputs, self.submod.parameters()):
                self.dw_builder = lambda: lambda: None  # the first half is the whole backward
            self.halves_checked = True
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
        if self.gradients is not None and (full_backward or self.dw_builder is not None):
            self.gradients.take(self.stage_index, bwd_chunk_id)
        self._mark("B" if full_backward else "I", bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        start = self._now()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        if self.gradients is not None and self.dw_builder is None:
            self.gradients.take(self.stage_index, bwd_chunk_id)
        self._mark("W", bwd_chunk_id, start)

    def _kept(self, microbatch):
        """Return the outputs and inputs of a forward; gradient edges for outputs that the stage has let go of."""
        if hasattr(self, "fwd_cache"):  # before torch 2.15
            return self.fwd_cache[microbatch]
        state = self._forward_chunk_states[microbatch]  # type: ignore[attr-defined]
        return state.stage_output_for_backward(), state.input_values

    def _now(self):
        return self.clock.now() if self.clock.runs else None

    def _mark(self, kind, microbatch, start) -> None:
        if self.clock.runs:
            self.clock.marks.append((self.stage_index, kind, microbatch, start, self.clock.now()))
