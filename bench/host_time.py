"""The host's time for a product and its communication: until the call returns, on an idle device.

Ours are virtual ranks: one thread calls for all, so the time is divided by their number. Torch's async tensor
parallelism runs in a process a rank. The processes share this GPU, and the time is the slower rank's.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from weft import _C
from weft.bench.measure import Quantiles, slowest_rank
from weft.bench.table import Row, not_measured
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.chunks import Rows
from weft.kernels.matmul_reduce_scatter import Inbox, matmul_reduce_scatter
from weft.kernels.signal import Peers
from weft.ops.overlap.peer_copies import start_gathering, window_bytes
from weft.sharding.sizes import split_sizes
from weft.testing.peers import virtual_peers
from weft.testing.ranks import RanksFailedError, run_ranks
from weft.tools.rounds import in_turn

WORLD = 2
TOKENS, WIDTH, DEPTH = 1024, 2048, 2048
GATHERED, SCATTERED = "all_gather + matmul", "matmul + reduce_scatter"
PEER = "torch's async TP"

_WARM_UP = 3
_TIMEOUT_S = 120.0

Calls = dict[str, Callable[[], object]]


def lines(rounds: int) -> Iterator[Row]:
    shape = f"{TOKENS}x{WIDTH}x{DEPTH} W={WORLD}"
    if _C.cuda is None:
        yield from (not_measured(f"host: {name}", shape, "this weft was built without CUDA") for name in OURS)
        return
    found, reason = theirs(rounds)
    for name, times in ours(rounds).items():
        peers = {PEER: found[name]} if name in found else {}
        remark = "" if peers else f"{PEER} not measured: {reason}"
        yield Row({"op": f"host: {name}", "shape": shape}, {"ours": times, **peers}, PEER, remark=remark)


def ours(rounds: int) -> dict[str, Quantiles]:
    """Return the times of our calls for one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [torch.cuda.Stream(device) for _ in range(WORLD)]
    found = {}
    for name, prepare in OURS.items():
        bytes, run = prepare(device, WORLD)
        peers = virtual_peers(WORLD, bytes, device, _TIMEOUT_S)

        def call(run=run, peers=peers):
            for local, stream in zip(peers, streams, strict=True):
                with torch.cuda.stream(stream):
                    run(local)

        _load(prepare, peers[0].processors, device)
        samples = host_us({name: call}, rounds, meet=lambda: None)[name]
        if any(local.record.any() for local in peers):
            raise AssertionError(f"{name}: a rank waited in vain: {[local.record.tolist() for local in peers]}")
        found[name] = Quantiles.of([sample / WORLD for sample in samples])
    return found


def _load(prepare, processors: int, device: torch.device) -> None:
    """Run one rank by itself, so that kernels are compiled and loaded while no rank waits for the host."""
    bytes, run = prepare(device, 1)
    run(replace(virtual_peers(1, bytes, device)[0], processors=processors))
    torch.cuda.synchronize()


def _gathered(device: torch.device, world: int) -> tuple[int, Callable[[Peers], object]]:
    """Return the bytes of a window, and the call of each of `world` ranks, for all_gather + matmul."""
    sizes = split_sizes(TOKENS, world)
    x = torch.randn(sizes[0], DEPTH, device=device).bfloat16()
    b = torch.randn(WIDTH, DEPTH, device=device).bfloat16().t()

    def run(peers: Peers):
        gathering = start_gathering(peers, x, 0, sizes)
        y, _ = all_gather_matmul(gathering.whole, b, gathering.arrivals)
        return y, gathering.finish()

    return window_bytes(x, 0, sizes), run


def _scattered(device: torch.device, world: int) -> tuple[int, Callable[[Peers], object]]:
    """Return the same two for matmul + reduce_scatter."""
    a = torch.randn(TOKENS, DEPTH, device=device).bfloat16()
    b = torch.randn(WIDTH, DEPTH, device=device).bfloat16().t()
    rows = Rows.of((TOKENS, WIDTH), 0, split_sizes(TOKENS, world))
    bytes = Inbox(rows, WIDTH, a.dtype).window_bytes(sums=False)
    return bytes, lambda peers: matmul_reduce_scatter(a, b, peers, rows)


OURS = {GATHERED: _gathered, SCATTERED: _scattered}


def theirs(rounds: int) -> tuple[dict[str, Quantiles], str]:
    """Return the times of torch's calls on the slower rank, or no times and the reason."""
    if not torch.cuda.is_available():
        return {}, "there is no CUDA device here"
    environment = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        per_rank = run_ranks(
            _async_tp,
            WORLD,
            rounds,
            backend="gloo",
            timeout_s=2 * _TIMEOUT_S,
            group_timeout_s=_TIMEOUT_S,
            environment=environment,
            start="spawn",
        )
    except RanksFailedError as error:
        return {}, str(error).splitlines()[0]
    return slowest_rank(per_rank), ""


def _async_tp(rank: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of each of torch's calls on one rank."""
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions enable it themselves and warn
        symmetric.enable_symm_mem_for_group(name)
    x_shard = torch.randn(TOKENS // WORLD, DEPTH, device=device).bfloat16()
    a = torch.randn(TOKENS, DEPTH, device=device).bfloat16()
    b = torch.randn(WIDTH, DEPTH, device=device).bfloat16().t()
    fused = torch.ops.symm_mem
    calls: Calls = {
        GATHERED: lambda: fused.fused_all_gather_matmul(x_shard, [b], 0, name),
        SCATTERED: lambda: fused.fused_matmul_reduce_scatter(a, b, "sum", 0, name),
    }
    return host_us(calls, rounds, meet=dist.barrier)


def host_us(calls: Calls, rounds: int, meet: Callable[[], object]) -> dict[str, list[float]]:
    """Return the microseconds until each call returns, in alternation.

    Before each call the ranks meet and the device is idle.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call, counts in in_turn(calls, rounds, _WARM_UP):
        torch.cuda.synchronize()
        meet()
        start = time.perf_counter()
        call()
        elapsed_us = (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
        if counts:
            samples[name].append(elapsed_us)
    return samples
