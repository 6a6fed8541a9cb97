"""A step as it ran: the actions of every rank, their idle time, and drawings of both."""

from dataclasses import dataclass
from pathlib import Path

from weft.pipeline.timing import Action

_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f2a65a", "W": "#54a24b"}
_KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True)
class Timeline:
    """The last step of a pipeline, the same on every rank.

    Attributes:
        schedule: name of the schedule.
        ranks: number of ranks of the pipeline.
        stages: number of stages on all ranks.
        microbatches: number of micro-batches of the step.
        actions: actions of all ranks, those of each rank in order; times in seconds since the step began.
    """

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    actions: tuple[Action, ...]

    @property
    def span_s(self) -> float:
        """Seconds from the start of the first action to the end of the last."""
        return max(action.end for action in self.actions) - min(action.start for action in self.actions)

    def busy_s(self, rank: int) -> float:
        return sum(action.end - action.start for action in self.actions if action.rank == rank)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time without computation: waiting, sending and receiving."""
        return 1 - sum(map(self.busy_s, range(self.ranks))) / (self.ranks * self.span_s)

    @property
    def formula(self) -> float:
        """Bubble of 1f1b and afab if all stages are equal and messages are free.

        (p-1)/(v m + p-1) with p ranks, m micro-batches and v stages on a rank (Narayanan et al. 2021, section 2.2).
        Zero-bubble schedules stay below.
        """
        return (self.ranks - 1) / (self.stages // self.ranks * self.microbatches + self.ranks - 1)

    def in_flight(self, rank: int) -> int:
        """Return the largest number of forwards, over all stages of the rank, that wait for their backward.

        Each of them keeps its activations.
        """
        now = most = 0
        for action in self.actions:
            if action.rank == rank:
                now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                most = max(most, now)
        return most

    def __str__(self) -> str:
        ranks = ", ".join(f"rank {rank} {self.busy_s(rank) * 1e3:.2f} ms" for rank in range(self.ranks))
        return (
            f"{self.schedule}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} micro-batches in "
            f"{self.span_s * 1e3:.2f} ms; bubble {self.bubble:.1%} measured, {self.formula:.1%} by (p-1)/(v m + p-1); "
            f"busy: {ranks}"
        )

    def save_png(self, path: str | Path) -> None:
        """Draw a row for each rank: colours show forward and backward, brightness the stage, numbers the micro-batch.

        Raises:
            ImportError: matplotlib is missing (pip install weft[plot]).
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(12, 1.4 + 0.5 * self.ranks), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        begin = min(action.start for action in self.actions)
        for action in self.actions:
            start, width = (action.start - begin) * 1e3, (action.end - action.start) * 1e3
            faded = 1 - 0.6 * action.stage / max(1, self.stages - 1) if self.stages > self.ranks else 1
            colour = _COLOURS[action.kind]
            axes.barh(action.rank, width, 0.8, start, color=colour, alpha=faded, edgecolor="white", linewidth=0.5)
            if width * 1e-3 > 0.012 * self.span_s:
                axes.text(start + width / 2, action.rank, str(action.microbatch), ha="center", va="center", fontsize=7)
        axes.set_yticks(range(self.ranks), [f"rank {rank}" for rank in range(self.ranks)])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(
            f"{self.schedule}, {self.microbatches} micro-batches: bubble {self.bubble:.1%} measured, "
            f"{self.formula:.1%} by (p-1)/(v m + p-1)",
            fontsize=10,
        )
        shown = [kind for kind in _KINDS if any(action.kind == kind for action in self.actions)]
        axes.legend(
            handles=[Patch(color=_COLOURS[kind], label=_KINDS[kind]) for kind in shown],
            loc="upper left",
            bbox_to_anchor=(1, 1),
            fontsize=8,
        )
        figure.savefig(path, dpi=120)
