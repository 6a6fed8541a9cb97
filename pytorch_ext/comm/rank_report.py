"""What this rank does now, for whom asks: `weft stuck` and a rank whose wait has timed out.

Each process that is a rank of a group of weft has a thread that answers at a socket with the process's number in its
name. It costs nothing until it is asked. The socket has no file, and goes with the process.
"""

import json
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from weft import _C
from weft.comm import flight_record
from weft.comm.wait_record import name_of

_SOCKET = "weft-rank.{user}.{pid}"  # in the abstract namespace
_NAMES = re.compile(r"@weft-rank\.(\d+)\.(\d+)$", re.MULTILINE)
_ANSWERS_WITHIN_S = 2.0
_LATE = re.compile(r"ranks? ([\d, ]+) did not arrive in .*\(rank (\d+) waited")
_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    str(Path(__file__).resolve().parents[1]),
    "<",
)
_SHOWN = 8  # lines of a stack
_STATES = {"T": "stopped", "t": "traced", "Z": "dead", "D": "in the kernel", "R": "running", "S": "asleep"}
_groups = 0  # of this process
_listening: socket.socket | None = None


def enter() -> None:
    """Count a group of this process; with the first one, begin to answer."""
    global _groups, _listening
    _groups += 1
    if _groups > 1:
        return
    _print_at_signal()
    _C.on_comm_error(_at_error)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind("\0" + _SOCKET.format(user=os.getuid(), pid=os.getpid()))
        listening.listen(4)
    except OSError:  # the report is a help, and no condition of a group
        listening.close()
        return
    _listening = listening
    threading.Thread(target=_answer, args=(listening,), name="weft rank report", daemon=True).start()


def _print_at_signal() -> None:
    """Print the report at SIGUSR1, unless the program or Slurm has a use of its own for it."""
    here = threading.current_thread() is threading.main_thread() and "SLURM_JOB_ID" not in os.environ
    if here and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda *_: print(table(reports()), file=sys.stderr, flush=True))


def leave() -> None:
    """Count a group that is destroyed; with the last one, stop answering."""
    global _groups
    _groups -= 1
    if _groups == 0 and _listening is not None:
        _listening.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        _forget()


def _forget() -> None:
    """Close the socket. A forked child does so with its copy, which else would outlive the rank."""
    global _groups, _listening
    if _listening is not None:
        _listening.close()
    _groups, _listening = 0, None


os.register_at_fork(after_in_child=_forget)


def _answer(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            try:
                text = json.dumps(report())
            except Exception as error:  # of any kind: the program's own work goes on meanwhile
                text = json.dumps({"pid": os.getpid(), "silent": f"not able to say: {error!r}"})
            connection.sendall(text.encode())


def report() -> dict[str, Any]:
    """Return this rank's number, its groups with the call that each is in, and where its main thread is."""
    if not dist.is_initialized():
        return {"pid": os.getpid(), "silent": "about to join its first group"}
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    groups = [
        {"name": name_of(group), "calls": engine.calls, "waiting": engine.waiting()}
        for group in list(distributed_c10d._world.pg_map)
        if (engine := getattr(group, "group_here", None)) is not None
    ]
    return {
        "pid": os.getpid(),
        "rank": dist.get_rank(),
        "job": os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("MASTER_PORT", f"of {os.getppid()}"),
        "groups": groups,
        "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(main)],
        "place": _place(main),
        "modules": _modules_in(main),
    }


def _place(frame: Any) -> str:
    """Return the innermost line of the program's own: of no library."""
    while frame is not None:
        code = frame.f_code
        if not os.path.realpath(code.co_filename).startswith(_LIBRARIES) and not code.co_filename.startswith("<"):
            return f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "no line of the program"


def _modules_in(frame: Any) -> list[str]:
    """Return the classes of the modules whose forwards run, the outermost first."""
    found: list[str] = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and isinstance(owner, nn.Module):
            found.insert(0, type(owner).__name__)
        frame = frame.f_back
    return found


def reports() -> list[dict[str, Any]]:
    """Return the reports of this user's ranks on this machine; of one that does not answer, its process's state."""
    names = _NAMES.findall(Path("/proc/net/unix").read_text())
    numbers = sorted({int(pid) for user, pid in names if int(user) == os.getuid()})
    with ThreadPoolExecutor(max(1, len(numbers))) as asking:  # one that does not answer costs time
        return list(asking.map(_asked, numbers))


def _asked(pid: int) -> dict[str, Any]:
    if pid == os.getpid():
        return report()
    if (state := _state_of(pid)) in ("stopped", "dead"):  # it would not answer
        return {"pid": pid, "silent": state}
    text = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWERS_WITHIN_S)
            connection.connect("\0" + _SOCKET.format(user=os.getuid(), pid=pid))
            while part := connection.recv(1 << 16):
                text += part
        return json.loads(text)
    except (OSError, ValueError):
        return {"pid": pid, "silent": _state_of(pid)}


