"""Prints and saves what a bench found, with the machine and versions it was found on."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import weft


def environment() -> dict:
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weft": weft.__version__,
        "instruction_set": os.environ.get("WEFT_ISA") or weft.build_info()["instruction_sets"][0],
    }


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def report(suite, rows: Sequence, command: str, save_to: str | None) -> None:
    """The suite's table to the terminal and, where asked, everything to a JSON file."""
    where = environment()
    table = Table(title=command, caption=", ".join(f"{key} {value}" for key, value in where.items()))
    for number, heading in enumerate(suite.columns()):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*suite.cells(row))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    console.print(f"limit: {suite.LIMIT}")
    if save_to:
        results = {
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": where,
            "rows": [row.as_dict() for row in rows],
        }
        Path(save_to).parent.mkdir(parents=True, exist_ok=True)
        Path(save_to).write_text(json.dumps(results, indent=2) + "\n")
        console.print(f"saved to {save_to}")
