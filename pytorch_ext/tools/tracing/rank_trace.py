"""What one rank did, on a clock that all ranks have: spans of time from the parts that ranks write."""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

MODULE_KINDS = "forward", "recomputed", "backward"
BACKWARD_PASS = "backward pass"


class Span(NamedTuple):
    """What a rank did from begin to end, in ns of rank 0's clock.

    Attributes:
        kind: "forward", "recomputed" or "backward" of the module `name`; "step" or "optimizer", "data", "stage",
            "schedule", "bucket", "wait", or "backward pass".
    """

    kind: str
    name: str
    begin: int
    end: int


class TracedCall(NamedTuple):
    """A rank's part of a collective; times as in Span.

    Attributes:
        met: when every rank had come; 0 if it is not known.
        submitted: when the program submitted it, to run beside the program; 0 if the program waited for it.
    """

    number: int
    operation: str
    bytes: int
    submitted: int
    begin: int
    met: int
    end: int

    @property
    def came(self) -> int:
        """When the rank's program came to it."""
        return self.submitted or self.begin


class Transfer(NamedTuple):
    """A message; times as in Span. `sent` here, or received; `peer` is a rank of the whole program."""

    sent: bool
    peer: int
    bytes: int
    tag: int
    begin: int
    end: int


@dataclass
class GroupTrace:
    """What a rank did in one group.

    Attributes:
        ranks: the group's ranks, by their numbers in the whole program.
    """

    name: str
    key: str
    ranks: tuple[int, ...]
    collectives: list[TracedCall]
    transfers: list[Transfer]

    @property
    def identity(self) -> tuple[str, tuple[int, ...]]:
        return self.key, self.ranks


@dataclass
class RankTrace:
    """What one rank did.

    Attributes:
        world: number of ranks of the program.
        offset: ns that were added to its clock.
        spans: of its threads that compute; those of modules inside of one another.
        backward_ends: times at which a backward had its gradients.
        memory: times, and the bytes that `memory_of` took.
        profiled: events of torch.profiler: name, begin, end, track.
        begins: times at which recording began again, behind steps that were left out.
    """

    rank: int
    world: int
    host: str
    offset: int
    spans: list[Span]
    backward_ends: list[int]
    groups: list[GroupTrace]
    memory: list[tuple[int, int]]
    memory_of: str
    profiled: list[tuple[str, int, int, str]] = field(repr=False)
    begins: list[int] = field(default_factory=list)

    def of_kind(self, *kinds: str) -> list[Span]:
        return [span for span in self.spans if span.kind in kinds]

    def steps(self) -> list[tuple[int, int]]:
        """Return begin and end of each step that was recorded whole.

        A step ends with the last optimizer's step before the next forward.
        """
        forwards = sorted(span.begin for span in self.spans if span.kind == "forward")
        ends: list[int] = []
        for span in sorted(self.of_kind("step"), key=lambda span: span.end):
            if ends and bisect.bisect_left(forwards, ends[-1]) == bisect.bisect_left(forwards, span.end):
                ends.pop()  # no forward between them
            ends.append(span.end)
        first = min((span.begin for span in self.spans), default=0)
        begins = [first, *self.begins]
        return [
            (max(before, begins[bisect.bisect_right(begins, end) - 1]), end)
            for before, end in zip([first, *ends], ends, strict=False)
        ]


# Clocks


def on_one_clock(parts: Sequence[dict[str, Any]]) -> list[RankTrace]:
    """Return the parts with all times on the clock of the first.

    Processes of one machine have one clock. For others the collectives bound the difference: no rank saw all ranks
    come before one of them came.
    """
    first = parts[0]
    done: list[RankTrace] = []
    for part in parts:
        offset = 0
        if part["machine"] != first["machine"]:
            offset = part["wall"] - first["wall"]
            low, high = _bounds(done, _rank_trace(part, 0))
            if low <= high:
                offset = (low + high) // 2
        done.append(_rank_trace(part, offset))
    return done


def _bounds(known: Sequence[RankTrace], other: RankTrace) -> tuple[int, int]:
    """Return the smallest and largest ns to add to the clock of a rank that common collectives allow."""
    calls = {
        (group.identity, call.number): call for rank in known for group in rank.groups for call in group.collectives
    }
    low, high = -(1 << 62), 1 << 62
    for group in other.groups:
        for theirs in group.collectives:
            ours = calls.get((group.identity, theirs.number))
            if ours is not None and theirs.end and ours.end:
                low = max(low, ours.begin - (theirs.met or theirs.end))
                high = min(high, (ours.met or ours.end) - theirs.begin)
    return (low, high) if low > -(1 << 62) else (1, 0)


