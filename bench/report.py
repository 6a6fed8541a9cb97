"""Prints and saves what a bench found, with the machine and versions it was found on."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weft.bench.environment import environment


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
