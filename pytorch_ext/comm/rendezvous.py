"""How ranks that share only a torch Store become a group: of shared memory, or of several machines."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from weft import _C
from weft.comm.engine import Engine
from weft.comm.multi_host import SpanningEngine

STAGING_KIB = 256  # of one buffer; two a rank. Chosen so that what two ranks exchange stays in the caches.


def join(
    store,
    rank: int,
    world: int,
    *,
    name: str,
    timeout: timedelta,
    ranks_on_machine: int,
    lost_ranks: Callable[[], list[int]] = list,
) -> Engine | SpanningEngine:
    """Joins the group that meets at `store`; returns once every rank has mapped the memory of its machine.

    Each rank announces its process and machine. On each machine the first rank creates a segment, the others open it
    and say so; a rank that cannot says why, and all on that machine raise it. Machines are then joined over gloo.

    Args:
        ranks_on_machine: all ranks that compete for this machine's cores, of this group or not.
        lost_ranks: ranks of this group that are known to be gone already, looked at while waiting.

    Raises:
        ValueError: the ranks run different versions. OSError: the memory could not be had.
        RankLostError: a rank died after it announced itself. CollectiveTimeoutError: a rank did not come.
    """
    meeting = _Rendezvous(store, name, rank, timeout, lost_ranks, labels=list(range(world)))
    meeting.announce(f"process/{rank}", _describe_process())
    processes = [meeting.read(f"process/{peer}", peer) for peer in range(world)]
    _check_one_version(name, processes)
    hosts = _hosts(processes)
    if len(hosts) == 1:
        meeting.processes = processes
        engine: Engine | SpanningEngine = Engine(_share_memory(meeting, ranks_on_machine))
    else:
        neighbours = next(host for host in hosts if rank in host)
        inside = _Rendezvous(
            dist.PrefixStore(f"host of {neighbours[0]}", store),
            name,
            neighbours.index(rank),
            timeout,
            lambda: [neighbours.index(lost) for lost in lost_ranks() if lost in neighbours],
            labels=neighbours,
        )
        inside.processes = [processes[neighbour] for neighbour in neighbours]
        local = Engine(_share_memory(inside, min(ranks_on_machine, len(neighbours))))
        if rank == 0:  # its own place in the store, which no earlier group of this name has used
            meeting.announce("token", {"token": secrets.token_hex(8)})
        token = meeting.read("token", 0)["token"]
        engine = SpanningEngine(local, hosts, rank, dist.PrefixStore(token, store), name, timeout)
        inside.clear()
    meeting.clear()  # every rank has read everything: joining was a barrier
    return engine


def _share_memory(meeting: "_Rendezvous", ranks_on_machine: int) -> _C.Group:
    """The group of the ranks of one machine, whose processes the meeting knows."""
    rank, processes = meeting.rank, meeting.processes
    world = len(processes)
    segment, error = None, None
    try:
        staging_kib = os.environ.get("WEFT_STAGING_KIB", str(STAGING_KIB))
        staging_bytes = int(staging_kib) * 1024 if staging_kib.isdecimal() else 0
        if staging_bytes % 4096 or staging_bytes < max(4096, 64 * world):
            raise ValueError(f"WEFT_STAGING_KIB={staging_kib} must be a multiple of 4, and at least 64 bytes a rank")
        segment_bytes = _C.Group.segment_bytes(world, staging_bytes)
        if rank == 0:
            segment = _C.Segment.create(segment_bytes)
            meeting.announce("segment", {"pid": os.getpid(), "descriptor": segment.descriptor})
        else:
            place = meeting.read("segment", 0)
            if "error" not in place:
                with meeting.losing_ranks():
                    segment = _C.Segment.open(place["pid"], place["descriptor"], segment_bytes)
    except (OSError, ValueError, _C.RankLostError) as reason:
        error = reason
        if rank == 0:
            meeting.announce("segment", {"error": str(reason)})
    lost = isinstance(error, _C.RankLostError)
    meeting.announce(f"ready/{rank}", {"error": str(error), "lost": lost} if error else {})
    if error:
        raise error
    for peer in range(world):
        state = meeting.read(f"ready/{peer}", peer)
        if "error" in state:
            if state["lost"]:
                raise _C.RankLostError(state["error"])
            raise OSError(f'rank {meeting.labels[peer]} could not join group "{meeting.name}": {state["error"]}')

    assert segment is not None  # every rank is ready
    with meeting.losing_ranks():
        return _C.Group(
            name=meeting.name,
            rank=rank,
            segment=segment,
            ranks=[(process["pid"], process["start_time"]) for process in processes],
            staging_bytes=staging_bytes,
            timeout_s=meeting.timeout_s,
            oversubscribed=max(world, ranks_on_machine) > len(os.sched_getaffinity(0)),
            labels=meeting.labels,
        )


def _hosts(processes: list[dict]) -> list[list[int]]:
    """The ranks of each machine, machines in the order of their first ranks."""
    machines = list(dict.fromkeys(process["machine"] for process in processes))
    return [[rank for rank, process in enumerate(processes) if process["machine"] == machine] for machine in machines]


class _Rendezvous:
    """The exchange of a few notes through the store, with an eye on who is still there."""

    def __init__(
        self, store, name: str, rank: int, timeout: timedelta, lost_ranks: Callable[[], list[int]], labels: list[int]
    ):
        self.store, self.name, self.rank, self.timeout_s = store, name, rank, timeout.total_seconds()
        self.labels = labels  # what errors call the ranks
        self.deadline = time.monotonic() + self.timeout_s
        self.lost_ranks = lost_ranks
        self.processes: list[dict] = []  # once they are known, their lives are watched
        self.announced: list[str] = []

    def announce(self, key: str, note: dict) -> None:
        self.store.set(key, json.dumps(note))
        self.announced.append(key)

    def read(self, key: str, from_rank: int) -> dict:
        pause_s = 0.0005
        try:
            while not self.store.check([key]):
                if self._gone(from_rank):
                    raise self._lost([from_rank])
                if time.monotonic() > self.deadline:
                    raise _C.CollectiveTimeoutError(
                        f'rank {self.labels[from_rank]} did not join group "{self.name}" within '
                        f"{self.timeout_s:.3g} s (rank {self.labels[self.rank]} waited)."
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
            return json.loads(self.store.get(key))
        except dist.DistError as error:  # the store itself: its host has gone, say
            raise _C.CommError(
                f'rank {self.labels[self.rank]} lost the store while it joined group "{self.name}": {error}'
            ) from error

    @contextlib.contextmanager
    def losing_ranks(self) -> Iterator[None]:
        """What the system refuses because a rank has gone, its memory with it, is told as the loss of that rank."""
        try:
            yield
        except OSError as error:
            lost = [rank for rank in range(len(self.processes)) if self._gone(rank)]
            if lost:
                raise self._lost(lost) from error
            raise

    def _lost(self, ranks: list[int]) -> _C.RankLostError:
        names = ", ".join(str(self.labels[rank]) for rank in ranks)
        told = f"rank {names} was lost before it" if len(ranks) == 1 else f"ranks {names} were lost before they"
        return _C.RankLostError(f'{told} joined group "{self.name}" (rank {self.labels[self.rank]} waited).')

    def clear(self) -> None:
        """A later group of the same name at the same store must not read these notes."""
        for key in self.announced:
            with contextlib.suppress(RuntimeError):  # a store that cannot delete, or has gone with its host
                self.store.delete_key(key)

    def _gone(self, rank: int) -> bool:
        if rank in self.lost_ranks():
            return True
        if not self.processes:
            return False
        process = self.processes[rank]
        try:
            started = _C.process_start_time(process["pid"])
        except OSError:  # no descriptor left, say: nothing is known of the rank
            return False
        return started != process["start_time"] or _is_zombie(process["pid"])


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"
    return False


def _describe_process() -> dict:
    pid = os.getpid()
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        machine = f"{os.uname().nodename}, boot {boot_id.read().strip()}, {os.readlink('/proc/self/ns/pid')}"
    return {
        "pid": pid,
        "start_time": _C.process_start_time(pid),
        "machine": os.environ.get("WEFT_HOST", machine),
        "version": _C.build["version"],
    }


def _check_one_version(name: str, processes: list[dict]) -> None:
    versions = {process["version"] for process in processes}
    if len(versions) > 1:
        raise ValueError(
            f'the ranks of group "{name}" run different versions of weft: {", ".join(sorted(versions))}; '
            "install the same everywhere"
        )
