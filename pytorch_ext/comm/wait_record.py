"""Record of a kernel that gave up waiting for another rank, and the errors that the host raises for it.

A kernel cannot raise. It writes a record to memory that the host reads, fills its output with NaN, and ends. The host
reads the record before each launch and in `weft.check_waits`. The record is never cleared: flags may be left in any
state, so the group stays broken.
"""

import ctypes
import os
import select
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft import _C

WORDS, _FIELDS, _STATES = _C.wait_record.words, _C.wait_record.fields, _C.wait_record.states
_IDLE, _TIMED_OUT, _MISMATCHED, _STOPPED = (_STATES[name] for name in ("idle", "timed_out", "mismatched", "stopped"))
_PEER, _CLAIMED = _FIELDS["peer"], _FIELDS["claimed"]
_LOOK_EVERY_S = 0.1

# Names of operations and phases by code. Codes below 100 belong to the extension. Other modules that launch waiting
# kernels add theirs from 100 on.
WAIT_NAMES: dict[int, str] = {}


class WaitRecord:
    """One rank's record for the kernels of one group on one device.

    Attributes:
        memory: [WORDS] int64 that kernels write and the host reads; pinned if the device is a GPU.
        timeout_s: limit of a wait, in seconds.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float):
        self.memory = torch.zeros(WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._state = ctypes.c_int64.from_address(
            self.memory[_FIELDS["state"] :].data_ptr()
        )  # read in a tenth of a microsecond
        self._group, self.timeout_s = group, timeout_s
        self._lost: list[int] | None = None  # may include a rank that left because another died
        self._found: tuple[type[_C.CommError], str] | None = None

    @property
    def address(self) -> int:
        """Address for kernels: pinned memory has one address for the host and every device."""
        return self.memory.data_ptr()

    def check(self) -> None:
        """Call before launching a waiting kernel. Raises if a wait failed or is bound to.

        Raises:
            CollectiveTimeoutError, CollectiveMismatchError, RankLostError: the failure in the record; every later call
                raises it again.
        """
        if self._state.value != _IDLE:
            if self._found is None:
                self._found = self._what_happened()
            kind, text = self._found
            raise kind(text)

    def check_past(self, marked: Callable[[], bool]) -> None:
        """Raise the failure of waits that have ended. A rank that leaves after all is done is no failure.

        Waits for no kernel.

        Args:
            marked: returns whether a kernel that the host stopped has left a mark outside the record.
        """
        if self._state.value != _STOPPED or self.memory[_CLAIMED] != 0 or marked():
            self.check()

    def stop(self, lost: list[int]) -> None:
        """End every present and future wait, because the ranks `lost` are gone. An earlier failure stays."""
        if self._state.value == _IDLE:
            self._lost = lost
            self.memory[_PEER] = lost[0]
            self._state.value = _STOPPED

    def _what_happened(self) -> tuple[type[_C.CommError], str]:
        record = {name: int(self.memory[place]) for name, place in _FIELDS.items()}
        state, rank, operation, phase = (record[name] for name in ("state", "rank", "operation", "phase"))
        peer, block, seen, expected = (record[name] for name in ("peer", "block", "seen", "expected"))
        numbers = dist.get_process_group_ranks(self._group)
        rank, peer = numbers[rank], numbers[peer]
        call = f'{_name(operation)} on group "{name_of(self._group)}"'
        waited = f'rank {rank} waited in phase "{_name(phase)}", block {block}'
        if state == _TIMED_OUT:
            return _C.CollectiveTimeoutError, (
                f"rank {peer} did not come in {call} within {self.timeout_s:.3g} s ({waited}: it saw {seen} and "
                f"expected {expected}). Create the group again to use it. A kernel waits for at most the group's "
                "timeout and WEFT_WAIT_TIMEOUT_S."
            )
        if state == _MISMATCHED:
            return _C.CollectiveMismatchError, (
                f"rank {peer} made another call than {call} of rank {rank} ({waited}: it saw the signature {seen:#x} "
                f"and expected {expected:#x}). Every rank must call the same operation with the same type, sizes, "
                "scale and place in symmetric memory. Create the group again to use it."
            )
        # A kernel that gave up writes `peer` too.
        lost = [peer] if self._lost is None else [numbers[of_group] for of_group in self._lost]
        gone = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
        during = f" in or before {call} while {waited}" if operation else f' on group "{name_of(self._group)}"'
        return _C.RankLostError, f"{gone} died or left{during}. Create the group again without it."


def name_of(group: dist.ProcessGroup) -> str:
    """Return the group's name in errors: its description, or torch's name if it has none."""
    desc = group.group_desc
    return desc if desc and desc != "undefined" else group.group_name


class Processes:
    """The processes of a group's ranks on this machine, for a group without an engine to watch them.

    Args:
        processes: key and machine of each rank's process.
        rank: this rank.
    """

    def __init__(self, processes: list[dict], rank: int):
        self._descriptors: dict[int, int] = {}
        self._gone: list[int] = []
        for peer, process in enumerate(processes):
            if peer == rank or process["machine"] != processes[rank]["machine"]:
                continue
            try:
                self._descriptors[peer] = _C.descriptor_of(process["key"], -1)
            except ProcessLookupError:
                self._gone.append(peer)
            except OSError:  # no descriptor is left, for example: that rank is not watched
                pass

    def lost_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        poll = select.poll()
        for descriptor in self._descriptors.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return sorted({*self._gone, *(peer for peer, descriptor in self._descriptors.items() if descriptor in ended)})

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def watch_for_losses(ranks, engine) -> None:
    """Start a thread that stops the waits of the communicator's records once the engine has lost a rank.

    The thread checks every 0.1 s. It ends after that, or with the communicator or the group.

    Args:
        ranks: the communicator.
        engine: its engine, or its Processes.
    """
    references = weakref.ref(ranks), weakref.ref(engine)
    threading.Thread(target=_look, args=references, name="weft watch", daemon=True).start()


def _look(communicator: weakref.ref, its_engine: weakref.ref) -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        ranks, engine = communicator(), its_engine()
        if ranks is None or engine is None or _is_destroyed(ranks.group):
            return
        if lost := engine.lost_ranks():
            for record in ranks.records:
                record.stop(lost)
            return
        del ranks, engine  # so that this thread does not keep them alive


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    if hasattr(group, "communicator"):  # of the weft backend
        return group.communicator is None
    return group not in dist.distributed_c10d._world.pg_map


def _name(code: int) -> str:
    """Return the name of an operation or a phase."""
    return {**_C.wait_record.names, **WAIT_NAMES}.get(code, f"code {code}")
