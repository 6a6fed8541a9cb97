"""Joining of ranks that share only a torch Store into a group, in shared memory or over several machines."""

import contextlib
import errno
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weft import _C
from weft.comm.engine import Engine
from weft.comm.multi_host import SpanningEngine

STAGING_KIB = 256  # per buffer, two buffers a rank; small enough that an exchange of two ranks stays in the caches


def join(
    store,
    rank: int,
    world: int,
    *,
    name: str,
    timeout: timedelta,
    ranks_on_machine: int,
    lost_ranks: Callable[[], list[int]] = list,
    members: Sequence[int] = (),
) -> Engine | SpanningEngine:
    """Join the group that meets at `store`; return once every rank has mapped the memory of its machine.

    Each rank announces its process and machine. On each machine the first rank creates a segment, and the others open
    it and confirm. If a rank cannot, it announces the reason, and all ranks of that machine raise it. Machines are then
    connected over gloo.

    Args:
        store: a torch Store that all ranks of the group share.
        rank: this rank in the group.
        world: ranks in the group.
        name: the group's name in errors.
        timeout: time limit of joining, and of each later wait.
        ranks_on_machine: ranks that compete for this machine's cores, including those of other groups.
        lost_ranks: returns the ranks of this group that are known to be gone; called while waiting.
        members: the group's ranks in the default group, as this rank passed them to `new_group`.

    Raises:
        ValueError: the ranks run different versions, or passed different ranks to `new_group`.
        OSError: the memory cannot be allocated or opened.
        RankLostError: a rank died after it announced itself.
        CollectiveTimeoutError: a rank did not come in time.
    """
    labels = list(members or range(world))  # errors name the program's ranks
    meeting = _Rendezvous(store, name, rank, timeout, lost_ranks, labels)
    meeting.members = list(members)
    meeting.announce(f"process/{rank}", {**_describe_process(), "members": meeting.members})
    processes = [meeting.read(f"process/{peer}", peer) for peer in range(world)]
    _check_alike(name, meeting.members, processes)
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
            labels=[labels[neighbour] for neighbour in neighbours],
        )
        inside.processes = [processes[neighbour] for neighbour in neighbours]
        local = Engine(_share_memory(inside, min(ranks_on_machine, len(neighbours))))
        if rank == 0:  # a prefix of the store that no earlier group of this name has used
            meeting.announce("token", {"token": secrets.token_hex(8)})
        token = meeting.read("token", 0)["token"]
        engine = SpanningEngine(local, hosts, rank, dist.PrefixStore(token, store), name, timeout, labels)
        inside.clear()
    meeting.clear()  # joining was a barrier, so every rank has read everything
    return engine


def _share_memory(meeting: "_Rendezvous", ranks_on_machine: int) -> _C.Group:
    """Return the group of the ranks of this machine, given in `meeting.processes`."""
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
            _C.Group.reserve(segment, rank, world, staging_bytes)
            meeting.announce("segment", {"descriptor": segment.descriptor})
        else:
            place = meeting.read("segment", 0)
            if "error" not in place:
                with meeting.losing_ranks():
                    segment = _C.Segment.open(processes[0]["key"], place["descriptor"], segment_bytes)
                _C.Group.reserve(segment, rank, world, staging_bytes)
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
    oversubscribed = _oversubscribed(processes, ranks_on_machine)
    with meeting.losing_ranks():
        return _C.Group(
            name=meeting.name,
            rank=rank,
            segment=segment,
            ranks=[(process["pid"], process["key"]) for process in processes],
            staging_bytes=staging_bytes,
            timeout_s=meeting.timeout_s,
            oversubscribed=oversubscribed,
            labels=meeting.labels,
            single_copy=os.environ.get("WEFT_SINGLE_COPY", "1") != "0",
            threads=1 if oversubscribed else _threads(processes, rank, ranks_on_machine),
        )


def _oversubscribed(processes: list[dict], ranks_on_machine: int) -> bool:
    """Return whether ranks of this machine must share cores, so that none may spin.

    Ranks with the same affinity mask are taken to share it with all ranks of the machine, ranks with different masks to
    have been given their cores.
    """
    masks = {tuple(process["cores"]) for process in processes}
    cores = set().union(*masks)
    if (ranks_on_machine if len(masks) == 1 else len(processes)) > len(cores):
        return True
    by_cgroup = Counter(process["cgroup"] for process in processes)
    return any(by_cgroup[process["cgroup"]] > process["cpu_quota"] for process in processes)