def _state_of(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _STATES.get(fields[0], fields[0])
    except OSError:
        return "gone"


def table(found: Sequence[dict[str, Any]], late: Collection[int] = ()) -> str:
    """Return the reports as text, by job: first the ranks that others wait for and that wait for nobody.

    Args:
        late: ranks that others have waited for, and do no longer.
    """
    silent = [each for each in found if "rank" not in each]
    jobs: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        if "rank" in each:
            jobs.setdefault(each["job"], []).append(each)
    lines = [line for of_job in jobs.values() for line in _lines_of_job(of_job, silent, late)]
    if not jobs:
        lines = [f"process {each['pid']} is a rank and does not answer: {each['silent']}" for each in silent]
    return "\n".join(lines or ["no rank of a group of weft runs on this machine, as this user"])


def _lines_of_job(ranks: list[dict], silent: list[dict], late: Collection[int]) -> Iterator[str]:
    waits = {each["rank"]: [group for group in each["groups"] if group["waiting"]] for each in ranks}
    missed = {label for of_rank in waits.values() for group in of_rank for label in group["waiting"][2]} | set(late)
    culprits = {rank for rank, of_rank in waits.items() if rank in missed and not of_rank}
    unanswered = sorted(missed - waits.keys())
    if unanswered:
        states = ", ".join(f"process {each['pid']} is {each['silent']}" for each in silent)
        yield f"others wait for {_ranks(unanswered)}, which does not answer: {states or 'it is gone'}"
    elif missed and not culprits:
        yield "every rank waits for another: they make their calls in different orders, or on different groups"
    for each in sorted(ranks, key=lambda each: (each["rank"] not in culprits, each["rank"])):
        name = f"rank {each['rank']} (pid {each['pid']})"
        place = each["place"] + (f", in {' > '.join(each['modules'])}" if each["modules"] else "")
        if each["rank"] in culprits:
            done = ", ".join(f'call #{group["calls"]} on "{group["name"]}"' for group in each["groups"])
            yield f"{name} is waited for, at {place}; it has finished {done}"
            yield from (f"    {line}" for line in each["stack"][-_SHOWN:])
        for call, seconds, missing in (group["waiting"] for group in waits[each["rank"]]):
            yield f"{name} has waited for {seconds:.1f} s in {call} for {_ranks(missing)}, at {place}"
        if each["rank"] not in culprits and not waits[each["rank"]]:
            yield f"{name} is at {place}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _at_error(text: str) -> None:
    """Write the record of calls; after a timeout, print the report of all ranks on the one that has noticed it."""
    flight_record.write()
    late = _LATE.match(text)
    if late is None or not dist.is_initialized() or dist.get_rank() != int(late[2]):
        return
    job = report()["job"]
    of_job = [each for each in reports() if each.get("job", job) == job]
    missing = [int(rank) for rank in late[1].split(", ")]
    print(f"weft: {text}\n{table(of_job, missing)}", file=sys.stderr, flush=True)
