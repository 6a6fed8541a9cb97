"""Connections between the machines of a group, over gloo, and the group's first failure.

Every rank raises the first failure. The failing rank writes it to the store and closes its connections. That wakes the
ranks at the other ends, which then read the store.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
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
_LOOKS_EVERY_S = 0.1  # for a failure of the group
_ANOTHER_KNOWS_WITHIN_S = 1.5  # neighbours see a rank die; a rank that only lost a connection asks them first


class InterHost:
    """Connections of one rank: to the other ranks of its lane, if it is in one, and to all ranks."""

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
        labels: Sequence[int],
    ):
        self.timeout, self._labels, self._own_label = timeout, labels, labels[rank]
        self.failure: BaseException | None = None
        self._store, self._name, self._on_failure = store, name, on_failure
        own = next(number for number, host in enumerate(hosts) if rank in host)
        self._elsewhere = [labels[other] for host in hosts if rank not in host for other in host]
        self._lost_ranks = lost_ranks
        self._connections: dict[str, Any] = {}
        try:
            meeting = store.clone()  # gloo blocks this client of the store while it waits
            if lane is not None:
                lane_store = dist.PrefixStore(f"lane/{lane}", meeting)
                self._connections["lane"] = self._connect(lane_store, own, len(hosts))
            everyone_store = dist.PrefixStore("everyone", meeting)
            self._connections["everyone"] = self._connect(everyone_store, rank, sum(len(host) for host in hosts))
        except _C.CommError:
            raise
        except (RuntimeError, OSError) as error:
            raise self.fail(
                _C.CommError(f'rank {self._own_label} could not reach the other machines of group "{name()}": {error}')
            ) from error

    def _connect(self, store, rank: int, world: int) -> Any:
        """Return a ProcessGroupGloo; raise as soon as the group fails, where gloo would wait until its timeout."""
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
                names = ", ".join(str(self._labels[rank]) for rank in lost)
                loss = f"rank {names} was lost" if lost else "a rank was lost"
                raise self.fail(
                    _C.RankLostError(f'{loss} while group "{self._name()}" was made (rank {self._own_label} waited).')
                )
        return made.result()

    @property
    def lane(self) -> Any:
        """ProcessGroupGloo of this rank's lane; its ranks are the numbers of the machines."""
        return self._connection("lane")

    @property
    def everyone(self) -> Any:
        """ProcessGroupGloo of the whole group."""
        return self._connection("everyone")

    def _connection(self, name: str) -> Any:
        connection = self._connections.get(name)
        if connection is None:
            raise self.failure or _C.CommError(f'group "{self._name()}" was destroyed; create it again to use it.')
        return connection

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        for connection in self._connections.values():
            connection.set_timeout(timeout)

    def finish(self, work: dist.Work) -> None:
        """Wait for a collective of gloo; raise the group's failure if it fails first."""
        while True:
            try:
                work.wait(timedelta(milliseconds=100))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the error of the work, if any
                    return
                if self.failure is not None:
                    raise self.failure from None

    def fail(self, error: BaseException) -> BaseException:
        """Close the connections, call `on_failure`, and return the group's first failure.

        That is the failure that another rank wrote to the store earlier, or else `error`.
        """
        if self.failure is None:
            self.failure = self._first_failure(error)
            for connection in self._connections.values():
                with suppress(RuntimeError):
                    connection.abort()
            self.close()
            self._on_failure()
        return self.failure

    def close(self) -> None:
        self._connections = {}  # data already sent still arrives

    def lost(self, operation: str, error: RuntimeError) -> BaseException:
        """Return the failure behind an error of gloo.

        That is the failure that a better informed rank writes to the store within 1.5 s. Without one it is the loss of
        a rank on another machine, or its timeout.
        """
        deadline = time.monotonic() + _ANOTHER_KNOWS_WITHIN_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline and self.failure is None and not self._store.check(["failure"]):
                time.sleep(0.02)
        where = f"a rank of {self._elsewhere}, on other machines,"
        details = f"(rank {self._own_label} waited): {error}"
        if "imed out" in str(error):
            limit = f"{self.timeout.total_seconds():.3g} s"
            return self.fail(
                _C.CollectiveTimeoutError(f"{where} did not answer in {operation} within {limit} {details}")
            )
        return self.fail(_C.RankLostError(f"{where} was lost in {operation} {details}"))

    def _first_failure(self, error: BaseException) -> BaseException:
        try:
            message = json.dumps([type(error).__name__, str(error)])
            kind, text = json.loads(self._store.compare_set("failure", "", message).decode())
            return _ERRORS[kind](text)
        except (RuntimeError, ValueError):  # the store is gone with its host
            return error


class Later:
    """Result of an operation under way; torch waits for it as for an engine's Pending."""

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
        # On its own thread, because a callback may start a collective and wait for it.
        self._future.add_done_callback(
            lambda future: threading.Thread(target=callback, args=(future.exception(),), daemon=True).start()
        )


class Message(Later):
    """Message under way over gloo.

    gloo closes the connection if a wait for a message times out, and cannot say whether a message has come. So `done`
    and a bounded `wait` leave the waiting to a background thread, which waits until the end.
    """

    def __init__(
        self,
        between: InterHost,
        operation: str,
        start: Callable[[], dist.Work],
        finish: Callable[[], object] = lambda: None,
    ):
        super().__init__(Future())
        self._between, self._operation = between, operation
        self._start, self._finish = start, finish  # the closures keep the message's memory alive
        self._completing = threading.Lock()  # taken by the first caller, never released
        try:
            self._work = start()
        except RuntimeError as error:  # from gloo
            raise between.lost(operation, error) from error

    def done(self) -> bool:
        self._complete_in_background()
        return super().done()

    def wait(self, timeout_s: float | None = None) -> bool:
        # The main thread does not wait inside gloo: Ctrl-C would not end that wait.
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
        except RuntimeError as error:  # from gloo
            self._future.set_exception(self._between.lost(self._operation, error))
        except BaseException as error:  # other threads that wait must get it too
            self._future.set_exception(error)
        else:
            self._future.set_result(None)
