"""How ranks that share only a torch Store become a group that shares memory."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta

from weft import _C

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
) -> _C.Group:
    """Joins the group that meets at `store`; returns once every rank has mapped its memory.

    Each rank announces its process, rank 0 creates the segment, each rank opens it and says so. A rank that cannot
    says why, and every rank raises that.

    Args:
        ranks_on_machine: all ranks that compete for this machine's cores, of this group or not.
        lost_ranks: ranks of this group that are known to be gone already, looked at while waiting.

    Raises:
        ValueError: the ranks run on several machines, or different versions.
        OSError: the memory could not be had.
        RankLostError, CollectiveTimeoutError: a rank died or did not come.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    def read(key: str, from_rank: int) -> dict:
        while True:
            try:
                store.wait([key], timedelta(milliseconds=100))
                return json.loads(store.get(key))
            except RuntimeError as error:  # the store's word for "not yet"
                if from_rank in lost_ranks():
                    raise _C.RankLostError(
                        f'rank {from_rank} was lost before it joined group "{name}" (rank {rank} waited for it).'
                    ) from error
                if time.monotonic() > deadline:
                    raise _C.CollectiveTimeoutError(
                        f'rank {from_rank} did not join group "{name}" within {timeout.total_seconds():.3g} s '
                        f"(rank {rank} waited)."
                    ) from error

    store.set(f"process/{rank}", json.dumps(_describe_process()))
    processes = [read(f"process/{peer}", peer) for peer in range(world)]
    _check_one_machine(name, processes)

    staging_bytes = int(os.environ.get("WEFT_STAGING_KIB", STAGING_KIB)) * 1024
    segment_bytes = _C.Group.segment_bytes(world, staging_bytes)
    segment, error = None, None
    try:
        if staging_bytes % 4096 or staging_bytes < 4096 * max(1, world // 64):
            raise ValueError(f"WEFT_STAGING_KIB={staging_bytes // 1024} must be a positive multiple of 4")
        if rank == 0:
            segment = _C.Segment.create(segment_bytes)
            store.set("segment", json.dumps({"pid": os.getpid(), "descriptor": segment.descriptor}))
        else:
            place = read("segment", 0)
            if "error" not in place:
                segment = _C.Segment.open(place["pid"], place["descriptor"], segment_bytes)
    except (OSError, ValueError) as reason:
        error = reason
        if rank == 0:
            store.set("segment", json.dumps({"error": str(reason)}))
    store.set(f"ready/{rank}", json.dumps({"error": str(error)} if error else {}))
    if error:
        raise error
    for peer in range(world):
        state = read(f"ready/{peer}", peer)
        if "error" in state:
            raise OSError(f'rank {peer} could not join group "{name}": {state["error"]}')

    return _C.Group(
        name=name,
        rank=rank,
        segment=segment,
        ranks=[(process["pid"], process["start_time"]) for process in processes],
        staging_bytes=staging_bytes,
        timeout_s=timeout.total_seconds(),
        oversubscribed=max(world, ranks_on_machine) > len(os.sched_getaffinity(0)),
    )


def _describe_process() -> dict:
    pid = os.getpid()
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        machine = f"{os.uname().nodename}, boot {boot_id.read().strip()}, {os.readlink('/proc/self/ns/pid')}"
    return {
        "pid": pid,
        "start_time": _C.process_start_time(pid),
        "machine": machine,
        "version": _C.build["version"],
    }


def _check_one_machine(name: str, processes: list[dict]) -> None:
    for what in ("machine", "version"):
        places = {process[what] for process in processes}
        if len(places) > 1:
            raise ValueError(
                f'the ranks of group "{name}" differ in {what}: {"; ".join(sorted(places))}. The weft backend joins '
                "processes of one machine and one process namespace that run one version of weft."
            )
