"""What joins the machines of a group: gloo connections, and the first failure, which is every rank's.

A failure is told through the store, and by closing the connections, so that who waits at their other ends looks there.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft import _C

_ERRORS = {
    error.__name__: error
    for error in (_C.RankLostError, _C.CollectiveTimeoutError, _C.CollectiveMismatchError, _C.CommError)
}
_ANOTHER_KNOWS_WITHIN_S = 1.5  # a rank's neighbours see it die; who only loses a connection asks them first


class Between:
    """One rank's connections: to its lane (None: it is in none), and to everyone."""

    def __init__(
        self, hosts: list[list[int]], rank: int, lane: int | None, store, name: Callable[[], str], timeout: timedelta
    ):
        self.rank, self.timeout = rank, timeout
        self.failure: BaseException | None = None
        self._store, self._name = store, name
        own = next(number for number, host in enumerate(hosts) if rank in host)
        self._elsewhere = [other for host in hosts if rank not in host for other in host]
        self._connections: dict[str, Any] = {}
        try:
            if lane is not None:
                lane_store = dist.PrefixStore(f"lane/{lane}", store)
                self._connections["lane"] = dist.ProcessGroupGloo(lane_store, own, len(hosts), timeout=timeout)
            everyone_store = dist.PrefixStore("everyone", store)
            world = sum(len(host) for host in hosts)
            self._connections["everyone"] = dist.ProcessGroupGloo(everyone_store, rank, world, timeout=timeout)
        except RuntimeError as error:
            raise _C.CommError(
                f'rank {rank} could not reach the other machines of group "{name()}": {error}'
            ) from error

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
        """The group's first failure: this one, or what another rank told before. Closes the connections."""
        if self.failure is None:
            self.failure = self._first_failure(error)
            for connection in self._connections.values():
                with suppress(RuntimeError):
                    connection.abort()
            self.close()
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


class Message:
    """A message on its way over gloo; what torch waits for, like an engine's Pending."""

    def __init__(self, between: Between, what: str, work: dist.Work, data, finish: Callable[[], object] | None = None):
        self._between, self._what, self._work, self._data, self._finish = between, what, work, data, finish
        self._waiting = threading.Lock()

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout_s: float | None = None) -> bool:
        with self._waiting:
            try:
                self._work.wait(self._between.timeout if timeout_s is None else timedelta(seconds=timeout_s))
            except RuntimeError as error:
                if timeout_s is not None and "imed out" in str(error):
                    return False
                raise self._between.lost(self._what, error) from error
            if self._finish is not None:
                self._finish()
                self._finish = None
        return True

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        def wait_and_call() -> None:
            error = None
            try:
                self.wait()
            except BaseException as raised:
                error = raised
            callback(error)

        threading.Thread(target=wait_and_call, daemon=True).start()

    @property
    def source(self) -> int:
        return self._work._source_rank()
