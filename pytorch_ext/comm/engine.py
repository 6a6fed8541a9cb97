"""Collectives of the engine on tensors: checks, addresses and type codes.

Strided tensors go through a contiguous copy. Every collective takes `wait`. With wait=True it completes before it
returns. With wait=False it returns a Pending at once, and the tensors must not be touched before that is done.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch

from weft import _C
from weft.comm.dtypes import DTYPES, SUM, byte_code, dtype_code
from weft.comm.fusion import Fusion

_STRIDED = torch.strided
_LOOKED_AT = 64  # operations in flight that each new one checks


class Pending:
    """Operations under way, and the steps to run when they are done."""

    def __init__(self, works: list[_C.Work], finish: list[Callable[[], object]]):
        self._works, self._finish = works, finish
        self._source: _C.Source | None = None
        self._completing = threading.Lock()

    def done(self) -> bool:
        if not all(work.done() for work in self._works):
            return False
        self._complete()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all is done; return False if the time passes first. Raises the error of an operation."""
        for work in self._works:
            if not work.wait(timeout_s):
                return False
        self._complete()
        return True

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call callback(error or None) once all is done."""

        def last_is_done(error: BaseException | None) -> None:
            if error is None:
                self._complete()
            callback(error)

        if self._works:
            self._works[-1].then(last_is_done)  # operations are done in order
        else:
            last_is_done(None)

    @property
    def source(self) -> int:
        return self._source.rank if self._source is not None else -1

    def _complete(self) -> None:
        with self._completing:  # a waiting thread and a callback must both find it complete
            for finish in self._finish:
                finish()
            self._finish = []


def promise() -> tuple[torch.futures.Future, Callable[[object], None]]:
    """Return a future, and the function that completes it by a result or by an exception.

    `Future.set_exception` stores the exception as a result, and C++ (DistributedDataParallel) reads that as tensors. Of
    the future of a callback that raises, C++ gets the error: a RuntimeError with the exception's text.
    """
    outcome: torch.futures.Future = torch.futures.Future()
    return outcome.then(_result), outcome.set_result


def _result(outcome: torch.futures.Future) -> object:
    result = outcome.value()
    if isinstance(result, BaseException):
        raise result
    return result


class Engine:
    """Shared-memory engine of one group, with collectives on tensors."""

    def __init__(self, group: _C.Group):
        self.group = group
        self.rank: int = group.rank
        self.world_size: int = group.world
        self._in_flight: deque[tuple[_C.Work, object]] = deque()  # tensors that must not be freed yet
        self._submitting = threading.Lock()

    # With @_C.engine_method the usual call runs in csrc/shm/methods.cpp. The body here is for every other call: with
    # wait=False, with fusion, or on strided tensors.
    @_C.engine_method
    def all_reduce(
        self, x: torch.Tensor, op: int = SUM, wait: bool = True, fusion: Fusion | None = None
    ) -> Pending | None:
        """Reduce x by `op` over ranks, in place."""
        check(x)
        whole = x.contiguous()
        address, count, code = whole.data_ptr(), whole.numel(), dtype_code(whole)
        if fusion is None:
            work = self.group.all_reduce(address, address, count, code, op, not wait)
            if work is None and whole is x:  # the usual case: nothing is left to do
                return None
            return self._after(work, whole, copy_backs=[(x, whole)])
        wire = code if fusion.wire_dtype is None else DTYPES[fusion.wire_dtype]
        norm = 0 if fusion.squared_norm is None else fusion.squared_norm.data_ptr()
        work = self.group.all_reduce_fused(address, address, count, code, op, wire, fusion.scale, norm, not wait)
        return self._after(work, (whole, fusion), copy_backs=[(x, whole)])

    @_C.engine_method
    def broadcast(self, x: torch.Tensor, root: int, wait: bool = True) -> Pending | None:
        """Set x to the root's x."""
        check(x)
        code, scale = byte_code(x)
        whole = x.contiguous()
        work = self.group.broadcast(whole.data_ptr(), whole.numel() * scale, code, root, not wait)
        return self._after(work, whole, copy_backs=[(x, whole)])

    @_C.engine_method
    def all_gather(self, x: torch.Tensor, parts: list[torch.Tensor], wait: bool = True) -> Pending | None:
        """Set parts[r] to rank r's x; sizes may differ between ranks."""
        check(x, *parts)
        check_same_dtype("all_gather", x, parts)
        code, scale = byte_code(x)
        source, targets = x.contiguous(), contiguous_outputs(parts)
        counts = [part.numel() * scale for part in parts]
        work = self.group.all_gather(source.data_ptr(), _addresses(targets), counts, code, not wait)
        return self._after(work, (source, targets), copy_backs=zip(parts, targets, strict=True))

    @_C.engine_method
    def reduce_scatter(
        self, parts: list[torch.Tensor], output: torch.Tensor, op: int = SUM, wait: bool = True
    ) -> Pending | None:
        """Set `output` to parts[this rank] reduced by `op` over ranks; sizes may differ between ranks."""
        check(output, *parts)
        check_same_dtype("reduce_scatter", output, parts)
        sources, (target,) = [part.contiguous() for part in parts], contiguous_outputs([output])
        counts = [part.numel() for part in parts]
        work = self.group.reduce_scatter(
            _addresses(sources), target.data_ptr(), counts, dtype_code(output), op, not wait
        )
        return self._after(work, (sources, target), copy_backs=[(output, target)])

    def reduce(self, x: torch.Tensor, root: int, op: int = SUM, wait: bool = True) -> Pending | None:
        """Reduce x by `op` over ranks into the root's x; x stays as it is on other ranks."""
        check(x)
        whole = x.contiguous()
        address = whole.data_ptr()
        work = self.group.reduce(address, address, whole.numel(), dtype_code(whole), op, root, not wait)
        return self._after(work, whole, copy_backs=[(x, whole)])

    def gather(self, x: torch.Tensor, parts: list[torch.Tensor], root: int, wait: bool = True) -> Pending | None:
        """Set the root's parts[r] to rank r's x; parts is empty on other ranks."""
        check(x, *parts)
        check_same_dtype("gather", x, parts)
        code, scale = byte_code(x)
        source, targets = x.contiguous(), contiguous_outputs(parts)
        work = self.group.gather(source.data_ptr(), _addresses(targets), x.numel() * scale, code, root, not wait)
        return self._after(work, (source, targets), copy_backs=zip(parts, targets, strict=True))

    def scatter(self, parts: list[torch.Tensor], output: torch.Tensor, root: int, wait: bool = True) -> Pending | None:
        """Set `output` to the root's parts[this rank]; parts is empty on other ranks."""
        check(output, *parts)
        check_same_dtype("scatter", output, parts)
        code, scale = byte_code(output)
        sources, (target,) = [part.contiguous() for part in parts], contiguous_outputs([output])
        work = self.group.scatter(_addresses(sources), target.data_ptr(), output.numel() * scale, code, root, not wait)
        return self._after(work, (sources, target), copy_backs=[(output, target)])

    @_C.engine_method
    def all_to_all(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], wait: bool = True) -> Pending | None:
        """Set outputs[r] to rank r's inputs[this rank]; both ranks must give the same size."""
        check(*inputs, *outputs)
        check_same_dtype("all_to_all", inputs[0], [*inputs, *outputs])
        code, scale = byte_code(inputs[0])
        sources, targets = [part.contiguous() for part in inputs], contiguous_outputs(outputs)
        work = self.group.all_to_all(
            _addresses(sources),
            [part.numel() * scale for part in inputs],
            _addresses(targets),
            [part.numel() * scale for part in outputs],
            code,
            not wait,
        )
        return self._after(work, (sources, targets), copy_backs=zip(outputs, targets, strict=True))

    @_C.engine_method
    def barrier(self, wait: bool = True) -> Pending | None:
        return self._after(self.group.barrier(not wait), None)

    def send(self, x: torch.Tensor, destination: int, tag: int) -> Pending:
        check(x)
        code, scale = byte_code(x)
        whole = x.contiguous()
        work = self.group.send(destination, whole.data_ptr(), whole.numel() * scale, code, tag)
        return self._pending(work, whole)

    def receive(self, x: torch.Tensor, source: int | None, tag: int) -> Pending:
        """Receive x from rank `source`, or with None from the first rank that sends the tag; see `Pending.source`."""
        check(x)
        code, scale = byte_code(x)
        (whole,) = contiguous_outputs([x])
        sender = _C.Source()
        work = self.group.receive(
            -1 if source is None else source, whole.data_ptr(), whole.numel() * scale, code, tag, sender
        )
        pending = self._pending(work, (whole, sender), [(x, whole)])
        pending._source = sender
        return pending

    # Life of the group.

    def rename(self, name: str) -> None:
        self.group.rename(name)

    def set_timeout(self, timeout: timedelta) -> None:
        self.group.set_timeout(timeout.total_seconds())

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are known to have died or left."""
        return self.group.lost_ranks()

    def abort(self) -> None:
        """End every call under way, on every rank, with an error."""
        self.group.abort()

    def leave(self) -> None:
        self.group.leave()

    def _after(self, work: _C.Work | None, keep, copy_backs=()) -> Pending | None:
        if work is not None:
            return self._pending(work, keep, copy_backs)
        for target, whole in copy_backs:
            copy_back(target, whole)
        return None

    def _pending(self, work: _C.Work, keep, copy_backs=()) -> Pending:
        with self._submitting:
            # Check a bounded number of them, in turn. Checking all makes posting n operations take time n squared.
            for _ in range(min(len(self._in_flight), _LOOKED_AT)):
                pair = self._in_flight.popleft()
                if not pair[0].done():
                    self._in_flight.append(pair)
            self._in_flight.append((work, keep))
        return Pending([work], [partial(copy_back, *pair) for pair in copy_backs])


def copy_back(target: torch.Tensor, whole: torch.Tensor) -> None:
    if target is not whole:
        target.detach().copy_(whole.detach())  # autograd does not record collectives


def contiguous_outputs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype) for x in tensors]


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def check(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if not (x.is_cpu and x.layout is _STRIDED) or x.is_conj() or x.is_neg() or (x.data_ptr() == 0 and x.numel()):
            _refuse(x)


def _refuse(x: torch.Tensor) -> None:
    if not x.is_cpu:
        raise TypeError(f"the weft backend takes CPU tensors, got one on {x.device}")
    if x.layout is not _STRIDED:
        raise TypeError(f"the weft backend takes dense tensors, got {x.layout}")
    if not (x.is_conj() or x.is_neg()):
        raise TypeError(f"the weft backend takes tensors with values in memory, got {type(x).__name__} without")
    raise TypeError("the weft backend takes no conjugate or negative views: resolve_conj() or resolve_neg() them")


def check_same_dtype(operation: str, x: torch.Tensor, others: list[torch.Tensor]) -> None:
    for other in others:
        if other.dtype != x.dtype:
            raise TypeError(f"{operation}: tensors of {x.dtype} and of {other.dtype}; they must be of one type")