def _threads(processes: list[dict], rank: int, ranks_on_machine: int) -> int:
    """Return how many threads share a rank's copies and sums: torch's, as far as the other ranks leave cores for them.

    Ranks that may run on one of this rank's cores are taken to be as many as those of the machine.
    """
    own = processes[rank]
    cores = set(own["cores"])
    alone = all(peer == rank or cores.isdisjoint(process["cores"]) for peer, process in enumerate(processes))
    in_cgroup = sum(process["cgroup"] == own["cgroup"] for process in processes)
    usable = min(len(cores) // (1 if alone else max(ranks_on_machine, len(processes))), own["cpu_quota"] // in_cgroup)
    return max(1, min(torch.get_num_threads(), int(usable)))


def _cpu_quota() -> float:
    """Return the number of cores' time that this process's container may use."""
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()
        if quota != "max":
            return int(quota) / int(period)
    return math.inf


def _cgroup() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        return f"{os.readlink('/proc/self/ns/cgroup')} {file.read()}"
    return ""


def _hosts(processes: list[dict]) -> list[list[int]]:
    """Return the ranks of each machine, in the order of the machines' first ranks."""
    machines = list(dict.fromkeys(process["machine"] for process in processes))
    return [[rank for rank, process in enumerate(processes) if process["machine"] == machine] for machine in machines]


class _Rendezvous:
    """Exchange of short messages through the store, which watches for lost ranks."""

    def __init__(
        self, store, name: str, rank: int, timeout: timedelta, lost_ranks: Callable[[], list[int]], labels: list[int]
    ):
        self.store, self.name, self.rank, self.timeout_s = store, name, rank, timeout.total_seconds()
        self.labels = labels  # names of the ranks in errors
        self.deadline = time.monotonic() + self.timeout_s
        self.lost_ranks = lost_ranks
        self.processes: list[dict] = []  # watched once known
        self.announced: list[str] = []
        self.members: list[int] = []

    def announce(self, key: str, message: dict) -> None:
        self.store.set(key, json.dumps(message))
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
                        f"{self.timeout_s:.3g} s (rank {self.labels[self.rank]} waited).{self._asked()}"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
            return json.loads(self.store.get(key))
        except dist.DistError as error:  # the store failed, for example because its host is gone
            raise _C.CommError(
                f'rank {self.labels[self.rank]} lost the store while it joined group "{self.name}": {error}'
            ) from error

    @contextlib.contextmanager
    def losing_ranks(self) -> Iterator[None]:
        """Turn an OSError into the loss of a rank if one is gone, because its memory is gone with it.

        Where this process lacks descriptors or memory, a rank that is gone may have left for that reason.
        """
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            lost = [rank for rank in range(len(self.processes)) if self._gone(rank)]
            if lost:
                raise self._lost(lost) from error
            raise

    def _lost(self, ranks: list[int]) -> _C.RankLostError:
        names = ", ".join(str(self.labels[rank]) for rank in ranks)
        loss = f"rank {names} was lost before it" if len(ranks) == 1 else f"ranks {names} were lost before they"
        return _C.RankLostError(
            f'{loss} joined group "{self.name}" (rank {self.labels[self.rank]} waited).{self._asked()}'
        )

    def _asked(self) -> str:
        known = self.members and not self.processes
        return f" It has the ranks {self.members}: does each of them pass these to new_group?" if known else ""

    def clear(self) -> None:
        """Delete this rank's messages: a later group of the same name at the same store must not read them."""
        for key in self.announced:
            with contextlib.suppress(RuntimeError):  # the store cannot delete, or is gone with its host
                self.store.delete_key(key)

    def _gone(self, rank: int) -> bool:
        if rank in self.lost_ranks():
            return True
        if not self.processes:
            return False
        with contextlib.suppress(OSError):  # for example no descriptor left; the rank's state is unknown
            return _C.has_ended(self.processes[rank]["key"])
        return False


def _describe_process() -> dict:
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        machine = f"{os.uname().nodename}, boot {boot_id.read().strip()}, {os.readlink('/proc/self/ns/net')}"
    return {
        "pid": os.getpid(),
        "key": _C.process_key(),
        "machine": os.environ.get("WEFT_HOST", machine),
        "version": _C.build["version"],
        "cores": sorted(os.sched_getaffinity(0)),
        "cpu_quota": _cpu_quota(),
        "cgroup": _cgroup(),
    }


def _check_alike(name: str, members: list[int], processes: list[dict]) -> None:
    for process in processes:
        if process["members"] != members:
            raise ValueError(
                f'group "{name}": this rank passed the ranks {members} to new_group, and another rank passed '
                f"{process['members']} in the same call: pass the same ranks on every rank, and call new_group for "
                "each group on every rank"
            )
    versions = {process["version"] for process in processes}
    if len(versions) > 1:
        raise ValueError(
            f'the ranks of group "{name}" run different versions of weft: {", ".join(sorted(versions))}; '
            "install the same everywhere"
        )
