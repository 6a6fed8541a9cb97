"""Output of a bench's results, with machine and versions: table, JSON, CSV, history file."""

import csv
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.bench.environment import checkout, device, environment, folder_name
from weft.bench.figures import flat
from weft.bench.suites import RefusedError, Suite

VERSION = 2  # of the saved format


def results(name: str, suite: Suite, module, rows: Sequence, command: str, rounds: int) -> dict[str, Any]:
    """Return the dictionary that is saved for a run."""
    return {
        "weft_bench": VERSION,
        "bench": name,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device(suite.on_gpu),
        "environment": environment(),
        "rounds": rounds,
        "limit": module.LIMIT,
        "caches": suite.caches,
        "rows": [row.as_dict() for row in rows],
    }


def console() -> Console:
    """Return a console; without a terminal it is wide enough for every bench's table."""
    return Console() if Console().is_terminal else Console(width=400)


def print_table(found: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the suite's table, and the remarks that explain its times."""
    table = Table(title=escape(found["command"]), caption=escape(versions(found)))
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    to = console()
    to.print(table)
    for line in remarks(found):
        to.print(line, highlight=False, markup=False, soft_wrap=True)


def versions(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in found["environment"].items())


def remarks(found: Mapping[str, Any]) -> list[str]:
    """Return the lines that a reader of the table needs."""
    return [
        f"times: medians, and the 20th to the 80th percentile, of up to {found['rounds']} rounds in alternation; "
        "ratio: the peer's median over ours",
        f"limit: {found['limit']}",
        f"caches: {found['caches']}",
    ]


def save_json(found: Mapping[str, Any], path: str) -> None:
    Path(path).write_text(json.dumps(found, indent=2) + "\n")


def save_csv(found: Mapping[str, Any], path: str) -> None:
    """Write a line for each row, and a column for each figure of any row, named by its path ("ours.p50_us")."""
    rows = [dict(flat(row)) for row in found["rows"]]
    columns = dict.fromkeys(name for row in rows for name in row)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["bench", *columns], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"bench": found["bench"], **row} for row in rows)


def history(folder: str | None, name: str, suite: Suite) -> Path:
    """Return the history file of a bench on this device: a line of JSON for each run.

    Args:
        folder: Base folder; None for bench/results of the checkout that weft is imported from.

    Raises:
        RefusedError: The folder is None, and weft is not imported from a checkout.
    """
    root = checkout()
    if folder is None and root is None:
        raise RefusedError("--record: this weft was installed from a wheel, which keeps no results; name a folder")
    base = Path(folder) if folder is not None else root / "bench" / "results"  # type: ignore[operator]
    return base / folder_name(device(suite.on_gpu)) / f"{name}.jsonl"


def append(found: Mapping[str, Any], path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(found) + "\n")
