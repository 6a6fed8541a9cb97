"""Each rank's last collectives, in a file for torch's analyzer of flight records (`torchfrtrace`).

torch records collectives in C++ backends. weft's groups are not made of these. Where the variable is set by which
torch is given the file's name, the engine remembers the last 256 calls of each group, and they are written when a
collective fails, when a group is destroyed, and when the process ends.
"""

import atexit
import os
import pickle
import time
import warnings
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft import _C

FILE_VARIABLES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"  # the second is the older name
_NAMES = {"barrier": "all_reduce_barrier", "all_gather": "_all_gather_base"}  # others are named as in the engine
_KEPT = 256
_enabled = False


def enable(group: _C.Group) -> None:
    """Record the group's calls, and write this rank's record from now on, if the environment names the file."""
    global _enabled
    if _file() is None:
        return
    group.record_calls(_KEPT)
    if not _enabled:
        _enabled = True
        atexit.register(write)


def write() -> None:
    """Write the last collectives of all groups to the file, if it is named; replaces what the file had.

    The file's name is the variable's value and the rank. Groups over several machines are left out.
    """
    prefix = _file()
    made: Iterable[Any] = distributed_c10d._world.pg_map
    groups = [group for group in made if getattr(group, "group_here", None) is not None]
    if prefix is None or not groups or not _enabled:
        return
    config: dict[str, dict[str, str]] = {}
    entries: list[dict[str, Any]] = []
    forgotten = 0
    for group in groups:
        config[group.group_name] = {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        calls = group.group_here.last_calls()
        entries += [_entry(group, *call) for call in calls]
        forgotten += calls[0][0] - 1 if calls else 0
    entries.sort(key=itemgetter("time_created_ns"))
    for number, entry in enumerate(entries, forgotten):  # the analyzer begins where every rank's record has begun
        entry["record_id"] = number
    record = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
    temporary = f"{prefix}{dist.get_rank()}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            pickle.dump(record, file)
        os.replace(temporary, f"{prefix}{dist.get_rank()}")
    except OSError as error:  # it ends no program
        warnings.warn(f"the record of collectives was not written: {error}", stacklevel=2)


def _file() -> str | None:
    return next((os.environ[name] for name in FILE_VARIABLES if os.environ.get(name)), None)


def _entry(group, number: int, operation: str, dtype: str, count: int, *times: int) -> dict:
    _, begun_ns, _, ended_ns = times  # submitted, begun, met, ended
    begun_ns += time.time_ns() - time.monotonic_ns()  # since 1970
    whole, part = [count], [count // group.size()]  # of an uneven split, the smallest part
    parts = [group.size(), *part]
    inputs = {"all_gather": part, "reduce_scatter": parts}.get(operation, whole)
    outputs = {"all_gather": parts, "reduce_scatter": part}.get(operation, whole)
    return {
        "pg_id": 0,
        "process_group": (group.group_name, group.group_desc),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"gloo:{_NAMES.get(operation, operation)}",  # the analyzer knows no other name for CPUs
        "time_created_ns": begun_ns,
        "input_sizes": [inputs],
        "input_dtypes": [dtype],
        "output_sizes": [outputs],
        "output_dtypes": [dtype],
        "state": "completed" if ended_ns else "started",
        "time_discovered_started_ns": begun_ns,
        "time_discovered_completed_ns": None,
        "retired": ended_ns > 0,
        "is_p2p": False,
        "frames": [],
    }
