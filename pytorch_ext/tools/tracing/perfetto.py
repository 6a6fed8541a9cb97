"""Traces of ranks as events of the Chrome trace format, which ui.perfetto.dev and chrome://tracing read.

Format: "Trace Event Format", Google. A process for each rank, with a track for what it computes, one for its stages,
one for its buckets and one for each group.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from weft.tools.tracing.rank_trace import MODULE_KINDS, RankTrace, nested
from weft.tools.tracing.waiting import Meeting, meetings_of

_TRACKS = {"stage": "stages", "schedule": "stages", "bucket": "buckets", "wait": "waits"}
_COMPUTE = "compute"


def events(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Return the events of all ranks; times begin with the first of them."""
    times = [span.begin for rank in ranks for span in rank.spans]
    times += [call.begin for rank in ranks for group in rank.groups for call in group.collectives]
    origin = min(times, default=0)
    met = {(meeting.group, call): meeting for meeting in meetings_of(ranks) for call in meeting.calls.values()}
    found: list[dict[str, Any]] = []
    for rank in ranks:
        found += _of_rank(rank, origin, met)
    return found


def _of_rank(rank: RankTrace, origin: int, met: dict[Any, Meeting]) -> Iterator[dict[str, Any]]:
    process, tracks = rank.rank + 1, dict[str, int]()  # to viewers process 0 and thread 0 are the system
    identity = itertools.count()

    def event(track: str, name: str, begin: int, end: int, **more: Any) -> dict[str, Any]:
        number = tracks.setdefault(track, process * 1000 + len(tracks))
        times = {"ts": (begin - origin) / 1e3, "dur": max(end - begin, 1) / 1e3}
        return {"ph": "X", "pid": process, "tid": number, "name": name, **times, **more}

    for track in dict.fromkeys([_COMPUTE, *_TRACKS.values()]):
        for span in nested(span for span in rank.spans if _TRACKS.get(span.kind, _COMPUTE) == track):
            label = f"{span.name} ({span.kind})" if span.kind in MODULE_KINDS[1:] else span.name or span.kind
            yield event(track, label, span.begin, span.end, cat=span.kind)
    for group in (group for group in rank.groups if len(group.ranks) > 1):
        name = f"{group.name} (ranks {', '.join(map(str, group.ranks))})"
        for call in group.collectives:
            meeting = met.get((group.identity, call))
            last = call.met if meeting is None else min(max(meeting.last_came, call.begin), call.end)
            times = {"waiting_us": (last - call.begin) / 1e3, "moving_us": (call.end - last) / 1e3}
            args = {"number": call.number, "bytes": call.bytes, **times}
            if meeting is not None:
                args["last_rank"] = meeting.late
            yield event(name, call.operation, call.begin, call.end, cat="collective", args=args)
            if last > call.begin + 1000:
                yield event(name, "waiting", call.begin, last, cat="waiting")
        for transfer in group.transfers:
            label = f"{'to' if transfer.sent else 'from'} rank {transfer.peer}"
            both = event(f"{group.name} messages {label}", label, transfer.begin, transfer.end, cat="message")
            both |= {"id2": {"local": str(next(identity))}, "args": {"bytes": transfer.bytes, "tag": transfer.tag}}
            end = both["ts"] + both.pop("dur")  # messages overlap: a pair of events for each
            yield {**both, "ph": "b"}
            yield {**both, "ph": "e", "ts": end}
    for profiled, begin, end, track in rank.profiled:
        yield event(f"torch.profiler {track}", profiled, begin, end, cat="torch.profiler")
    for time, size in rank.memory:
        counter = {"ph": "C", "pid": process, "name": f"memory of {rank.memory_of}", "ts": (time - origin) / 1e3}
        yield {**counter, "args": {"MiB": size / 2**20}}
    yield _named("process_name", process, 0, f"rank {rank.rank} on {rank.host}")
    yield {**_named("process_sort_index", process, 0, ""), "args": {"sort_index": rank.rank}}
    for track, number in tracks.items():
        yield _named("thread_name", process, number, track)
        yield {**_named("thread_sort_index", process, number, ""), "args": {"sort_index": number}}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