# Spans


def _rank_trace(part: dict[str, Any], offset: int) -> RankTrace:
    spans = [Span(kind, name, begin + offset, end + offset) for kind, name, begin, end in part["spans"]]
    ends = sorted(time + offset for time in part["backward_ends"])
    modules = _module_spans(part, offset, [span for span in spans if span.kind == BACKWARD_PASS], ends)
    return RankTrace(
        part["rank"],
        part["world"],
        part["host"],
        offset,
        [*modules, *spans],
        ends,
        [_group_trace(group, offset) for group in part["groups"]],
        [(time + offset, size) for time, size in part["memory"]],
        part["memory_of"],
        [(name, *(t - part["wall"] + offset for t in times), track) for name, *times, track in part["profiled"]],
        [time + offset for time in part["begins"]],
    )


def _group_trace(group: dict[str, Any], offset: int) -> GroupTrace:
    ranks = tuple(group["ranks"])
    collectives = [
        TracedCall(number, operation, count * _size_of(dtype), *(time and time + offset for time in times))
        for number, operation, dtype, count, *times in group["calls"]
        if times[-1]
    ]
    transfers = [
        Transfer(sent, ranks[peer], size, tag, begin + offset, end + offset)
        for sent, peer, size, tag, begin, end in group["messages"]
    ]
    return GroupTrace(group["name"], group["key"], ranks, collectives, transfers)


def _size_of(dtype: str) -> int:
    digits = "".join(filter(str.isdigit, dtype.partition("_")[0]))
    return max(1, int(digits or 8) // 8)


def _module_spans(part: dict[str, Any], offset: int, passes: Sequence[Span], ends: Sequence[int]) -> list[Span]:
    """Return the forwards of all module calls, and the backwards, each inside that of the call around it."""
    labels = [name or kind for name, kind in part["modules"]]
    calls = [
        (labels[module], caller, again, *(time and time + offset for time in times))
        for module, caller, again, *times in part["calls"]
    ]
    spans = [Span("recomputed" if again else "forward", name, begin, end) for name, _, again, begin, end, _, _ in calls]
    inside: dict[int, list[int]] = defaultdict(list)
    came = [call[5] for call in calls]
    for number in range(len(calls) - 1, -1, -1):  # a call's number is larger than that of its caller
        caller = calls[number][1]
        if came[number]:
            inside[caller].append(number)
            if caller >= 0:
                came[caller] = min(came[caller] or came[number], came[number])
    limits = _limits(passes, ends)
    spans += _backwards(calls, came, inside, -1, limits, 1 << 62)
    return spans


def nested(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans by begin, each cut at the end of the one around it."""
    ends: list[int] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while ends and ends[-1] <= span.begin:
            ends.pop()
        end = min(span.end, ends[-1]) if ends else span.end
        ends.append(end)
        yield span._replace(end=end)


def _limits(passes: Sequence[Span], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return the begin of each backward pass, and the time at which it had its gradients."""
    found = []
    for each in passes:
        at = bisect.bisect_right(ends, each.end) - 1
        found.append((each.begin, ends[at] if at >= 0 and ends[at] > each.begin else each.end))
    return sorted(found)


def _backwards(
    calls: Sequence[tuple],
    came: Sequence[int],
    inside: dict[int, list[int]],
    caller: int,
    limits: Sequence[tuple[int, int]],
    limit: int,
) -> Iterator[Span]:
    """Yield the backwards of the calls inside of one; a call's ends where the next one's begins."""
    numbers = sorted(inside[caller], key=lambda number: (came[number], -number))
    for number, following in zip_longest(numbers, numbers[1:]):
        begin, end = came[number], calls[number][6]
        at = bisect.bisect_right(limits, (begin, 1 << 62)) - 1
        of_pass = limits[at][1] if at >= 0 else begin
        end = min(end if end > begin else of_pass, limit)
        if following is not None:
            end = min(end, came[following])
        if end > begin:
            yield Span("backward", calls[number][0], begin, end)
            yield from _backwards(calls, came, inside, number, limits, end)
