"""The file of all ranks: each writes its part, and the last one joins them."""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.tools.tracing.perfetto import events
from weft.tools.tracing.rank_trace import RankTrace, on_one_clock

_PART = ".rank{}.part"


def write_part(path: Path, part: dict[str, Any]) -> None:
    """Write a rank's part beside the file; if the parts of all ranks are there, write the file from them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(f"{path}{_PART.format(part['rank'])}", part)
        parts = [found for found in _parts(path) if _of_one_run(found, part)]
        if len(parts) == part["world"]:
            merge(path, parts)
            for each in parts:
                os.unlink(f"{path}{_PART.format(each['rank'])}")
            os.unlink(f"{path}.lock")


def merge(path: Path, parts: Sequence[dict[str, Any]]) -> None:
    """Write the file of these parts, for ui.perfetto.dev and for the report."""
    ranks = on_one_clock(parts)
    content = {"traceEvents": events(ranks), "displayTimeUnit": "ms", "weft": {"parts": list(parts)}}
    _write(path, content)


def _write(path: str | Path, content: dict[str, Any]) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump(content, file, separators=(",", ":"))
    os.replace(temporary, path)  # whole or not at all


def load_trace(path: Path) -> list[RankTrace]:
    """Return the ranks' traces from a file, or, if the run has not written it, from the parts beside it.

    Raises:
        FileNotFoundError: there are neither.
        ValueError: the file is no trace of weft's.
    """
    if path.exists():
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or "weft" not in content:
            raise ValueError(f"{path} is no trace that weft has written")
        return on_one_clock(content["weft"]["parts"])
    parts = _parts(path)
    if not parts:
        raise FileNotFoundError(f"{path} is not there, nor a part of it")
    return on_one_clock(parts)


def _parts(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(file.read_text()) for file in parts_of(path)), key=lambda part: part["rank"])


def parts_of(path: Path) -> list[Path]:
    """Return the files of the ranks' parts."""
    return list(path.parent.glob(f"{path.name}.rank*.part"))


def _of_one_run(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["world"] == b["world"] and a["began"] <= b["ended"] and b["began"] <= a["ended"]
