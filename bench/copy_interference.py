"""Slowdown of a product while k communication blocks copy beside it, and the rate of the copy.

This table serves to choose the number of blocks of a collective. The blocks read and write device memory. With another
GPU's memory at the other end, the device's memory does only one of the two, and the link bounds the other.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from weft.bench.flag_tax import arrived, unsplit
from weft.bench.measure import Quantiles
from weft.bench.table import Row
from weft.kernels import launch
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.matmul import matmul
from weft.tools.rounds import in_turn

BLOCKS = (0, 1, 2, 4, 8, 16, 32)
PRODUCT = (8192, 7168, 8192)  # m, n, k: a gated layer's of Llama 3 70B over 8 ranks, 8192 tokens
LIBRARY, FULL, LEAVING = "torch.matmul", "matmul on every multiprocessor", "matmul that leaves k of them"

_STEP = 16384  # int32 that a block copies at a time: 64 KiB
_WARPS = 16
_BUFFER = 64 << 20  # int32: larger than any cache
_MOST = 1 << 18  # steps after which a block ends by itself: 16 GiB
_HEAD_START_CYCLES = 100_000  # some 50 us: by then the blocks run


def lines(rounds: int) -> Iterator[Row]:
    device = torch.device("cuda")
    m, n, k = PRODUCT
    x = torch.randn(m, k, device=device).bfloat16()
    w = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
    found = times(products(x, w), Copier(device, _BUFFER, _MOST), rounds)
    for name, blocks in sorted(found, key=lambda key: (LIBRARY, FULL, LEAVING).index(key[0])):
        ours, rate = found[name, blocks]
        alone = found[(FULL if name == LEAVING else name), 0][0]
        of = {"op": f"{name} beside a copy", "shape": f"{m}x{n}x{k} k={blocks}"}
        remark = f"{rate:.0f} GB/s copied" if blocks else "alone"
        yield Row(of, {"ours": ours, "alone": alone}, facts={"tax": ours.p50_us / alone.p50_us}, remark=remark)


def products(x: torch.Tensor, w: torch.Tensor) -> dict[tuple[str, int], Callable[[], object]]:
    """Return calls of x @ w.T by (kernel, number of blocks beside it).

    Raises:
        AssertionError: A product that leaves multiprocessors free gives other bits than matmul.
    """
    config, processors = unsplit(x, w.t()), launch.multiprocessors(x.device)
    expected = matmul(x, w.t(), config=config)[0]
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for blocks in BLOCKS:
        calls[LIBRARY, blocks] = lambda: x @ w.t()
        calls[FULL, blocks] = lambda: matmul(x, w.t(), config=config)
        if 0 < blocks < processors:
            arrivals = arrived(x, world=2, processors=processors - blocks)
            leaving = partial(all_gather_matmul, x, w.t(), arrivals, config=config)
            if not torch.equal(leaving()[0], expected):
                raise AssertionError(f"{LEAVING}, k={blocks}: the bits are not those of matmul")
            calls[LEAVING, blocks] = leaving
    return calls


class Copier:
    """Blocks that copy in a loop until `stop` is set.

    Attributes:
        stop: [1] int32: not 0 once the copy is to end.
        steps: [most blocks] int64: steps of _STEP elements that each block copied in the last run.
        most: Steps after which a block ends by itself.
    """

    def __init__(self, device: torch.device, elements: int, most: int):
        self._source = torch.arange(elements, dtype=torch.int32, device=device)
        self.target = torch.empty_like(self._source)
        self.stop = torch.zeros(1, dtype=torch.int32, device=device)
        self.steps = torch.zeros(max(BLOCKS), dtype=torch.int64, device=device)
        self.most = most

    def start(self, blocks: int) -> None:
        arguments = self._source, self.target, self._source.numel(), self.stop, self.steps, self.most
        launch.launch(_copy_kernel, (blocks,), *arguments, STEP=_STEP, warps=_WARPS)

    def copied_bytes(self, blocks: int) -> int | None:
        """Return the bytes copied in the last run; None if a block ended before `stop` was set."""
        steps = self.steps[:blocks].tolist()
        return None if any(count >= self.most for count in steps) else sum(steps) * _STEP * 4


@triton.jit
def _copy_kernel(
    source,  # [count] int32
    target,
    count,
    stop,  # [1] int32: not 0 once the copy is to end
    steps,  # [programs] int64
    most,
    STEP: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = count // STEP
    done = 0
    block = program % blocks
    while (done < most) & (tl.load(stop, volatile=True) == 0):
        place = block.to(tl.int64) * STEP + tl.arange(0, STEP)
        tl.store(target + place, tl.load(source + place))
        block = (block + programs) % blocks
        done += 1
    tl.store(steps + program, done)


def variants(architecture: str) -> None:
    """Start the copy once; called inside `launch.recording`, as in weft.kernels."""
    Copier(torch.device("meta"), _BUFFER, _MOST).start(max(BLOCKS))


def times(
    calls: dict[tuple[str, int], Callable[[], object]], copier: Copier, rounds: int
) -> dict[tuple[str, int], tuple[Quantiles, float]]:
    """Return each call's time, and the median GB/s that the blocks beside it copied until it was done.

    The calls alternate, with an L2 that holds nothing of the call. Two rounds warm up. A round in which the copy ended
    first does not count.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    beside = torch.cuda.Stream()
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in calls}
    for key, call, counts in in_turn(calls, rounds):
        flush.zero_()
        sample = _run(call, key[1], copier, beside)
        if counts and sample is not None:
            samples[key].append(sample)
    for (name, blocks), found in samples.items():
        if not found:
            raise AssertionError(f"{name}, k={blocks}: the copy ended before the product in every round")
    return {
        key: (Quantiles.of([us for us, _ in found]), Quantiles.of([rate for _, rate in found]).p50_us)
        for key, found in samples.items()
    }


def _run(call, blocks: int, copier: Copier, beside: torch.cuda.Stream) -> tuple[float, float] | None:
    """Return the call's time in us and the copy's GB/s; None if the copy ended before the call."""
    copy_start, copy_end, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    copier.stop.zero_()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        copy_start.record()
        if blocks:
            copier.start(blocks)
        copy_end.record()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    call()
    end.record()
    copier.stop.fill_(1)
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    copied = copier.copied_bytes(blocks)
    if copied is None:
        return None
    return start.elapsed_time(end) * 1e3, (copied / copy_start.elapsed_time(copy_end) / 1e6 if blocks else 0.0)
