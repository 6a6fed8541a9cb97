"""Who waited for whom in a trace, and what the late rank did meanwhile.

The rank that came last to a collective is compared with the others that met there: what took it longer since they met
before. A sender of a message has nobody beside it that does the same, so its modules are compared with what they
usually take. A rank that was late because it waited itself passes the cause on.
"""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from weft.tools.tracing.rank_trace import BACKWARD_PASS, MODULE_KINDS, RankTrace, Span, TracedCall, Transfer, nested

_COMPUTING = {*MODULE_KINDS, BACKWARD_PASS, "step", "optimizer", "data"}
COMMUNICATION = "communication"
OUTSIDE = "outside"
SCHEDULE = "schedule"
AS_USUAL = "as usual"
EARLIER = "earlier"
_LEAST_NS = 20_000  # a shorter wait is not asked for its cause
_UNUSUAL = 0.3  # share of a wait for a message that what took longer than usual must explain

_WORDS = {OUTSIDE: "outside of modules", COMMUNICATION: COMMUNICATION, SCHEDULE: "its turn in the schedule"}
_WORDS |= {AS_USUAL: "what takes it as long as usual"}
_WORDS |= {BACKWARD_PASS: "backward, outside of modules", "step": "the optimizer's step", "data": "the next batch"}
_WORDS |= {"optimizer": "clipping", EARLIER: "an earlier step"}

Interval = tuple[int, int]
Cause = tuple[int, "Label"]  # a rank, and what it was at


class Label(NamedTuple):
    """What a rank was at: a module's forward or backward, a step, nothing that is known."""

    kind: str
    name: str

    def __str__(self) -> str:
        if self.kind in MODULE_KINDS:
            return f"{self.name}, {self.kind}"
        more = f", {self.name}" if self.kind == OUTSIDE and self.name else ""
        return _WORDS[self.kind] + more


@dataclass(frozen=True)
class Meeting:
    """A collective on all ranks of its group.

    Attributes:
        group: the group's identity.
        calls: each rank's call.
        late: the rank that came last, at last_came.
    """

    group: tuple[str, tuple[int, ...]]
    calls: dict[int, TracedCall]

    @property
    def late(self) -> int:
        return max(self.calls, key=lambda rank: self.calls[rank].came)

    @property
    def last_came(self) -> int:
        return max(call.came for call in self.calls.values())


@dataclass(frozen=True)
class Wait:
    """Time that a rank lost while another had not come.

    Attributes:
        place: what the waiting rank was at.
        cause_rank, cause: the rank that was waited for, perhaps through others, and what it was at.
    """

    rank: int
    begin: int
    ns: int
    place: Label
    cause_rank: int
    cause: Label


def meetings_of(ranks: Sequence[RankTrace]) -> list[Meeting]:
    """Return the collectives that all ranks of their groups have ended, in the order in which the last ranks came."""
    calls: dict[tuple, dict[int, TracedCall]] = defaultdict(dict)
    for rank in ranks:
        for group in rank.groups:
            for call in group.collectives:
                calls[group.identity, call.number][rank.rank] = call
    met = [Meeting(group, found) for (group, _), found in calls.items() if len(found) == len(group[1]) > 1]
    return sorted(met, key=lambda meeting: meeting.last_came)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > begin:
            joined.append((begin, end))
    return joined


def common(intervals: Sequence[Interval], begin: int, end: int) -> int:
    """Return the ns that sorted intervals have in common with one."""
    at = max(0, bisect.bisect_right(intervals, (begin, begin)) - 1)
    total = 0
    while at < len(intervals) and intervals[at][0] < end:
        total += max(0, min(end, intervals[at][1]) - max(begin, intervals[at][0]))
        at += 1
    return total


