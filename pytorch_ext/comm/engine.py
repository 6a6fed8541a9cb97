"""The engine's collectives on tensors: checks, addresses, codes; strided tensors through a contiguous copy.

Every method takes `wait`: True completes before it returns; False returns at once, and the tensors must not be touched
before the Pending that it returns is done.
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
_LOOKED_AT = 64  # of the operations in flight, at a time


class Pending:
    """Operations that run while their caller goes on, and what is left to do when they are done."""

    def __init__(self, works: list[_C.Work], finish: list[Callable[[], object]], source: _C.Source | None = None):
        self._works, self._finish, self._source = works, finish, source
        self._completing = threading.Lock()

    def done(self) -> bool:
        if not all(work.done() for work in self._works):
            return False
        self._complete()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """False where the time passed first; raises what the operations did."""
        for work in self._works:
            if not work.wait(timeout_s):
                return False
        self._complete()
        return True

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """callback(error or None) once all is done."""

        def last_is_done(error: BaseException | None) -> None:
            if error is None:
                self._complete()
            callback(error)

        if self._works:
            self._works[-1].then(last_is_done)  # they are done in order
        else:
            last_is_done(None)

    @property
    def source(self) -> int:
        return self._source.rank if self._source is not None else -1

    def _complete(self) -> None:
        with self._completing:  # whoever waits and whoever calls back: both find it complete
            for finish in self._finish:
                finish()
            self._finish = []


class Engine:
    """One group's shared-memory engine, as tensors see it."""

    def __init__(self, group: _C.Group):
        self.group = group
        self.rank: int = group.rank
        self.world_size: int = group.world
        self._in_flight: deque[tuple[_C.Work, object]] = deque()  # tensors that must not be freed yet
        self._submitting = threading.Lock()

    def all_reduce(
        self, x: torch.Tensor, op: int = SUM, wait: bool = True, fusion: Fusion | None = None
    ) -> Pending | None:
        """x = op over ranks of x, in place."""
        check(x)
        whole = x.contiguous()
        address, count, code = whole.data_ptr(), whole.numel(), dtype_code(whole)
        if fusion is None:
            work = self.group.all_reduce(address, address, count, code, op, not wait)
            if work is None and whole is x:  # most calls: nothing is left to do
                return None
            return self._after(work, whole, copy_backs=[(x, whole)])
        wire = code if fusion.wire_dtype is None else DTYPES[fusion.wire_dtype]
        norm = 0 if fusion.squared_norm is None else fusion.squared_norm.data_ptr()
        work = self.group.all_reduce_fused(address, address, count, code, op, wire, fusion.scale, norm, not wait)
        return self._after(work, (whole, fusion), copy_backs=[(x, whole)])

    def broadcast(self, x: torch.Tensor, root: int, wait: bool = True) -> Pending | None:
        """x = the root's x, in place."""
        check(x)
        code, scale = byte_code(x)
        whole = x.contiguous()
        work = self.group.broadcast(whole.data_ptr(), whole.numel() * scale, code, root, not wait)
        return self._after(work, whole, copy_backs=[(x, whole)])

    def all_gather(self, x: torch.Tensor, parts: list[torch.Tensor], wait: bool = True) -> Pending | None:
        """parts[r] = rank r's x; sizes may differ between ranks."""
        check(x, *parts)
        check_same_dtype("all_gather", x, parts)
        code, scale = byte_code(x)
        source, targets = x.contiguous(), contiguous_outputs(parts)
        counts = [part.numel() * scale for part in parts]
        work = self.group.all_gather(source.data_ptr(), _addresses(targets), counts, code, not wait)
        return self._after(work, (source, targets), copy_backs=zip(parts, targets, strict=True))

    def reduce_scatter(
        self, parts: list[torch.Tensor], output: torch.Tensor, op: int = SUM, wait: bool = True
    ) -> Pending | None:
        """output = op over ranks of their parts[this rank]; sizes may differ between ranks."""
        check(output, *parts)
        check_same_dtype("reduce_scatter", output, parts)
        sources, (target,) = [part.contiguous() for part in parts], contiguous_outputs([output])
        counts = [part.numel() for part in parts]
        work = self.group.reduce_scatter(
            _addresses(sources), target.data_ptr(), counts, dtype_code(output), op, not wait
        )
        return self._after(work, (sources, target), copy_backs=[(output, target)])

    def reduce(self, x: torch.Tensor, root: int, op: int = SUM, wait: bool = True) -> Pending | None:
        """At the root, x = op over ranks of x; elsewhere x stays."""
        check(x)
        whole = x.contiguous()
        address = whole.data_ptr()
        work = self.group.reduce(address, address, whole.numel(), dtype_code(whole), op, root, not wait)
        return self._after(work, whole, copy_backs=[(x, whole)])

    def gather(self, x: torch.Tensor, parts: list[torch.Tensor], root: int, wait: bool = True) -> Pending | None:
        """At the root, parts[r] = rank r's x; elsewhere parts is empty."""
        check(x, *parts)
        check_same_dtype("gather", x, parts)
        code, scale = byte_code(x)
        source, targets = x.contiguous(), contiguous_outputs(parts)
        work = self.group.gather(source.data_ptr(), _addresses(targets), x.numel() * scale, code, root, not wait)
        return self._after(work, (source, targets), copy_backs=zip(parts, targets, strict=True))

    def scatter(self, parts: list[torch.Tensor], output: torch.Tensor, root: int, wait: bool = True) -> Pending | None:
        """output = the root's parts[this rank]; parts is empty elsewhere."""
        check(output, *parts)
        check_same_dtype("scatter", output, parts)
        code, scale = byte_code(output)
        sources, (target,) = [part.contiguous() for part in parts], contiguous_outputs([output])
        work = self.group.scatter(_addresses(sources), target.data_ptr(), output.numel() * scale, code, root, not wait)
        return self._after(work, (sources, target), copy_backs=[(output, target)])

    def all_to_all(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], wait: bool = True) -> Pending | None:
        """outputs[r] = rank r's inputs[this rank]; any sizes on which the two ranks agree."""
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

    def barrier(self, wait: bool = True) -> Pending | None:
        return self._after(self.group.barrier(not wait), None)

    def send(self, x: torch.Tensor, destination: int, tag: int) -> Pending:
        check(x)
        code, scale = byte_code(x)
        whole = x.contiguous()
        work = self.group.send(destination, whole.data_ptr(), whole.numel() * scale, code, tag)
        return self._pending(work, whole)

    def receive(self, x: torch.Tensor, source: int | None, tag: int) -> Pending:
        """source=None: from whichever rank sends that tag first; `Pending.source` says which."""
        check(x)
        code, scale = byte_code(x)
        (whole,) = contiguous_outputs([x])
        heard_from = _C.Source()
        work = self.group.receive(
            -1 if source is None else source, whole.data_ptr(), whole.numel() * scale, code, tag, heard_from
        )
        pending = self._pending(work, (whole, heard_from), [(x, whole)])
        pending._source = heard_from
        return pending

    # The group's life.

    def rename(self, name: str) -> None:
        self.group.rename(name)

    def set_timeout(self, timeout: timedelta) -> None:
        self.group.set_timeout(timeout.total_seconds())

    def lost_ranks(self) -> list[int]:
        """Ranks that are known to have died or left."""
        return self.group.lost_ranks()

    def abort(self) -> None:
        """Ends every call under way, on every rank, with an error."""
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
            # Of many some, in turn: the time to post n would grow with n squared.
            for _ in range(min(len(self._in_flight), _LOOKED_AT)):
                pair = self._in_flight.popleft()
                if not pair[0].done():
                    self._in_flight.append(pair)
            self._in_flight.append((work, keep))
        return Pending([work], [partial(copy_back, *pair) for pair in copy_backs])


def copy_back(target: torch.Tensor, whole: torch.Tensor) -> None:
    if target is not whole:
        target.detach().copy_(whole.detach())  # what a collective does is not for autograd to see


def contiguous_outputs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype) for x in tensors]


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def check(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if not (x.is_cpu and x.layout is _STRIDED) or x.is_conj() or x.is_neg():
            _refuse(x)


def _refuse(x: torch.Tensor) -> None:
    if not x.is_cpu:
        raise TypeError(f"the weft backend takes CPU tensors, got one on {x.device}")
    if x.layout is not _STRIDED:
        raise TypeError(f"the weft backend takes dense tensors, got {x.layout}")
    raise TypeError("the weft backend takes no conjugate or negative views: resolve_conj() or resolve_neg() them")


def check_same_dtype(what: str, x: torch.Tensor, others: list[torch.Tensor]) -> None:
    for other in others:
        if other.dtype != x.dtype:
            raise TypeError(f"{what}: tensors of {x.dtype} and of {other.dtype}; they must be of one type")
