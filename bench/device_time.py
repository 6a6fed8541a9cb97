"""The measurement of the GPU benches: calls in alternation, cold L2, eager and as CUDA graphs, and two ceilings."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from weft.bench import progress
from weft.bench.measure import ROUNDS, Quantiles
from weft.bench.table import Row
from weft.ops import kernel_choice
from weft.testing.tolerance import assert_close
from weft.tools import tuning

LIMIT = (
    "the rates of a large bf16 product and of a large copy, measured in the same run; a call that reads more than it "
    "writes may pass the copy's"
)
_HOST_CALLS = 3


@dataclass(frozen=True)
class Contest:
    """Our call and the peers' calls of one computation.

    Attributes:
        check: Runs ours and raises AssertionError if it is wrong.
        operations: Floating-point operations of one call; 0 if memory bounds it.
        moved_bytes: Least bytes that one call reads and writes in device memory.
        eager: Names of calls that no CUDA graph captures; replays of the others are timed too.
        facts: Further entries of the row.
    """

    op: str
    shape: str
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]
    check: Callable[[], None]
    operations: float
    moved_bytes: float
    eager: Collection[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ceilings:
    """Rates that this device reaches, in 10^12 operations and 10^12 bytes a second."""

    tera_operations: float
    terabytes: float


@cache
def ceilings() -> Ceilings:
    """Measure the ceilings by the library's bf16 product of 8192^3 and a copy of 2 GiB, counted as read and written.

    A process measures them once.
    """
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here, and this bench measures nothing else")
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    times = alternate({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds=ROUNDS)
    return Ceilings(2 * 8192**3 / times["product"].p50_us / 1e6, 2 * source.nbytes / times["copy"].p50_us / 1e6)


def alternate(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Quantiles]:
    """Return the quantiles over rounds of each call's time on the device, with a cold L2."""
    if not calls:  # no call of the contest can be captured
        return {}
    samples = tuning.device_us(calls, torch.device("cuda"), rounds, progress.set_round)
    return {name: Quantiles.of(times) for name, times in samples.items()}


def contest_of(
    op: str,
    shape: str,
    calls: tuning.TileCalls,
    dtype: torch.dtype,
    peer: str,
    operations: float,
    moved_bytes: float,
    facts: Mapping[str, Any] = MappingProxyType({}),
    tiles: Iterable[Any] = (),
) -> Contest:
    """Return the contest of our call, with the tile that its kernel chooses, and of the library's, called `peer`.

    Args:
        tiles: Further tiles of our kernel, each a contender of its own.
    """

    def ours() -> torch.Tensor:
        return calls.ours(None)

    def library() -> torch.Tensor:
        with kernel_choice.prefer("library"):
            return calls.library()

    of_tiles: dict[str, Callable[[], torch.Tensor]] = {f"ours {tile}": partial(calls.ours, tile) for tile in tiles}

    def check() -> None:
        for name, call in [("ours", ours), *of_tiles.items()]:
            result = calls.first_rows(call)
            # The tolerance is of a rounded product: cuBLAS may sum fp32 in pieces, closer than one chain of tensor
            # cores.
            plain = calls.first_rows(library).to(dtype).to(result.dtype)
            assert_close(result, plain, calls.exact, f"{op} {shape} {name}")

    return Contest(op, shape, ours, {peer: library, **of_tiles}, check, operations, moved_bytes, facts=facts)


def measure(contests: Iterable[Contest], rounds: int) -> list[Row]:
    """Return a row for each contest; each first checks the result of our call.

    Inside of `keeping` a contest that raises costs its own row.

    Raises:
        SystemExit: There is no CUDA device; no contest was made.
    """
    limits, rows = ceilings(), []
    for contest in contests:
        try:
            rows.append(_measure(contest, limits, rounds))
        except Exception as error:
            if len(_keep) == 1:
                raise
            why = f"FAULT: {type(error).__name__}: {str(error).strip()[:300]}"
            rows.append(Row({"op": contest.op, "shape": contest.shape}, remark=why))
        keep(rows[-1])
    return rows


_keep: list[Callable[[Row], None]] = [lambda row: None]


def keep(row: Row) -> Row:
    """Hand a row to the innermost `keeping`, and return it."""
    _keep[-1](row)
    return row


@contextlib.contextmanager
def keeping(store: Callable[[Row], None]) -> Iterator[None]:
    """Hand every row that is measured inside to `store` at once, so that the end of the process loses none."""
    _keep.append(store)
    try:
        yield
    finally:
        _keep.pop()


def _measure(contest: Contest, limits: Ceilings, rounds: int) -> Row:
    contest.check()
    peers, remark = _that_run(contest.peers)
    calls = {"ours": contest.ours, **peers}
    called = alternate(calls, rounds)
    graphs = {
        name: graph
        for name, call in calls.items()
        if name not in contest.eager and (graph := _captured(call)) is not None
    }
    replayed = alternate({name: graph.replay for name, graph in graphs.items()}, rounds)
    others = [name for name in peers if not name.startswith("ours")]  # others of our tiles are no peers
    best = min(others, key=lambda name: called[name].p50_us, default=None)
    floor_us = max(contest.operations / limits.tera_operations, contest.moved_bytes / limits.terabytes) / 1e6
    graph_us = {name: replayed[name].p50_us if name in replayed else None for name in calls}
    facts = {
        **contest.facts,
        "graph_us": graph_us,  # as replays of a CUDA graph; None if the call cannot be captured
        "of_ceiling": floor_us / called["ours"].p50_us,  # the nearer of the two
        "host_us": {name: _host_us(call) for name, call in calls.items()},  # until the call returns, on an idle device
        "peak_bytes": {name: peak_bytes(call) for name, call in calls.items()},  # beyond the memory before the call
    }
    return Row({"op": contest.op, "shape": contest.shape}, called, best, facts, remark)


def _that_run(peers: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Callable[[], object]], str]:
    """Return the peers that run here, and why the others do not: they raise, or have no memory left."""
    found, failed = {}, []
    for name, call in peers.items():
        try:
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:  # a compiler's or a library's own
            failed.append(f"{name} left out: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")
            torch.cuda.empty_cache()
    return found, "; ".join(failed)


def _host_us(call) -> float:
    samples = []
    for _ in range(_HOST_CALLS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) * 1e6)
    return median(samples)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes of device memory that a call holds beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _captured(call) -> torch.cuda.CUDAGraph | None:
    """Return the call as a CUDA graph; None if it cannot be captured (for example, a peer that synchronises)."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with torch.cuda.graph(graph, stream=stream):  # a bucket's addresses are known on the stream of its first call
            call()
    except Exception:  # torch's RuntimeError for an operation that capture does not permit, or a compiler's own
        torch.cuda.set_stream(before)  # torch leaves the stream of the capture only if the capture ends well
        torch.cuda.synchronize()
        return None
    return graph


def geometric_mean(ratios: Iterable[float]) -> float:
    return torch.tensor(list(ratios), dtype=torch.float64).log().mean().exp().item()
