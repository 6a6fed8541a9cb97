"""What joins the machines of a group: gloo connections, and the first failure, which is every rank's.

A failure is told through the store, and by closing the connections, so that who waits at their other ends looks there.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft import _C

_ERRORS = {
    error.__name__: error
    for error in (_C.RankLostError, _C.CollectiveTimeoutError, _C.CollectiveMismatchError, _C.CommError)
}
_LOOKS_EVERY_S = 0.1  # whether the group has failed
_ANOTHER_KNOWS_WITHIN_S = 1.5  # a rank's neighbours see it die; who only loses a connection asks them first


class InterHost:
    """One rank's connections: to its lane (None: it is in none), and to everyone."""

    def __init__(
        self,
        hosts: list[list[int]],
        rank: int,
        lane: int | None,
        store,
        name: Callable[[], str],
        timeout: timedelta,
        on_failure: Callable[[], object],
        lost_ranks: Callable[[], list[int]],
    ):
        self.rank, self.timeout = rank, timeout
        self.failure: BaseException | None = None
        self._store, self._name, self._on_failure = store, name, on_failure
        own = next(number for number, host in enumerate(hosts) if rank in host)
        self._elsewhere = [other for host in hosts if rank not in host for other in host]
        self._lost_ranks = lost_ranks
        self._connections: dict[str, Any] = {}
        try:
            meeting = store.clone()  # gloo waits at it, and a store's client answers nobody else while it waits
            if lane is not None:
                lane_store = dist.PrefixStore(f"lane/{lane}", meeting)
                self._connections["lane"] = self._connect(lane_store, own, len(hosts))
            everyone_store = dist.PrefixStore("everyone", meeting)
            self._connections["everyone"] = self._connect(everyone_store, rank, sum(len(host) for host in hosts))
        except _C.CommError:
            raise
        except (RuntimeError, OSError) as error:
            raise self.fail(
                _C.CommError(f'rank {rank} could not reach the other machines of group "{name()}": {error}')
            ) from error

    def _connect(self, store, rank: int, world: int) -> Any:
        """A ProcessGroupGloo, unless the group fails before its ranks have met: gloo would wait for all of its time."""
        made: Future = Future()

        def make() -> None:
            try:
                made.set_result(dist.ProcessGroupGloo(store, rank, world, timeout=self.timeout))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, daemon=True).start()
        while not wait([made], _LOOKS_EVERY_S).done:
            lost = self._lost_ranks()
            if lost or self._store.check(["failure"]):
                who = f"rank {', '.join(map(str, lost))} was lost" if lost else "a rank was lost"
                raise self.fail(
                    _C.RankLostError(f'{who} while group "{self._name()}" was made (rank {self.rank} waited).')
                )
        return made.result()

    @property
    def lane(self) -> Any:
        """The ProcessGroupGloo of this rank's lane, in which a machine's number is its rank."""
        return self._connection("lane")

    @property
    def everyone(self) -> Any:
        """The ProcessGroupGloo of the whole group."""
        return self._connection("everyone")

    def _connection(self, of: str) -> Any:
        connection = self._connections.get(of)
        if connection is None:
            raise self.failure or _C.CommError(f'group "{self._name()}" was destroyed; create it again to use it.')
        return connection

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        for connection in self._connections.values():
            connection.set_timeout(timeout)

    def finish(self, work: dist.Work) -> None:
        """Waits for a collective of gloo, and looks now and then whether the group has failed."""
        while True:
            try:
                work.wait(timedelta(milliseconds=100))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # its own error, if it has one
                    return
                if self.failure is not None:
                    raise self.failure from None

    def fail(self, error: BaseException) -> BaseException:
        """The group's first failure: this one, or what another rank told before. Closes the connections, and then tells
        `on_failure`."""
        if self.failure is None:
            self.failure = self._first_failure(error)
            for connection in self._connections.values():
                with suppress(RuntimeError):
                    connection.abort()
            self.close()
            self._on_failure()
        return self.failure

    def close(self) -> None:
        self._connections = {}  # what they have sent still arrives

    def lost(self, what: str, error: RuntimeError) -> BaseException:
        """The failure behind an error of gloo's: what a rank that knows more tells, or else that a machine is gone."""
        deadline = time.monotonic() + _ANOTHER_KNOWS_WITHIN_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline and self.failure is None and not self._store.check(["failure"]):
                time.sleep(0.02)
        where = f"a rank of {self._elsewhere}, on other machines,"
        who = f"(rank {self.rank} waited): {error}"
        if "imed out" in str(error):
            limit = f"{self.timeout.total_seconds():.3g} s"
            return self.fail(_C.CollectiveTimeoutError(f"{where} did not answer in {what} within {limit} {who}"))
        return self.fail(_C.RankLostError(f"{where} was lost in {what} {who}"))

    def _first_failure(self, error: BaseException) -> BaseException:
        try:
            note = json.dumps([type(error).__name__, str(error)])
            kind, text = json.loads(self._store.compare_set("failure", "", note).decode())
            return _ERRORS[kind](text)
        except (RuntimeError, ValueError):  # the store has gone with its host
            return error


class Later:
    """An outcome that is still to come; what torch waits for, like an engine's Pending."""

    source = -1

    def __init__(self, future: Future):
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        try:
            self._future.result(timeout_s)
        except FutureTimeoutError:
            return False
        return True

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        # On a thread of its own: a callback may start a collective and wait for it.
        self._future.add_done_callback(
            lambda future: threading.Thread(target=callback, args=(future.exception(),), daemon=True).start()
        )


class Message(Later):
    """A message on its way over gloo. gloo closes the connection where a wait for a message runs out of time, and does
    not say whether one has come: who only asks, or waits for a while, asks a thread that waits until the end."""

    def __init__(
        self, between: InterHost, what: str, start: Callable[[], dist.Work], finish: Callable[[], object] = lambda: None
    ):
        super().__init__(Future())
        self._between, self._what, self._start, self._finish = between, what, start, finish  # they keep its memory
        self._completing = threading.Lock()  # by whoever asks first, and never let go
        try:
            self._work = start()
        except RuntimeError as error:  # gloo's
            raise between.lost(what, error) from error

    def done(self) -> bool:
        self._complete_in_background()
        return super().done()

    def wait(self, timeout_s: float | None = None) -> bool:
        # Ctrl-C is the main thread's, and would not end a wait inside of gloo.
        if timeout_s is None and threading.current_thread() is not threading.main_thread():
            self._complete()
        else:
            self._complete_in_background()
        return super().wait(timeout_s)

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        self._complete_in_background()
        super().then(callback)

    @property
    def source(self) -> int:  # type: ignore[override]
        return self._work._source_rank()

    def _complete_in_background(self) -> None:
        if not self._completing.locked():
            threading.Thread(target=self._complete, daemon=True).start()

    def _complete(self) -> None:
        if not self._completing.acquire(blocking=False):
            return
        try:
            self._work.wait(self._between.timeout)
            self._finish()
        except RuntimeError as error:  # gloo's
            self._future.set_exception(self._between.lost(self._what, error))
        except BaseException as error:  # whoever else waits must hear of it
            self._future.set_exception(error)
        else:
            self._future.set_result(None)