class RankActivity:
    """What a rank was at, at each time.

    Attributes:
        exposed: intervals in which the program stood still for communication.
        segments: intervals with what the rank was at, the innermost.
    """

    def __init__(self, trace: RankTrace):
        self.trace = trace
        self.exposed = union(_exposed(trace))
        self._spans = sorted((span for span in trace.spans if span.kind in _COMPUTING), key=lambda span: span.begin)
        spans = list(self._spans)
        spans += [Span(COMMUNICATION, "", *interval) for interval in self.exposed]
        self.segments: list[tuple[int, int, Label]] = []
        self._places: list[Label] = []  # of each segment; of communication, what it is inside of
        self.usual: dict[Label, list[int]] = defaultdict(list)  # ns of each call, without those inside
        self._flatten(spans)
        self._begins = [begin for begin, _, _ in self.segments]

    def _flatten(self, spans: Iterable[Span]) -> None:
        around: list[tuple[Span, list[int]]] = []  # spans, and their own ns
        cursor, before = 0, ""

        def until(time: int) -> None:
            nonlocal cursor
            if around and time > cursor:
                (*outer, (span, own)), length = around, time - cursor
                inside = outer[-1][0] if outer else Span(OUTSIDE, "", 0, 0)
                self._segment(cursor, time, span, inside if span.kind == COMMUNICATION else span)
                own[0] += length
            elif before and time > cursor:
                gap = Span(OUTSIDE, f"between {before} and {following.kind}", cursor, time)
                self._segment(cursor, time, gap, gap)
            cursor = max(cursor, time)

        for following in nested(spans):
            while around and around[-1][0].end <= following.begin:
                until(around[-1][0].end)
                span, own = around.pop()
                self.usual[_pattern(span)].append(own[0])
                before = span.kind
            until(following.begin)
            around.append((following, [0]))
        while around:
            until(around[-1][0].end)
            span, own = around.pop()
            self.usual[_pattern(span)].append(own[0])

    def _segment(self, begin: int, end: int, span: Span, place: Span) -> None:
        self.segments.append((begin, end, Label(span.kind, span.name)))
        self._places.append(Label(place.kind, place.name))

    def times(self, begin: int, end: int) -> Counter[Label]:
        """Return the ns of each label between two times."""
        found: Counter[Label] = Counter()
        at = max(0, bisect.bisect_right(self._begins, begin) - 1)
        while at < len(self.segments) and self.segments[at][0] < end:
            first, last, label = self.segments[at]
            found[label] += max(0, min(end, last) - max(begin, first))
            at += 1
        found[Label(OUTSIDE, "")] = max(0, end - begin - found.total())
        return found

    def between(self, begin: int, end: int) -> list[Span]:
        """Return the spans that begin between two times."""
        first, last = (bisect.bisect_left(self._spans, time, key=lambda span: span.begin) for time in (begin, end))
        return self._spans[first:last]

    def at(self, time: int) -> Label:
        """Return what the program was at; of communication, what it was inside of."""
        at = bisect.bisect_right(self._begins, time) - 1
        known = at >= 0 and time < self.segments[at][1]
        return self._places[at] if known else Label(OUTSIDE, "")


def _exposed(trace: RankTrace) -> Iterator[Interval]:
    background = union((call.begin, call.end) for group in trace.groups for call in group.collectives if call.submitted)
    for group in trace.groups:
        yield from ((call.begin, call.end) for call in group.collectives if not call.submitted)
    yield from ((span.begin, span.end) for span in trace.of_kind("wait"))
    for each in trace.of_kind(BACKWARD_PASS):  # at its end it waits for what still travels
        at = bisect.bisect_right(trace.backward_ends, each.end) - 1
        if at >= 0 and trace.backward_ends[at] > each.begin:
            tail = trace.backward_ends[at]
            yield from ((max(begin, tail), min(end, each.end)) for begin, end in background if end > tail)


def _pattern(span: Span | Label) -> Label:
    return Label(span.kind, re.sub(r"\d+", "*", span.name))


