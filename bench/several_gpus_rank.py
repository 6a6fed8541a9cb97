"""One rank of `weft bench several_gpus`: the calls, their checks and their times.

Our tensors are ordinary or symmetric (`weft.empty_symmetric`). With "any order" the switch sums, if there is one.

NCCL's tensors are ordinary, or lie in a pool of its own memory that is registered as a symmetric window. Its symmetric
kernels need such a window (NCCL 2.27 and later; PyTorch's page on symmetric memory). They are for one NVLink domain;
elsewhere NCCL silently takes its other kernels.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.nn.functional import rms_norm

import weft
from weft.bench.peer_collectives import Peer, first_line, open_peers
from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.ops.overlap import products
from weft.sharding.sizes import split_sizes
from weft.testing.tolerance import assert_close
from weft.tools.rounds import in_turn

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
ORDINARY, SYMMETRIC, ANY_ORDER = "ordinary", "symmetric", "symmetric, any order"
NCCL, NCCL_SYMMETRIC = "NCCL", "NCCL symmetric"
TORCH = ("one_shot", "two_shot", "multimem")  # torch's own all_reduce in its symmetric memory
ONE_KERNEL, THREE_CALLS, NCCL_CALLS = "one kernel", "weft.all_reduce, add, rms_norm", "NCCL, add, rms_norm"
OVERLAPPED, APART, LIBRARY = "overlapped", 'overlap="never"', "torch.matmul, NCCL"
LAYERS = {  # how the product communicates: layers with this forward
    "all_gather": ("qkv", "rise"),
    "reduce_scatter": ("attention out", "fall"),
    "all_reduce": ("attention out", "fall"),
}
_TITLES = {
    "all_gather": "all_gather + matmul",
    "reduce_scatter": "matmul + reduce_scatter",
    "all_reduce": "matmul + all_reduce",
}

_DTYPE = torch.bfloat16
_CHECKED = 64  # rows of a product compared with fp64
_EPS = 1e-5
_PERIOD = 1009  # of the numbers of a collective's check
_SMALL_BYTES = 1 << 20
_SYMMETRIC_SINCE = (2, 27)

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Collective:
    """Collective on a tensor of `bytes` bytes over all ranks, rounded down to 16 bytes a rank."""

    op: str
    bytes: int
    world: int

    @property
    def count(self) -> int:
        each = max(1, self.bytes // (16 * self.world)) * 16
        return each * self.world // _DTYPE.itemsize

    def kinds(self) -> list[str]:
        """Return the kinds of memory of our calls."""
        return [ORDINARY, SYMMETRIC, *([ANY_ORDER] if self.op == "all_reduce" else [])]

    def shapes(self) -> list[str]:
        size = f"{self.bytes >> 20} MiB" if self.bytes >= 1 << 20 else f"{self.bytes >> 10} KiB"
        return [f"{size} bfloat16 W={self.world} {kind}" for kind in self.kinds()]


@dataclass(frozen=True)
class Product:
    """Product [m, k] times [k, n] on each rank, with the m rows shared by the ranks."""

    how: str
    label: str
    m: int
    n: int
    k: int

    @property
    def op(self) -> str:
        return _TITLES[self.how]

    def shapes(self) -> list[str]:
        return [f"{self.label} {self.m}x{self.n}x{self.k}"]


@dataclass(frozen=True)
class Norm:
    """Sum of [rows, hidden] over all ranks, with the residual's addition and the RMS norm."""

    rows: int
    hidden: int
    world: int
    op = "all_reduce_rms_norm"

    def shapes(self) -> list[str]:
        return [f"{self.rows}x{self.hidden} bfloat16 W={self.world}"]


Work = Collective | Norm | Product


@dataclass
class RankResult:
    """Result of one work on one rank.

    Attributes:
        eager: Microseconds a call in each round, by name.
        graph: The same as replays of CUDA graphs.
        missing: Reason by name of a call that was not measured.
    """

    eager: dict[str, list[float]] = field(default_factory=dict)
    graph: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass
class RankReport:
    """Transport and results of one rank."""

    transport: str
    found: list[RankResult]


