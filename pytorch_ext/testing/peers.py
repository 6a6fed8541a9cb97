"""Launcher of kernels that cross ranks: as processes in Triton's interpreter, or as virtual ranks on one GPU."""

import random
import time
from collections.abc import Callable, Sequence

import torch

from weft.comm.registry import communicator
from weft.comm.symmetric_memory import open_symmetric_memory
from weft.kernels import interpreted, launch, signal
from weft.ops.overlap.workspace import peers_of
from weft.testing.ranks import run_ranks

_TIMEOUT_S = 20.0


def run_as_ranks(
    function: Callable,
    world: int,
    bytes: int,
    device: torch.device,
    *args,
    seed: int | None = None,
    timeout_s: float = _TIMEOUT_S,
):
    """Return [function(peers, *args) for each rank], with all ranks running together.

    Args:
        function: Launches kernels and returns tensors on the peers' device, without synchronizing.
        world: Number of ranks.
        bytes: Size of each rank's window.
        seed: Delays ranks at random wherever they meet (on a GPU: before they begin); None for no delays.
        timeout_s: Longest wait of a kernel on a GPU.

    Raises:
        AssertionError: A wait timed out, or a flag or a counter is not 0 at the end.
    """
    if device.type == "cuda":
        return _as_streams(function, world, bytes, device, args, seed, timeout_s)
    return run_ranks(_as_process, world, function, bytes, args, seed, timeout_s=200)


def _as_process(rank: int, function, bytes: int, args, seed):
    ranks = communicator(None)
    device = torch.device("cpu")
    record = ranks.record(device)
    peers = peers_of(open_symmetric_memory(ranks, bytes, device), record)
    if seed is not None:
        delay_meetings(seed + rank)
    result = function(peers, *args)
    torch.distributed.barrier()  # flags are 0 once all ranks are done
    check_idle(peers)
    record.check()
    torch.distributed.barrier()  # the others would take a rank that leaves for lost
    return result


def _as_streams(function, world: int, bytes: int, device: torch.device, args, seed, timeout_s):
    torch.cuda.synchronize()
    peers = virtual_peers(world, bytes, device, timeout_s)
    streams = [torch.cuda.Stream(device) for _ in peers]
    _rehearse(function, peers, streams, args)
    random_cycles = random.Random(seed)
    results = []
    for local, stream in zip(peers, streams, strict=True):
        with torch.cuda.stream(stream):
            if seed is not None:
                torch.cuda._sleep(random_cycles.randrange(2_000_000))
            results.append(function(local, *args))
    torch.cuda.synchronize()
    for local in peers:
        assert not local.record.any(), f"rank {local.rank} left {local.record.tolist()}"
        check_idle(local)
    return results


def _rehearse(function, peers: list[signal.Peers], streams: list[torch.cuda.Stream], args) -> None:
    """Run each rank alone, with waits that end at once, to load code, make tables and allocate memory now.

    Later the host would wait for that while another rank's kernel waits for the host. Memory that is freed here serves
    the same stream again.
    """
    for local, stream in zip(peers, streams, strict=True):
        local.record[0] = 3
        with torch.cuda.stream(stream):
            function(local, *args)
        torch.cuda.synchronize()
    for local in peers:
        for memory in (local.memory, local.counters, local.spoiled, local.record):
            memory.zero_()
    torch.cuda.synchronize()


def virtual_peers(world: int, bytes: int, device: torch.device, timeout_s: float = _TIMEOUT_S) -> list[signal.Peers]:
    """Return every rank's view of windows that lie on one GPU.

    Each rank has a share of the multiprocessors, so that the kernels of all ranks run at the same time.
    """
    windows = [torch.zeros(bytes, dtype=torch.uint8, device=device) for _ in range(world)]
    processors = max(1, launch.multiprocessors(device) // (4 * world))
    return [_peers_on(windows, rank, timeout_s, processors) for rank in range(world)]


def _peers_on(windows: Sequence[torch.Tensor], rank: int, timeout_s: float, processors: int) -> signal.Peers:
    at, device = tuple(window.data_ptr() for window in windows), windows[rank].device
    return signal.Peers(
        rank=rank,
        memory=windows[rank],
        at=at,
        addresses=torch.tensor(at, device=device),
        counters=torch.zeros(signal.FLAGS, dtype=torch.int32, device=device),
        spoiled=torch.zeros(1, dtype=torch.int32, device=device),
        record=torch.zeros(signal.RECORD_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda"),
        timeout_us=int(timeout_s * 1e6),
        processors=processors,
    )


def delay_meetings(seed: int, longest_s: float = 0.02) -> None:
    """Delay this process at random at the meetings of ranks from now on (in the interpreter)."""
    choose = random.Random(seed)

    def delay() -> None:
        if choose.random() < 0.3:
            time.sleep(choose.random() * longest_s)

    interpreted.at_meeting = delay


def check_idle(peers: signal.Peers) -> None:
    """Check that every flag and counter is 0, as between calls."""
    assert not peers.memory[: signal.DATA_OFFSET].any(), f"rank {peers.rank}: a flag is still set"
    assert not peers.counters.any(), f"rank {peers.rank}: a counter is not 0"


def abandoned(device: torch.device, rank: int, timeout_s: float, bytes: int) -> signal.Peers:
    """Return one of two ranks; the other rank never arrives."""
    return _peers_on(torch.zeros(2, bytes, dtype=torch.uint8, device=device).unbind(), rank, timeout_s, processors=1)
