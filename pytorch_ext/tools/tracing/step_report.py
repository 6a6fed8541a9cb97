"""Report of a trace: where the step's time goes, whom ranks waited for, and what to change first."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from statistics import median

from weft.tools.planner import rates
from weft.tools.planner.hardware import Hardware
from weft.tools.tracing.rank_trace import BACKWARD_PASS, RankTrace, TracedCall
from weft.tools.tracing.waiting import (
    AS_USUAL,
    COMMUNICATION,
    EARLIER,
    OUTSIDE,
    SCHEDULE,
    Interval,
    Label,
    Meeting,
    Waits,
    common,
)

_PARTS = {"forward": "forward", "recomputed": "backward", "backward": "backward", BACKWARD_PASS: "backward"}
_PARTS |= {"step": "optimizer", "optimizer": "optimizer", "data": "data", OUTSIDE: "outside of modules"}
_COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "optimizer": "#54a24b", "data": "#b279a2"}
_COLOURS |= {"waiting": "#e45756", "moving": "#72b7b2", "outside of modules": "#bab0ac"}
_LARGE = 256 << 10  # bytes of a collective whose time says what the rate is
_SHOWN = 5
_ADVISED = 3
_WORTH = 0.02  # of a step: less is not advised


@dataclass(frozen=True)
class Advice:
    """Something to change, and the ms of a step that it is estimated to save."""

    saves_ms: float
    text: str


class StepReport:
    """Where the time of a trace's steps goes.

    Args:
        ranks: the traces.
        hardware: what the planner estimates collectives with; None: the best latency and rate in the trace.

    Attributes:
        steps: number of steps that every rank has whole; the first is left out if there are others.
        causes: ns that ranks waited for a rank, by the rank and what it was at, the largest first.
    """

    def __init__(self, ranks: Sequence[RankTrace], hardware: Hardware | None = None):
        self.ranks = list(ranks)
        of_ranks = {rank.rank: rank.steps() for rank in ranks}
        count = min((len(steps) for steps in of_ranks.values()), default=0)
        first = 1 if count > 1 else 0  # the first step makes buffers
        self._steps = {rank: steps[first:count] for rank, steps in of_ranks.items()}
        if count == 0:  # no optimizer steps
            self._steps = {rank.rank: [_extent(rank)] for rank in ranks}
        self.steps = max(1, count - first)
        self.waits = Waits(ranks, {rank: steps[0][0] for rank, steps in self._steps.items()})
        self.causes: Counter[tuple[int, Label]] = Counter()
        for wait in self.waits.found:
            if self._in_steps(wait.rank, wait.begin):
                self.causes[wait.cause_rank, wait.cause] += wait.ns
        self.hardware = hardware or self._as_traced()

    def _in_steps(self, rank: int, time: int) -> bool:
        return any(begin <= time < end for begin, end in self._steps[rank])

    @cached_property
    def step_ms(self) -> float:
        return median((end - begin) / 1e6 for steps in self._steps.values() for begin, end in steps)

    @cached_property
    def shares(self) -> dict[int, dict[str, float]]:
        """Milliseconds of a step by rank and what they went to; the mean over steps."""
        return {rank.rank: self._shares_of(rank) for rank in self.ranks}

    def _shares_of(self, rank: RankTrace) -> dict[str, float]:
        found = dict.fromkeys(_COLOURS, 0.0)
        activity = self.waits.activities[rank.rank]
        for begin, end in self._steps[rank.rank]:
            for label, ns in activity.times(begin, end).items():
                found["moving" if label.kind == COMMUNICATION else _PARTS[label.kind]] += ns
        waited = sum(
            wait.ns for wait in self.waits.found if wait.rank == rank.rank and self._in_steps(wait.rank, wait.begin)
        )
        found["waiting"], found["moving"] = waited, max(0.0, found["moving"] - waited)
        return {part: ns / 1e6 / self.steps for part, ns in found.items()}

    @cached_property
    def hidden_ms(self) -> dict[int, float]:
        """Milliseconds of a step in which a rank's collectives moved data beside the program, by rank."""
        found = {}
        for rank in self.ranks:
            exposed = self.waits.activities[rank.rank].exposed
            calls = [call for group in rank.groups for call in group.collectives if call.submitted]
            inside = [call for call in calls if self._in_steps(rank.rank, call.begin)]
            hidden = sum(call.end - call.met - common(exposed, call.met, call.end) for call in inside if call.met)
            found[rank.rank] = hidden / 1e6 / self.steps
        return found

    @cached_property
    def bubble(self) -> float | None:
        """Share of a pipeline's time in which its ranks ran no stage; None without a pipeline."""
        whole = sum(span.end - span.begin for rank in self.ranks for span in self._within(rank, "schedule"))
        busy = sum(span.end - span.begin for rank in self.ranks for span in self._within(rank, "stage"))
        return 1 - busy / whole if whole else None

    def _within(self, rank: RankTrace, kind: str) -> list:
        return [span for span in rank.of_kind(kind) if self._in_steps(rank.rank, span.begin)]

    def largest_modules(self) -> list[tuple[str, float]]:
        """Return the modules that take most, without those inside, and their ms of a step, the mean over ranks."""
        found: Counter[str] = Counter()
        for rank in self.ranks:
            for interval in self._steps[rank.rank]:
                for label, ns in self.waits.activities[rank.rank].times(*interval).items():
                    if label.kind in ("forward", "recomputed", "backward"):
                        found[re.sub(r"\d+", "*", label.name)] += ns
        return [(name, ns / 1e6 / self.steps / len(self.ranks)) for name, ns in found.most_common(_SHOWN)]

    # What to change

    def advice(self) -> list[Advice]:
        """Return the changes that are estimated to save most, the largest first."""
        found = [*self._of_late_ranks(), *self._of_collectives(), *self._of_bubble(), *self._of_shares()]
        worth = [each for each in found if each.saves_ms > _WORTH * self.step_ms]
        return sorted(worth, key=lambda each: -each.saves_ms)[:_ADVISED]

    def _of_late_ranks(self) -> Iterable[Advice]:
        by_rank: dict[tuple[int, Label], Counter[int]] = defaultdict(Counter)
        for wait in self.waits.found:
            if wait.cause.kind not in (SCHEDULE, AS_USUAL, EARLIER) and self._in_steps(wait.rank, wait.begin):
                by_rank[wait.cause_rank, wait.cause][wait.rank] += wait.ns
        for (rank, cause), waited in by_rank.items():
            most = max(waited.values()) / 1e6 / self.steps
            yield Advice(most, f"rank {rank} is late, at {cause}: others wait {most:.3g} ms for it")

    def _of_collectives(self) -> Iterable[Advice]:
        seen: dict[tuple[str, str, int, bool], list[tuple[int, float]]] = defaultdict(list)  # bytes, ms
        names = {group.identity: group.name for rank in self.ranks for group in rank.groups}
        for meeting, rank, call, moving in self._moving_calls():
            key = names[meeting.group], call.operation, len(meeting.calls), call.submitted > 0
            seen[key].append((call.bytes, common(self.waits.activities[rank].exposed, *moving) / 1e6))
        for (name, operation, size, beside), calls in seen.items():
            share = self.steps * size  # of a step and a rank
            ms, number = sum(took for _, took in calls) / share, len(calls) / share
            mean = sum(moved for moved, _ in calls) / len(calls)
            expected = sum(self._expected_ms(operation, moved, size) for moved, _ in calls) / share
            calls_of = "call of" if number == 1 else "calls of"
            change = "start it earlier" if beside else "let it run beside computation"
            yield Advice(
                ms,
                f'{operation} on group "{name}" stops the ranks for {ms:.3g} ms ({number:.3g} {calls_of} '
                f"{mean / 1e6:.3g} MB on average; the planner expects {expected:.3g} ms with {self.hardware.name}): "
                f"{change}{'' if mean > _LARGE else ', or join the calls'}",
            )

    def _moving_calls(self) -> Iterator[tuple[Meeting, int, TracedCall, Interval]]:
        """Yield each rank's collectives in the steps, with the time in which data moved."""
        for meeting in self.waits.moved:
            for rank, call in meeting.calls.items():
                if self._in_steps(rank, call.begin):
                    yield meeting, rank, call, (min(max(call.begin, meeting.last_came), call.end), call.end)

    def _expected_ms(self, operation: str, moved_bytes: int, ranks: int) -> float:
        if operation == "all_to_all":
            return rates.exchange_s(self.hardware, moved_bytes, ranks, 1) * 1e3
        return rates.gather_s(self.hardware, moved_bytes, ranks, 1) * _passes(operation) * 1e3

    def _as_traced(self) -> Hardware:
        took = [
            (len(meeting.calls), call.bytes, max(1, end - begin) / 1e9 / _passes(call.operation))
            for meeting, _, call, (begin, end) in self._moving_calls()
        ]
        latency = min((seconds for _, moved, seconds in took if moved < _LARGE), default=1e-5)
        large = [moved * (size - 1) / size / seconds for size, moved, seconds in took if moved >= _LARGE]
        rate = max(large, default=1e10)
        return Hardware("the best rate of this trace", 0, {}, rate, rate, rate, node_latency_s=latency)

    def _of_bubble(self) -> Iterable[Advice]:
        if self.bubble is None:
            return
        names = {rank.rank: {span.name for span in rank.of_kind("stage")} for rank in self.ranks}
        numbers = [tuple(map(int, re.findall(r"\d+", name))) for of_rank in names.values() for name in of_rank]
        stages, microbatches = (1 + max(values) for values in zip(*numbers, strict=True))
        chunks = max(len({name[: re.search(r"\D", name).start()] for name in of}) for of in names.values())  # type: ignore[union-attr]
        ranks = stages // chunks
        now, doubled = ((ranks - 1) / (chunks * m + ranks - 1) for m in (microbatches, 2 * microbatches))
        if now:
            schedule = max(sum(span.end - span.begin for span in self._within(rank, "schedule")) for rank in self.ranks)
            saves = schedule / 1e6 / self.steps * self.bubble * (1 - doubled / now)
            yield Advice(
                saves,
                f"the pipeline is idle {self.bubble:.0%} of its time with {microbatches} micro-batches (the planner "
                f"expects {now:.0%}, and {doubled:.0%} with {2 * microbatches} of half the size): more micro-batches",
            )

    def _of_shares(self) -> Iterable[Advice]:
        data = max(shares["data"] for shares in self.shares.values())
        yield Advice(data, f"the next batch takes {data:.3g} ms: load it beside the step (num_workers)")
        outside = min(shares["outside of modules"] for shares in self.shares.values())
        yield Advice(outside, f"{outside:.3g} ms are outside of modules, optimizers and data: the loop's own code")

    # Texts

    def table(self) -> list[list[str]]:
        """Return the ms of a step by rank, with a row of headings."""
        rows = [["ms of a step", *(f"rank {rank.rank}" for rank in self.ranks)]]
        shares = self.shares.values()
        rows += [[part, *(f"{of_rank[part]:.2f}" for of_rank in shares)] for part in _COLOURS]
        rows.append(["hidden communication", *(f"{self.hidden_ms[rank.rank]:.2f}" for rank in self.ranks)])
        return rows

    def lines(self) -> list[tuple[str, list[str]]]:
        """Return headings, and the lines below each."""
        found = [
            ("Largest modules, without those inside", [f"{ms:8.2f} ms  {name}" for name, ms in self.largest_modules()])
        ]
        causes = [
            f"{ns / 1e6 / self.steps:8.2f} ms  for rank {rank}: {cause}"
            for (rank, cause), ns in self.causes.most_common(_SHOWN)
        ]
        places: Counter[Label] = Counter()
        for wait in self.waits.found:
            if self._in_steps(wait.rank, wait.begin):
                places[wait.place] += wait.ns
        where = [f"{ns / 1e6 / self.steps:8.2f} ms  in {place}" for place, ns in places.most_common(_SHOWN)]
        found.append(("Whom ranks waited for, and what that rank was at (of a step, all ranks)", causes))
        found.append(("Where ranks waited (of a step, all ranks)", where))
        if self.bubble is not None:
            found.append(("Pipeline", [f"idle {self.bubble:.0%} of the schedule's time"]))
        advised = [f"{each.saves_ms:8.2f} ms  {each.text}" for each in self.advice()]
        found.append(("What to change first, and what a step would save", advised or ["nothing of more than 2%"]))
        return [(heading, lines) for heading, lines in found if lines]

    @property
    def title(self) -> str:
        steps = "a step" if self.steps == 1 else f"{self.steps} steps"
        ranks = "1 rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"
        return f"{ranks}, {steps} of {self.step_ms:.2f} ms (median)"

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = [
            "  ".join(
                cell.ljust(width) if not n else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        texts = [line for heading, lines in self.lines() for line in ["", heading, *lines]]
        return "\n".join([self.title, "", *table, *texts])

    def html(self) -> str:
        """Return a page without a network or a script."""
        largest = max(sum(shares.values()) for shares in self.shares.values()) or 1
        bars = [
            f'<p>rank {rank} <span class="bar">'
            + "".join(
                f'<span title="{part}: {ms:.2f} ms" '
                f'style="width:{100 * ms / largest:.2f}%;background:{_COLOURS[part]}"></span>'
                for part, ms in shares.items()
            )
            + "</span></p>"
            for rank, shares in self.shares.items()
        ]
        legend = "".join(
            f'<span class="key" style="background:{colour}"></span>{part} ' for part, colour in _COLOURS.items()
        )
        rows = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.table()]
        texts = [
            f"<h2>{escape(heading)}</h2><pre>{escape(chr(10).join(lines))}</pre>" for heading, lines in self.lines()
        ]
        return "\n".join(
            [
                f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>',
                f"<style>{_STYLE}</style></head><body><h1>{escape(self.title)}</h1>",
                *bars,
                f"<p>{legend}</p><table>",
                *rows,
                "</table>",
                *texts,
                "</body></html>\n",
            ]
        )


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }
.bar { display: inline-flex; width: 85%; height: 1.4em; vertical-align: middle; }
.key { display: inline-block; width: 1em; height: 1em; margin: 0 0.3em 0 1em; vertical-align: middle; }
td { padding: 0.15em 0.8em; text-align: right; border-bottom: 1px solid #ccc; }
td:first-child { text-align: left; }
pre { white-space: pre-wrap; }
"""


def _passes(operation: str) -> int:
    return 2 if operation.startswith("all_reduce") else 1  # reduce-scatter and all-gather


def _extent(rank: RankTrace) -> tuple[int, int]:
    spans = rank.spans
    return min((span.begin for span in spans), default=0), max((span.end for span in spans), default=1)