class Waits:
    """All waits of a trace, in order.

    Args:
        begins: time by rank; what was before is not asked for a cause.

    Attributes:
        found: the waits.
        activities: of each rank.
        moved: the collectives that all ranks ended.
    """

    def __init__(self, ranks: Sequence[RankTrace], begins: dict[int, int]):
        self._begins = begins
        self.activities = {rank.rank: RankActivity(rank) for rank in ranks}
        self.moved = meetings_of(ranks)
        self.found: list[Wait] = []
        self._of_rank: dict[int, list[Wait]] = defaultdict(list)
        self._usual = self._usual_times()
        self._has_stages = any(rank.of_kind("stage", "schedule") for rank in ranks)
        self._before: dict[tuple, int] = {}  # group and rank, or channel: when the program had made the call before
        self._cause_of_group: dict[tuple, Cause] = {}
        self._counted: Counter[int] = Counter()  # by rank: until when its waits are counted
        happened: list[tuple[int, int, Meeting | tuple[int, Transfer, Transfer]]] = [
            (meeting.last_came, number, meeting) for number, meeting in enumerate(self.moved)
        ]
        happened += [
            (sent.begin, len(happened) + number, (rank, received, sent))
            for number, (rank, received, sent) in enumerate(_pairs(ranks))
        ]
        for _, _, event in sorted(happened, key=lambda each: each[:2]):
            if isinstance(event, Meeting):
                self._met(event)
            else:
                self._received(*event)
        self.found.sort(key=lambda wait: wait.begin)

    def _met(self, meeting: Meeting) -> None:
        late, last_came = meeting.late, meeting.last_came
        lateness = last_came - min(call.came for call in meeting.calls.values())
        if lateness > _LEAST_NS and last_came > self._begins[late]:
            cause, direct = self._causes_of(meeting)
            self._cause_of_group[meeting.group] = cause
            for rank, call in meeting.calls.items():
                if rank != late:
                    self._add(rank, call.came, last_came, direct if cause[0] == rank else cause)
        for rank, call in meeting.calls.items():
            self._before[meeting.group, rank] = call.submitted or call.end

    def _since(self, key: tuple, rank: int) -> int:
        return max(self._before.get(key, 0), self._begins[rank])

    def _causes_of(self, meeting: Meeting) -> tuple[Cause, Cause]:
        """Return why the last rank came late; and for the rank that is at fault, what took the last one long."""
        since = {rank: self._since((meeting.group, rank), rank) for rank in meeting.calls}
        times = {rank: self.activities[rank].times(since[rank], call.came) for rank, call in meeting.calls.items()}
        late = meeting.late
        own, since_own = times.pop(late), since.pop(late)
        longer = {Label(COMMUNICATION, ""): 0.0}
        longer |= {label: ns - median(each[label] for each in times.values()) for label, ns in own.items()}
        # Calls beside the program do not bring ranks together: who was late at the last one still is.
        behind = since_own - median(since.values()) + min(0.0, longer[Label(COMMUNICATION, "")])
        if behind > max(longer.values()):
            earlier = self._cause_of_group.get(meeting.group, (late, Label(EARLIER, "")))
            return earlier, earlier
        cause = self._cause(late, longer, since_own, meeting.last_came)
        del longer[Label(COMMUNICATION, "")]
        return cause, (late, _longest(longer))

    def _received(self, rank: int, received: Transfer, sent: Transfer) -> None:
        sender, channel = received.peer, (received.peer, rank, received.tag)
        since = self._since(channel, sender)
        self._before[channel] = sent.begin
        if common(self.activities[rank].exposed, received.begin, sent.begin) <= _LEAST_NS:
            return
        activity = self.activities[sender]
        calls = Counter(Label(span.kind, span.name) for span in activity.between(since, sent.begin))
        longer = {
            label: took - calls[label] * self._usual.get(_pattern(label), 0.0)
            for label, took in activity.times(since, sent.begin).items()
        }
        cause = self._cause(sender, longer, since, sent.begin)
        if cause[0] == sender and longer.get(cause[1], 0) < _UNUSUAL * (sent.begin - received.begin):
            cause = sender, Label(SCHEDULE if self._has_stages else AS_USUAL, "")
        self._add(rank, received.begin, sent.begin, cause)

    def _cause(self, rank: int, longer: dict[Label, float], since: int, until: int) -> Cause:
        label = _longest(longer)
        if label.kind != COMMUNICATION:
            return rank, label
        own = [wait for wait in self._of_rank[rank] if since < wait.begin + wait.ns and wait.begin < until]
        passed_on = max(own, key=lambda wait: wait.ns, default=None)
        return (rank, label) if passed_on is None else (passed_on.cause_rank, passed_on.cause)

    def _add(self, rank: int, begin: int, end: int, cause: Cause) -> None:
        begin = max(begin, self._counted[rank])
        ns = common(self.activities[rank].exposed, begin, end)
        if ns > 0:
            wait = Wait(rank, begin, ns, self.activities[rank].at(end - 1), *cause)
            self.found.append(wait)
            self._of_rank[rank].append(wait)
            self._counted[rank] = end

    def _usual_times(self) -> dict[Label, float]:
        """Return the ns that a call of a module usually takes: on the rank on which it takes least, of several."""
        of_ranks: dict[Label, list[float]] = defaultdict(list)
        for activity in self.activities.values():
            for label, times in activity.usual.items():
                of_ranks[label].append(median(times))
        return {label: min(times) for label, times in of_ranks.items() if len(times) > 1}


def _longest(longer: dict[Label, float]) -> Label:
    return max(longer, key=lambda label: longer[label], default=Label(OUTSIDE, ""))


def _pairs(ranks: Sequence[RankTrace]) -> Iterator[tuple[int, Transfer, Transfer]]:
    """Yield each message that was received: by whom, there, and where it was sent."""
    sent: dict[tuple, list[Transfer]] = defaultdict(list)
    received: dict[tuple, list[Transfer]] = defaultdict(list)
    for rank in ranks:
        for group in rank.groups:
            for transfer in sorted(group.transfers, key=lambda transfer: transfer.begin):
                ends = (rank.rank, transfer.peer) if transfer.sent else (transfer.peer, rank.rank)
                (sent if transfer.sent else received)[group.key, *ends, transfer.tag].append(transfer)
    for channel, ones in received.items():
        yield from ((channel[2], *pair) for pair in zip(ones, sent[channel], strict=False))