@dataclass(frozen=True)
class Buffers:
    """Tensors of a collective: the whole, and one rank's part of it."""

    whole: torch.Tensor
    shard: torch.Tensor

    def cut(self, count: int, world: int) -> "Buffers":
        return Buffers(self.whole[:count], self.shard[: count // world])


def measure_rank(rank: int, works: Sequence[Work], rounds: int) -> RankReport:
    """Measure the works on the GPU of the rank's number; the default group is weft's with NCCL for CUDA tensors."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames these functions again
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks, nccl = communicator(None), dist.new_group(backend="nccl")
    weft.all_reduce(torch.zeros(1, device=device))  # set our communicator up once, before any capture
    dist.all_reduce(torch.zeros(1, device=device), group=nccl)
    largest = max((work.count for work in works if isinstance(work, Collective)), default=0)
    found = []
    peers, absent = open_peers(ranks, dist.new_group(backend="gloo"), device)
    with _every_memory(largest, ranks, nccl, device) as (buffers, missing):
        for work in works:
            if isinstance(work, Collective):
                calls, without = collective_calls(work, ranks, nccl, buffers, peers)
                without |= missing | (absent if work.op == "all_reduce" else {})
                repeats = 20 if work.bytes <= _SMALL_BYTES else 5
                found.append(_timed(calls, ranks, rounds, repeats, without))
            elif isinstance(work, Norm):
                calls, without = norm_calls(work, ranks, nccl, peers, device)
                found.append(_timed(calls, ranks, rounds, 20, without | absent))
            else:
                product, without = product_calls(work, ranks, nccl, device)
                found.append(_timed(product, ranks, rounds, 5, without))
    return RankReport(ranks.transport, found)


@contextmanager
def _every_memory(
    count: int, ranks: Communicator, nccl: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[dict[str, Buffers], dict[str, str]]]:
    """Give buffers of `count` elements by kind of memory, and the reason for each missing kind."""
    shard = -(-count // ranks.world_size)
    plain = Buffers(_zeros(count, device), _zeros(shard, device))
    buffers, missing = {ORDINARY: plain, NCCL: plain}, dict[str, str]()
    if not count:
        yield buffers, missing
        return
    try:
        whole, part = (weft.empty_symmetric(size, dtype=_DTYPE, device=device).zero_() for size in (count, shard))
        buffers |= dict.fromkeys((SYMMETRIC, ANY_ORDER), Buffers(whole, part))
    except (ValueError, OSError) as error:  # every rank raises it
        missing |= dict.fromkeys((SYMMETRIC, ANY_ORDER), str(error))
    try:
        memory = symmetric_memory.empty(count, dtype=_DTYPE, device=device)
        handle = symmetric_memory.rendezvous(memory.zero_(), _group_name(ranks))
    except RuntimeError as error:
        missing |= dict.fromkeys(TORCH, str(error).splitlines()[0])
    else:
        for algorithm in TORCH[: 3 if handle.multicast_ptr else 2]:
            buffers[algorithm] = Buffers(memory, plain.shard)
        if not handle.multicast_ptr:
            missing["multimem"] = "no multicast address"
    version = torch.cuda.nccl.version()
    if version[:2] < _SYMMETRIC_SINCE:
        missing[NCCL_SYMMETRIC] = f"NCCL {'.'.join(map(str, version))} has no symmetric kernels; 2.27 has"
        yield buffers, missing
        return
    backend: Any = nccl._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        pooled = Buffers(_zeros(count, device), _zeros(shard, device))
    reason = _registered(backend, pool)
    reasons = [text for text in ranks.all_gather_object(reason) if text]
    if reasons:
        missing[NCCL_SYMMETRIC] = reasons[0]
    else:
        buffers[NCCL_SYMMETRIC] = pooled
    try:
        yield buffers, missing
    finally:
        if not reason:
            torch.cuda.synchronize()
            backend.deregister_mem_pool(pool)


def _registered(backend, pool) -> str:
    """Register the pool's memory as a symmetric window; return the reason if that fails, else ""."""
    try:
        backend.register_mem_pool(pool, symm=True)
    except TypeError:  # an older torch registers pools for other purposes only
        return f"torch {torch.__version__} does not register symmetric windows with NCCL"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=_DTYPE, device=device)


def collective_calls(
    work: Collective,
    ranks: Communicator,
    other: dist.ProcessGroup,
    buffers: dict[str, Buffers],
    peers: Mapping[str, Peer] = MappingProxyType({}),
) -> tuple[Calls, dict[str, str]]:
    """Return checked calls, and the reason for each peer that has none here.

    Calls are by kind of memory: ours on our kinds, the other group's and torch's on the rest; and by name of other
    packages, which get ordinary memory.

    Raises:
        AssertionError: A call of ours or of the other group gives a wrong result.
    """
    calls: Calls = {}
    missing: dict[str, str] = {}
    for kind, memory in {**buffers, **dict.fromkeys(peers, buffers[ORDINARY])}.items():
        if work.op != "all_reduce" and kind in (ANY_ORDER, *TORCH, *peers):
            continue
        cut = memory.cut(work.count, ranks.world_size)
        if kind in work.kinds():
            call = _ours(work.op, ranks, cut, kind != ANY_ORDER)
        elif kind in peers:
            call = partial(peers[kind].all_reduce, cut.whole)
        else:
            call = _torchs(kind, ranks, cut) if kind in TORCH else _theirs(work.op, other, cut)
        label = f"{work.op} of {work.bytes} bytes, {kind}"
        check = partial(_check_collective, work.op, ranks, cut, call, label)
        if kind not in TORCH and kind not in peers:
            check()
        elif reason := _failure(check, ranks):
            missing[kind] = reason
            continue
        calls[kind] = call
    return calls, missing


def _failure(check: Callable[[], object], ranks: Communicator) -> str:
    """Run a check of a call that is not ours; return why it failed on any rank, or "" on all."""
    try:
        check()
        reason = ""
    except Exception as error:  # whatever another package raises costs its own figures only
        reason = first_line(error)
    return next(filter(None, ranks.all_gather_object(reason)), "")


def _ours(op: str, ranks: Communicator, on: Buffers, deterministic: bool) -> Callable[[], object]:
    """Return our call without the exchange of sizes in weft.all_gather, since layers know theirs."""
    parts = list(on.whole.chunk(ranks.world_size))
    return {
        "all_reduce": lambda: weft.all_reduce(on.whole, group=ranks.group, deterministic=deterministic),
        "reduce_scatter": lambda: ranks.reduce_scatter_into(parts, on.shard),
        "all_gather": lambda: ranks.all_gather_into(on.shard, parts),
    }[op]


def _theirs(op: str, group: dist.ProcessGroup, on: Buffers) -> Callable[[], object]:
    return {
        "all_reduce": lambda: dist.all_reduce(on.whole, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(on.shard, on.whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(on.whole, on.shard, group=group),
    }[op]


def _torchs(algorithm: str, ranks: Communicator, on: Buffers) -> Callable[[], object]:
    """Return torch's all_reduce in symmetric memory; one-shot gives a tensor of its own."""
    names = {"one_shot": "one_shot_all_reduce", "two_shot": "two_shot_all_reduce_", "multimem": "multimem_all_reduce_"}
    reduce = getattr(torch.ops.symm_mem, names[algorithm])
    return lambda: reduce(on.whole, "sum", _group_name(ranks))


def _group_name(ranks: Communicator) -> Any:
    group = ranks.cuda_group()
    assert group is not None
    return group.group_name


def _check_collective(op: str, ranks: Communicator, on: Buffers, call: Callable[[], object], label: str) -> None:
    """Check a call with random numbers against fp64.

    Every rank knows the numbers of all, which repeat every `_PERIOD` elements. The call leaves zeros, which no later
    call changes.
    """
    world = ranks.world_size
    numbers = torch.stack([torch.randn(_PERIOD, generator=torch.Generator().manual_seed(r)) for r in range(world)])
    exact = numbers.to(on.whole.device, on.whole.dtype).double()

    def periodic(period: torch.Tensor, count: int, begin: int = 0) -> torch.Tensor:
        return period.repeat(-(-(begin + count) // _PERIOD))[begin : begin + count]

    for x in (on.whole, on.shard):
        x.copy_(periodic(exact[ranks.rank], len(x)))
    result = call()
    if op == "all_gather":
        parts = [periodic(exact[r], len(on.shard)) for r in range(world)]
        wrong = sum(int((part != wanted).sum()) for part, wanted in zip(on.whole.chunk(world), parts, strict=True))
    else:
        got = on.shard if op == "reduce_scatter" else result if isinstance(result, torch.Tensor) else on.whole
        begin = ranks.rank * len(on.shard) if op == "reduce_scatter" else 0
        error = (got.double() - periodic(exact.sum(0), len(got), begin)).abs()
        # Each of up to W roundings is at most half a unit of the sum of the magnitudes.
        bound = periodic(exact.abs().sum(0), len(got), begin) * torch.finfo(got.dtype).eps / 2 * world
        wrong = int((error > bound).sum())
    if wrong:
        raise AssertionError(f"{label}: {wrong} elements are wrong")
    on.whole.zero_()
    on.shard.zero_()


def norm_calls(
    work: Norm, ranks: Communicator, other: dist.ProcessGroup, peers: Mapping[str, Peer], device: torch.device
) -> tuple[Calls, dict[str, str]]:
    """Return the checked norms by name, and the reason for each missing one.

    Raises:
        AssertionError: A call of ours or of NCCL gives a wrong result.
    """

    def numbers(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, _DTYPE)

    parts = [numbers(r, work.rows, work.hidden) for r in range(ranks.world_size)]
    residual, weight = numbers(ranks.world_size, work.rows, work.hidden), numbers(ranks.world_size + 1, work.hidden)
    terms = torch.stack([*parts, residual]).double()
    part = torch.zeros_like(residual)  # also when it is timed: calls may overwrite it with the sum

    def apart(all_reduce: Callable[[torch.Tensor], object]) -> tuple[torch.Tensor, torch.Tensor]:
        all_reduce(part)
        total = residual + part
        return rms_norm(total, weight.shape, weight, _EPS), total

    def check(call: Callable[[], tuple[torch.Tensor, torch.Tensor]], name: str) -> None:
        part.copy_(parts[ranks.rank])
        normalised, total = call()
        part.zero_()
        unit = torch.finfo(_DTYPE).eps  # each of W + 1 roundings is at most half of it
        wrong = (total.double() - terms.sum(0)).abs() > terms.abs().sum(0) * unit / 2 * (ranks.world_size + 1)
        norm = rms_norm(total.double(), weight.shape, weight.double(), _EPS)
        wrong |= (normalised.double() - norm).abs() > 2 * unit * norm.abs()  # some normalise what is not rounded yet
        if wrong.any():
            raise AssertionError(f"{work.op} of {work.shapes()[0]}, {name}: {int(wrong.sum())} elements are wrong")

    calls: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        ONE_KERNEL: lambda: weft.all_reduce_rms_norm(part, residual, weight, _EPS, group=ranks.group),
        THREE_CALLS: lambda: apart(lambda x: weft.all_reduce(x, group=ranks.group)),
        NCCL_CALLS: lambda: apart(lambda x: dist.all_reduce(x, group=other)),
    }
    for name, call in calls.items():
        check(call, name)
    missing: dict[str, str] = {}
    for name, peer in peers.items():
        if peer.norm is not None:
            call = partial(peer.norm, part, residual, weight, _EPS)
            if reason := _failure(partial(check, call, name), ranks):
                missing[name] = reason
            else:
                calls[name] = call
    return dict(calls), missing


def product_calls(
    work: Product, ranks: Communicator, other: dist.ProcessGroup, device: torch.device
) -> tuple[Calls, dict[str, str]]:
    """Return the checked products by name, and the reason for each missing one.

    Raises:
        AssertionError: A product is wrong.
    """
    generator = torch.Generator(device).manual_seed(ranks.rank)
    m, n, k, world = work.m, work.n, work.k, ranks.world_size
    rows = m // world if work.how == "all_gather" else m
    a = torch.randn(rows, k, generator=generator, device=device).to(_DTYPE)
    b = (torch.randn(n, k, generator=generator, device=device) / (k * world) ** 0.5).to(_DTYPE).t()
    sizes = split_sizes(m, world)
    dim = None if work.how == "all_reduce" else 0

    def ours(mode: str) -> torch.Tensor:
        place = products.ParallelContext(ranks, dim, overlap=mode)
        if work.how == "all_gather":
            return products.all_gather_matmul(place, a, sizes, b)[0]
        if work.how == "reduce_scatter":
            return products.matmul_reduce_scatter(place, a, b, sizes)
        return products.matmul_all_reduce(place, a, b)

    def theirs() -> torch.Tensor:
        if work.how == "all_gather":
            whole = a.new_empty(m, k)
            dist.all_gather_into_tensor(whole, a, group=other)
            return whole @ b
        part = a @ b
        if work.how == "all_reduce":
            dist.all_reduce(part, group=other)
            return part
        shard = part.new_empty(m // world, n)
        dist.reduce_scatter_tensor(shard, part, group=other)
        return shard

    calls: dict[str, Callable[[], torch.Tensor]] = {
        OVERLAPPED: lambda: ours("always"),
        APART: lambda: ours("never"),
        LIBRARY: theirs,
    }
    missing = {}
    exact = _exact(work, ranks, other, a, b)
    some = slice(0, len(exact))
    plain = theirs()[some]
    for name in (APART, OVERLAPPED):
        try:
            result = calls[name]()
        except ValueError as error:  # every rank raises it, before any launch
            missing[name] = str(error)
            del calls[name]
        else:
            assert_close(result[some], plain, exact, f"{work.op}, {name}, {work.label}")
    return dict(calls), missing


def _exact(work: Product, ranks: Communicator, other: dist.ProcessGroup, a, b) -> torch.Tensor:
    """Return the first rows of this rank's result in fp64."""
    if work.how == "all_gather":
        whole = a.new_empty(ranks.world_size * a.size(0), a.size(1))
        dist.all_gather_into_tensor(whole, a, group=other)
        return whole[:_CHECKED].double() @ b.double()
    owned = a.view(ranks.world_size, -1, a.size(1))[:, :_CHECKED].double() @ b.double()  # each rank's first rows
    dist.all_reduce(owned, group=other)
    return owned[ranks.rank if work.how == "reduce_scatter" else 0]


def _timed(calls: Calls, ranks: Communicator, rounds: int, repeats: int, missing: dict[str, str]) -> RankResult:
    eager = device_us({name: _repeated(call, repeats) for name, call in calls.items()}, rounds, repeats)
    graphs = {name: graph for name, call in calls.items() if (graph := _captured(call, ranks, repeats)) is not None}
    replayed = device_us({name: graph.replay for name, graph in graphs.items()}, rounds, repeats)
    weft.check_waits()
    return RankResult(eager, replayed, missing)


def _repeated(call: Callable[[], object], repeats: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(repeats):
            call()

    return several


def device_us(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return the microseconds a call on the device in each round, measured in alternation.

    Each function makes `repeats` calls. The ranks meet before each function. Two rounds more warm up.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    if not calls:
        return samples
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for name, call, counts in in_turn(calls, rounds):
        torch.cuda.synchronize()
        weft.barrier()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if counts:
            samples[name].append(start.elapsed_time(end) * 1e3 / repeats)
    return samples


def _captured(call: Callable[[], object], ranks: Communicator, repeats: int) -> torch.cuda.CUDAGraph | None:
    """Return `repeats` calls as a CUDA graph; None on every rank if any rank could not capture them."""
    graph, reason = torch.cuda.CUDAGraph(), ""
    torch.cuda.synchronize()
    weft.barrier()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads query events
            for _ in range(repeats):
                call()
    except RuntimeError as error:  # torch raises it for an operation that capture does not permit
        torch.cuda.synchronize()
        reason = str(error)
    return None if any(ranks.all_gather_object(reason)) else graph
