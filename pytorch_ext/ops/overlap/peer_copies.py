"""An all_gather by copies, for kernels that start with the rows that have arrived.

On a GPU the copy engine moves the rows on a stream of its own, and a stream operation sets a flag after each chunk.
Neither needs a multiprocessor, so the waiting kernel may use all of them. In Triton's interpreter a thread does the
same on shared memory.
"""

import ctypes
import threading
from dataclasses import dataclass
from functools import lru_cache

import torch

from weft import _C
from weft.kernels import interpreted, signal
from weft.kernels.chunks import Rows
from weft.kernels.matmul import Arrivals

_OPERATION = signal.ALL_GATHER_MATMUL


@dataclass
class Gathering:
    """An all_gather under way.

    Attributes:
        whole: the ranks' tensors joined along the dimension. A chunk of its rows is valid once its flag is set; all of
            it is valid after `finish`.
        arrivals: the flags for a product that starts at once.
    """

    whole: torch.Tensor
    arrivals: Arrivals
    _copies: "_Copies"
    _agreed: int

    def finish(self) -> torch.Tensor:
        """Return the whole, valid for later work on this stream. A collective call."""
        self._copies.join()
        signal.meet(self.arrivals.peers, self._agreed, _OPERATION, signal.DONE)
        signal.spoil(self.arrivals.peers, self.whole)
        return self.whole


def window_bytes(x: torch.Tensor, dim: int, sizes) -> int:
    """Return the bytes that the window needs to gather the ranks' x along `dim`; the same on every rank."""
    return signal.DATA_OFFSET + _rows(x, dim, sizes).largest * x.size(-1) * x.element_size()


def start_gathering(peers: signal.Peers, x: torch.Tensor, dim: int, sizes) -> Gathering:
    """Start to gather the ranks' x along `dim`.

    A collective call. Every rank must call `finish` of the result, in the same order.

    Args:
        peers: a window of at least `window_bytes`.
        x: [..., F]; copied if it is not contiguous.
        dim: not negative, and not the last dimension.
        sizes: sizes of the ranks' x along dim.

    Raises:
        ValueError: the window is too small.
    """
    needed = window_bytes(x, dim, sizes)
    if peers.memory.numel() < needed:
        raise ValueError(f"gathering: the window has {peers.memory.numel()} bytes, {needed} are needed")
    rows, row_bytes = _rows(x, dim, sizes), x.size(-1) * x.element_size()
    agreed = signal.signature("all_gather", rows, row_bytes, x.dtype)

    # 1. Copy this rank's rows into its window; the others fetch them after all ranks have met.
    (own_flags,) = peers.keep(_own_flags(rows, peers.rank, x.device))  # may allocate, so before any rank waits
    signal.fill(peers, signal.DATA_OFFSET, x.contiguous())
    signal.meet(peers, agreed, _OPERATION, signal.COME)

    # 2. Copy this rank's own chunks into the whole; they are valid at once.
    whole = x.new_empty(_whole_shape(x, dim, sizes))
    flags = own_flags.clone()
    whole.narrow(dim, sum(sizes[: peers.rank]), sizes[peers.rank]).copy_(x)

    # 3. Start to copy the other ranks' chunks, one after another.
    plan = _plan(rows, row_bytes, peers.rank, peers.at)
    copies = _StreamCopies(peers.copies, plan, whole, flags) if x.is_cuda else _ThreadCopies(plan, whole, flags)
    return Gathering(whole, Arrivals(peers, rows, flags), copies, agreed)


def _whole_shape(x: torch.Tensor, dim: int, sizes) -> list[int]:
    return [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]


def _rows(x: torch.Tensor, dim: int, sizes) -> Rows:
    return Rows.of(_whole_shape(x, dim, sizes), dim, sizes)


@dataclass(frozen=True)
class _CopyPlan:
    """Copies in order: source address, offset into the whole, number of bytes and chunk of each."""

    sources: list[int]
    offsets: list[int]
    bytes: list[int]
    chunks: list[int]


@lru_cache(maxsize=256)
def _plan(rows: Rows, row_bytes: int, rank: int, at: tuple[int, ...]) -> _CopyPlan:
    world = len(at)
    order = sorted(
        (number for number, chunk in enumerate(rows.chunks) if chunk.rank != rank),
        key=lambda number: ((rows.chunks[number].rank - rank) % world, number),
    )
    chunks = [rows.chunks[number] for number in order]
    return _CopyPlan(
        [at[chunk.rank] + signal.DATA_OFFSET + chunk.local_start * row_bytes for chunk in chunks],
        [chunk.start * row_bytes for chunk in chunks],
        [chunk.rows * row_bytes for chunk in chunks],
        order,
    )


@lru_cache(maxsize=256)
def _own_flags(rows: Rows, rank: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([int(chunk.rank == rank) for chunk in rows.chunks], dtype=torch.int32, device=device)


class _Copies:
    """Running copies of a plan; `join` makes the current stream (or the caller) wait for the last copy."""

    def join(self) -> None:
        raise NotImplementedError


class _StreamCopies(_Copies):
    def __init__(self, stream: torch.cuda.Stream, plan: _CopyPlan, whole: torch.Tensor, flags: torch.Tensor):
        self.stream = stream
        self.stream.wait_stream(torch.cuda.current_stream(whole.device))
        for tensor in (whole, flags):  # keeps their memory even if `join` is never called
            tensor.record_stream(self.stream)
        start, first_flag = whole.data_ptr(), flags.data_ptr()
        assert _C.cuda is not None
        _C.cuda.copy_and_mark(
            [start + offset for offset in plan.offsets],
            plan.sources,
            plan.bytes,
            [first_flag + 4 * chunk for chunk in plan.chunks],
            self.stream.cuda_stream,
        )

    def join(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class _ThreadCopies(_Copies):
    def __init__(self, plan: _CopyPlan, whole: torch.Tensor, flags: torch.Tensor):
        self.kept = whole, flags
        self.thread = threading.Thread(target=self._run, args=(plan, whole.data_ptr(), flags), daemon=True)
        self.thread.start()

    @staticmethod
    def _run(plan: _CopyPlan, start: int, flags: torch.Tensor) -> None:
        for source, offset, count, chunk in zip(plan.sources, plan.offsets, plan.bytes, plan.chunks, strict=True):
            interpreted.at_meeting()
            ctypes.memmove(start + offset, source, count)
            flags[chunk] = 1

    def join(self) -> None:
        self.thread.join()
