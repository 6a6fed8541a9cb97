"""All ranks' rows brought into one tensor by copies, while kernels run that begin with the rows that are there.

On a GPU the copy engine moves them on a stream of its own, and sets a flag behind each chunk by a stream operation:
neither needs a multiprocessor, which the kernel that waits may fill to the last. Under Triton's interpreter a thread
does the same on shared memory.
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
        whole: what the ranks' tensors make along the dimension; chunks of its rows are valid once their flags are set,
            all of it after `finish`.
        arrivals: what a product that starts at once waits for.
    """

    whole: torch.Tensor
    arrivals: Arrivals
    _copies: "_Copies"
    _agreed: int

    def finish(self) -> torch.Tensor:
        """The whole, for whoever comes later on this stream. A collective call."""
        self._copies.join()
        signal.meet(self.arrivals.peers, self._agreed, _OPERATION, signal.DONE)
        signal.spoil(self.arrivals.peers, self.whole)
        return self.whole


def window_bytes(x: torch.Tensor, dim: int, sizes) -> int:
    """What the window must have to gather the ranks' x along `dim`; the same on every rank."""
    return signal.DATA_OFFSET + _rows(x, dim, sizes).largest * x.size(-1) * x.element_size()


def start_gathering(peers: signal.Peers, x: torch.Tensor, dim: int, sizes) -> Gathering:
    """Begins to bring together the ranks' x along `dim`. A collective call; every rank finishes it, in the same order.

    Args:
        peers: whose window has `window_bytes`.
        x: [..., F], contiguous or copied; dim counts from 0 and is not the last. sizes: of every rank's x along dim.
    """
    needed = window_bytes(x, dim, sizes)
    if peers.memory.numel() < needed:
        raise ValueError(f"gathering: the window has {peers.memory.numel()} bytes, {needed} are needed")
    rows, row_bytes = _rows(x, dim, sizes), x.size(-1) * x.element_size()
    agreed = signal.signature("all_gather", rows, row_bytes, x.dtype)

    # 1. This rank's rows into its window, where the others fetch them once all have come.
    (own_flags,) = peers.keep(_own_flags(rows, peers.rank, x.device))  # before anybody waits: it may be made now
    signal.fill(peers, signal.DATA_OFFSET, x.contiguous())
    signal.meet(peers, agreed, _OPERATION, signal.COME)

    # 2. Its own chunks into the whole: they are there at once.
    whole = x.new_empty(_whole_shape(x, dim, sizes))
    flags = own_flags.clone()
    whole.narrow(dim, sum(sizes[: peers.rank]), sizes[peers.rank]).copy_(x)

    # 3. The others', one after another.
    plan = _plan(rows, row_bytes, peers.rank, peers.at)
    copies = (_StreamCopies if x.is_cuda else _ThreadCopies)(plan, whole, flags)
    return Gathering(whole, Arrivals(peers, rows, flags), copies, agreed)


def _whole_shape(x: torch.Tensor, dim: int, sizes) -> list[int]:
    return [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]


def _rows(x: torch.Tensor, dim: int, sizes) -> Rows:
    return Rows.of(_whole_shape(x, dim, sizes), dim, sizes)


@dataclass(frozen=True)
class _CopyPlan:
    """Copies in their order: from an address, to an offset into the whole, so many bytes, for that chunk."""

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
    """Starts the copies of a plan; `join` makes the current stream, or the caller, wait for the last."""

    def join(self) -> None:
        raise NotImplementedError


class _StreamCopies(_Copies):
    def __init__(self, plan: _CopyPlan, whole: torch.Tensor, flags: torch.Tensor):
        self.stream = _copy_stream(whole.device)
        self.stream.wait_stream(torch.cuda.current_stream(whole.device))
        for tensor in (whole, flags):  # were nobody to join
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


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
