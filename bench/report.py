"""Prints and saves what a bench found, with the machine and versions it was found on."""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import weft
from weft.bench.measure import Quantiles, Row


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


def _cells(times: Quantiles | None) -> tuple[str, str]:
    return (f"{times.p50_us:.0f}", f"{times.p20_us:.0f}-{times.p80_us:.0f}") if times else ("-", "-")


def report(rows: list[Row], command: str, save_to: str | None) -> None:
    """The table to the terminal and, where asked, everything to a JSON file."""
    where = environment()
    table = Table(title=command, caption=", ".join(f"{key} {value}" for key, value in where.items()))
    for heading in ("op", "shape"):
        table.add_column(heading)
    for heading in ("ours us", "p20-p80", "peer us", "p20-p80"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("(which)")
    for heading in ("ratio", "limit us", "of limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.op,
            row.shape,
            *_cells(row.ours),
            *_cells(row.peer),
            row.peer_name,
            f"{row.ratio:.1f}x" if row.ratio else "-",
            f"{row.limit.p50_us:.0f}",
            f"{row.share_of_limit:.0%}",
        )
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    for limit in sorted({row.limit_name for row in rows}):
        console.print(f"limit: {limit}")
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
