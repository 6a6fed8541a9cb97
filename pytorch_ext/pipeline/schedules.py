"""The schedules by name: the stages of each rank, and the number of micro-batches they need."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.pipelining import schedules as of_torch


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch.distributed.pipelining.

    Attributes:
        kind: its class.
        stages_per_rank: stages of a rank, by default.
        fixed: stages_per_rank cannot be changed.
        v_shaped: rank r of p has stages r and 2p - 1 - r, so that the first rank has both ends; otherwise r, r + p, ...
        halves: it splits a backward in two, for the inputs and for the weights.
        obstacle: (ranks, stages, micro-batches) -> the reason why it cannot run, and the way out; "" if it can.
        kept: (rank, ranks, micro-batches) -> those whose activations a rank keeps at once, with one stage on a rank.
    """

    kind: type
    stages_per_rank: int
    fixed: bool
    v_shaped: bool
    halves: bool
    obstacle: Callable[[int, int, int], str]
    kept: Callable[[int, int, int], int] = lambda rank, ranks, microbatches: min(ranks, microbatches)

    @property
    def single(self) -> bool:
        return issubclass(self.kind, of_torch.PipelineScheduleSingle)

    def rank_of(self, stage: int, ranks: int) -> int:
        round_, place = divmod(stage, ranks)
        return ranks - 1 - place if self.v_shaped and round_ % 2 else place

    def stages_of(self, rank: int, ranks: int, stages: int) -> list[int]:
        return [stage for stage in range(stages) if self.rank_of(stage, ranks) == rank]


def _anything(ranks: int, stages: int, microbatches: int) -> str:
    return ""


def _one_for_each_stage(ranks: int, stages: int, microbatches: int) -> str:
    if microbatches >= stages:
        return ""
    return f"it needs a micro-batch for each of the {stages} stages: microbatches={stages} or more"


def _whole_rounds(ranks: int, stages: int, microbatches: int) -> str:
    if microbatches < ranks:
        return f"it needs a micro-batch for each of the {ranks} ranks: microbatches={ranks} or a multiple of it"
    if microbatches % (microbatches // ranks):
        return (
            f"its rounds must be equal: microbatches={microbatches // ranks * ranks}, a multiple of the {ranks} ranks"
        )
    return ""


SCHEDULES = {
    "afab": Schedule(of_torch.ScheduleGPipe, 1, True, False, False, _anything, lambda rank, ranks, m: m),
    "1f1b": Schedule(
        of_torch.Schedule1F1B, 1, True, False, False, _one_for_each_stage, lambda rank, ranks, m: min(ranks - rank, m)
    ),
    "interleaved": Schedule(of_torch.ScheduleInterleaved1F1B, 2, False, False, False, _whole_rounds),
    "zero-bubble": Schedule(of_torch.ScheduleInterleavedZeroBubble, 1, False, False, True, _whole_rounds),
    "zbv": Schedule(of_torch.ScheduleZBVZeroBubble, 2, True, True, True, _anything),
    "dualpipev": Schedule(of_torch.ScheduleDualPipeV, 2, True, True, True, _one_for_each_stage),
}
