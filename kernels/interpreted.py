"""The waits of `signal` in Triton's interpreter, where there is no PTX: ranks are processes on shared memory."""

import time
from collections.abc import Callable

from weft.kernels.language import tl


def at_meeting() -> None:
    """Do nothing. Every meeting of ranks calls this; tests replace it by a delay or a death."""


def wait(flag, expected, record, timeout_us) -> tl.tensor:
    seen: list[int] = []

    def is_set() -> bool:
        seen[:] = [_number(tl.atomic_cas(flag, 0, 0, sem="acquire", scope="sys"))]
        return seen[0] != 0

    failed = _until(is_set, record, timeout_us)
    return _flag(failed or seen[0] != _number(expected))


def put(flag, value, record, timeout_us) -> tl.tensor:
    def was_free() -> bool:
        return _number(tl.atomic_cas(flag, 0, value, sem="release", scope="sys")) == 0

    return _flag(_until(was_free, record, timeout_us))


def post(flag, value) -> None:
    at_meeting()
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


def _until(done: Callable[[], bool], record, timeout_us) -> bool:
    """Wait for `done`; return True if the time passed or the host ended all waits before."""
    at_meeting()
    deadline = time.monotonic() + _number(timeout_us) / 1e6
    while not done():
        if time.monotonic() >= deadline or _number(tl.load(record)) != 0:
            return not done()  # it is no failure if the flag came after the last look
        time.sleep(0.0005)  # the ranks may share a core
    return False


def _number(value) -> int:
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)


def _flag(failed: bool) -> tl.tensor:
    return tl.full((), int(failed), tl.int32)
