"""What this rank does now, for whom asks: `weft stuck` and a rank whose wait has timed out.

Each process that is a rank of a group of weft has a thread that answers at a socket with the process's number in its
name. It costs nothing until it is asked. The socket has no file, and goes with the process. It answers its own user and
root alone, and what it hears comes from them.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
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
_TORCHS_OWN = ("_call_impl", "_wrapped_call_impl")  # frames between a module's call and its forward
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
            if not _is_of_this_user(connection):
                continue
            try:
                text = json.dumps(report())
            except Exception as error:  # of any kind: the program's own work goes on meanwhile
                text = json.dumps({"pid": os.getpid(), "silent": f"not able to say: {error!r}"})
            connection.settimeout(_ANSWERS_WITHIN_S)
            with contextlib.suppress(OSError):  # of one that asks and does not read
                connection.sendall(text.encode())


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is this user's or root's, as the kernel says."""
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return user in (os.geteuid(), 0)


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
        "parent": os.getppid(),
        "program": " ".join(sys.argv),
        "groups": groups,
        "stack": [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack(main)
            if frame.name not in _TORCHS_OWN
        ],
        "place": _place(main),
        "modules": _modules_in(main),
    }


def _place(frame: Any) -> str:
    """Return the innermost line of the program's own: of no library."""
    if frame is not None and frame.f_code is threading._shutdown.__code__:  # type: ignore[attr-defined]
        frames = sys._current_frames()
        threads = [x for x in threading.enumerate() if not x.daemon and x is not threading.main_thread()]
        at = [f'"{thread.name}" at {_place(frames.get(thread.ident or 0))}' for thread in threads]
        return f"the end of its program, where it waits for thread {', '.join(at)}"
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
        return _silent(pid, state)
    text = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWERS_WITHIN_S)
            connection.connect("\0" + _SOCKET.format(user=os.getuid(), pid=pid))
            if not _is_of_this_user(connection):
                return {}
            while part := connection.recv(1 << 16):
                text += part
        return json.loads(text)
    except TimeoutError:  # the kernel takes the question and Python does not
        return _silent(pid, f"{_state_of(pid)}, perhaps in code that keeps the GIL") | {"stack": _by_py_spy(pid)}
    except (OSError, ValueError):
        return _silent(pid, _state_of(pid))


def _silent(pid: int, why: str) -> dict[str, Any]:
    """Return the report of a process that does not answer, with what the kernel knows of it."""
    found: dict[str, Any] = {"pid": pid, "silent": why}
    with contextlib.suppress(OSError):  # it is gone
        found["parent"] = int(_read(pid, "stat").rpartition(")")[2].split()[1])
        found["program"] = " ".join(_read(pid, "cmdline").split("\0")[1:]).strip()
    return found


def _by_py_spy(pid: int) -> list[str]:
    """Return the stack of a process that does not answer, if py-spy is installed and may read it."""
    command = py_spy()
    if command is None:
        return ["(`pip install py-spy` shows where)"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = [command, "dump", "--nonblocking", "--pid", str(pid)]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=5 * _ANSWERS_WITHIN_S)
        threads = [text.splitlines() for text in found.stdout.split("\nThread ")[1:]]
        main = [lines for lines in threads if lines[0].startswith(f"{pid} ")]
        return [line.strip() for lines in main for line in reversed(lines[1:]) if line.strip()]
    return []


def py_spy() -> str | None:
    """Return the program py-spy, beside this Python or on the path."""
    return shutil.which(str(Path(sys.executable).with_name("py-spy"))) or shutil.which("py-spy")


def _state_of(pid: int) -> str:
    try:
        fields = _read(pid, "stat").rpartition(")")[2].split()
        return _STATES.get(fields[0], fields[0])
    except OSError:
        return "gone"


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def table(found: Sequence[dict[str, Any]], late: Collection[int] = ()) -> str:
    """Return the reports as text, by job, those that wait first: of each, first the ranks that others wait for.

    Args:
        late: ranks that others have waited for, and do no longer.
    """
    jobs: dict[str, list[dict[str, Any]]] = {}
    job_of = {each["parent"]: each["job"] for each in found if "rank" in each}  # of a launcher's processes
    for each in found:
        if "pid" in each:
            jobs.setdefault(each.get("job") or job_of.get(each.get("parent"), ""), []).append(each)
    lines: list[str] = []
    for of_job in sorted(jobs.values(), key=_is_healthy):
        if len(jobs) > 1:
            state = "nobody waits" if _is_healthy(of_job) else "waits"
            lines.append(f"{of_job[0].get('program') or 'a program'}, {_processes(len(of_job))}: {state}")
        lines += _lines_of_job(of_job, late)
    lines = lines or [
        "no rank of a group of weft runs on this machine, as this user. Groups of gloo do not answer: start the",
        "program with weft run --as-gloo, or set WEFT_AS_GLOO=1",
    ]
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines)


def _is_healthy(ranks: Sequence[dict[str, Any]]) -> bool:
    return not any("silent" in each or any(group["waiting"] for group in each["groups"]) for each in ranks)


def _lines_of_job(found: Sequence[dict], late: Collection[int]) -> Iterator[str]:
    ranks, silent = ([each for each in found if ("silent" in each) == is_silent] for is_silent in (False, True))
    waits = {each["rank"]: [group for group in each["groups"] if group["waiting"]] for each in ranks}
    missed = {label for of_rank in waits.values() for group in of_rank for label in group["waiting"][2]} | set(late)
    culprits = {rank for rank, of_rank in waits.items() if rank in missed and not of_rank}
    unanswered = sorted(missed - waits.keys())
    if unanswered:
        states = ", ".join(f"process {each['pid']} is {each['silent']}" for each in silent)
        yield f"others wait for {_ranks(unanswered)}, which does not answer: {states or 'it is gone'}"
    elif missed and not culprits:
        yield "every rank waits for another: they make their calls in different orders, or on different groups"
    for each in silent:
        if not unanswered:
            yield f"process {each['pid']} is a rank and does not answer: {each['silent']}"
        yield from (f"    {line}" for line in each.get("stack", ())[-_SHOWN:])
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


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


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
