"""Checks of the first launches in processes of their own: a check that hangs or poisons the device costs its own row.

A worker runs one group and reports, in lines of JSON, the check that it begins and its row. After a fault it probes the
device. An illegal address fails every later call of a process, so a worker with a poisoned device ends, and so does one
whose check takes too long. The next worker goes on behind that check.

WEFT_PLANT="group:number:fault, ..." plants a fault for a rehearsal: "address", "hang" or "wrong".
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from weft.bench.table import Row

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "helpers")]
import first_launches  # noqa: E402
from first_launches import Check  # noqa: E402

START_S = 90  # until a worker begins its first check
CHECK_S = 30  # of one check
_POISONED = 3  # a worker's exit status
_BEGINS, _ROW, _DONE = "begins", "row", "done"


def rows(group: str, end: float, keep: Callable[[dict], None], check_s: float = CHECK_S) -> None:
    """Hand the row of every check of a group to `keep`, until time.monotonic() passes `end`."""
    first: int | None = 0
    while first is not None:
        first = _run_worker(group, first, end, keep, check_s)


def _run_worker(group: str, first: int, end: float, keep: Callable[[dict], None], check_s: float) -> int | None:
    """Run a worker from a check on; return the check from which the next one goes on, None after the last."""
    command = [sys.executable, "-u", __file__, group, str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    begun: dict | None = None
    following = first
    try:
        while True:
            left = end - time.monotonic()
            limit = min(left, START_S if begun is None and following == first else check_s)
            try:
                line = lines.get(timeout=max(0.0, limit))
            except queue.Empty:
                why = "no time left" if left <= check_s else f"no end within {limit:.0f} s"
                keep(_fault(group, following, begun, why))
                return None if left <= check_s else following + 1
            if line is None:  # the worker has ended
                code = process.wait()
                if begun is not None:
                    keep(_fault(group, following, begun, f"the process ended with status {code}"))
                    return following + 1
                if code == _POISONED:
                    return following
                keep(_fault(group, following, begun, f"the process ended with status {code}"))
                return None
            said = json.loads(line) if line.startswith('{"guarded"') else {}
            kind = said.get("guarded")
            if kind == _BEGINS:
                begun, following = said["of"], said["number"]
            elif kind == _ROW:
                keep({"group": group, "number": following, **said["row"]})
                begun, following = None, following + 1
            elif kind == _DONE:
                return None
            else:
                print(line, end="", flush=True)
    finally:
        process.kill()
        process.wait()


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _fault(group: str, number: int, of: dict | None, why: str) -> dict:
    row = Row(of or {"op": f"{group}: check {number}", "shape": ""}, remark=f"FAULT: {why}")
    return {"group": group, "number": number, **row.as_dict()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("group", choices=first_launches.groups())
    parser.add_argument("first", type=int)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    most = first_launches.TIMES if device.type == "cuda" else 1
    plants = _plants(options.group)
    for number, check in enumerate(first_launches.groups()[options.group](device)):
        if number < options.first:
            continue
        planted = plants.get(number)
        _say(_BEGINS, number=number, of={"op": check.name, "shape": check.shape})
        row = first_launches.row_of(check if planted is None else _with_fault(check, planted, device), most)
        _say(_ROW, row=row.as_dict())
        if first_launches.is_fault(row) and (_is_poisoned(device) or planted == "address"):
            return _POISONED
    _say(_DONE)
    return 0


def _say(kind: str, **fields) -> None:
    print(json.dumps({"guarded": kind, **fields}), flush=True)


def _is_poisoned(device: torch.device) -> bool:
    """Return whether a call on the device fails that has nothing to do with ours."""
    try:
        return torch.ones(8, device=device).sum().item() != 8
    except RuntimeError:
        return True


def _plants(group: str) -> dict[int, str]:
    plants = [plant.strip().split(":") for plant in os.environ.get("WEFT_PLANT", "").split(",") if plant.strip()]
    return {int(number): fault for of, number, fault in plants if of == group}


def _with_fault(check: Check, fault: str, device: torch.device) -> Check:
    def wrong():
        return [x + 1 if x.is_floating_point() else x for x in check.ours()]

    def address():
        beyond = torch.zeros(1, device=device)[torch.tensor([1 << 20], device=device)]
        return [beyond, *check.ours()]

    def hang():
        time.sleep(3600)
        return check.ours()

    return replace(check, ours={"wrong": wrong, "address": address, "hang": hang}[fault])


if __name__ == "__main__":
    sys.exit(main())
