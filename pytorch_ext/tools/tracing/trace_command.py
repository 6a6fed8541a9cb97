"""`weft trace`: run a program with a trace, and report where the time of a trace's steps goes."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from weft.tools.numbers import numbers_of
from weft.tools.planner.hardware import Hardware
from weft.tools.tracing.step_report import StepReport
from weft.tools.tracing.trace_file import load_trace, parts_of


def _status_of(command: list[str], environment: dict[str, str]) -> int:
    with subprocess.Popen(command, env=environment) as program:
        try:
            return program.wait()
        except KeyboardInterrupt:  # the terminal interrupts the program too: its ranks write what they have
            return program.wait()


def run(options: argparse.Namespace) -> int:
    path, status = Path(options.file).absolute(), 0
    try:
        numbers_of(options.steps)
        if options.run is not None:
            for old in (path, *parts_of(path)):
                old.unlink(missing_ok=True)
            asked = {"WEFT_TRACE": str(path), "WEFT_TRACE_STEPS": options.steps}
            status = _status_of(shlex.split(options.run), {"WEFT_AS_GLOO": "1", **os.environ, **asked})
            if status:
                print(f"weft trace: {options.run!r} ended with status {status}", file=sys.stderr)
        ranks = load_trace(path)
        if not any(rank.spans for rank in ranks):
            raise ValueError(f"{path} has no calls of modules: the program ended before, or called none in these steps")
        report = StepReport(ranks, None if options.hardware is None else Hardware.of(options.hardware))
    except (OSError, ValueError) as error:
        print(f"weft trace: {error}", file=sys.stderr)
        return 2
    missing = sorted(set(range(ranks[0].world)) - {rank.rank for rank in ranks})
    if missing:
        print(f"weft trace: without ranks {', '.join(map(str, missing))}, which left no part beside {path}")
    print(report)
    if options.html is not None:
        Path(options.html).write_text(report.html())
    return status
