"""Events of a process group's calls for torch.profiler, such as "weft:all_reduce"."""

import threading

import torch
from torch.autograd import profiler

# Methods of a process group and their events, under the names that gloo has for them.
_INPUTS_FIRST = {"allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "reduce": "reduce", "send": "send"}
_INPUTS_FIRST |= {"broadcast": "broadcast", "recv": "recv", "recv_anysource": "recvAnySource", "barrier": "barrier"}
_OUTPUTS_FIRST = {"allgather": "all_gather", "all_gather_single": "all_gather_into_tensor", "gather": "gather"}
_OUTPUTS_FIRST |= {"reduce_scatter": "reduce_scatter", "reduce_scatter_single": "reduce_scatter_tensor"}
_OUTPUTS_FIRST |= {"scatter": "scatter", "alltoall": "all_to_all", "all_to_all_single": "all_to_all"}

# Method: the event, and the place of the inputs among the arguments.
EVENTS = {
    **{method: (event, 0) for method, event in _INPUTS_FIRST.items()},
    **{method: (event, 1) for method, event in _OUTPUTS_FIRST.items()},
}


def profiling() -> bool:
    """Return whether a profiler of torch runs in this process."""
    return profiler._is_profiler_enabled


class ProfileEvent:
    """A call of a process group, from its start until it is known to be done.

    Args:
        name: of the event.
        tensors: the inputs, for the shapes.
        on_another_thread: end the event there, as gloo does. torch then calls it asynchronous.
    """

    def __init__(self, name: str, tensors, on_another_thread: bool):
        self._record: torch.Tensor | None = torch.autograd._record_function_with_args_enter(name, *_flat(tensors))
        self._on_another_thread = on_another_thread

    def end(self) -> None:
        record, self._record = self._record, None
        if record is None:
            return
        if self._on_another_thread:
            thread = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(record,))
            thread.start()
            thread.join()
        else:
            torch.autograd._record_function_with_args_exit(record)


def _flat(tensors) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [x for part in tensors or () for x in _flat(part)] if isinstance(tensors, list | tuple) else []
