"""The common parts of all benches' rows, read from their dictionaries: times, contenders, identity."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.bench.measure import Quantiles

OURS = ("ours", "symmetric", "weft", "ordinary")  # ratios are to the first that a row has
# The fields that identify a row. Its other fields are measured.
IDENTITY = ("op", "operation", "name", "paradigm", "method", "mesh", "shape", "length", "bytes", "dtype", "world")
_TIMES = {"p20_us", "p50_us", "p80_us"}


def times(row: Mapping[str, Any]) -> dict[str, Quantiles]:
    """Return the times of a row by contender; skip other values."""
    return {name: Quantiles(**value) for name, value in row.get("times", {}).items() if _is_time(value)}


def _is_time(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != _TIMES:
        return False
    return all(isinstance(us, int | float) and not isinstance(us, bool) and us > 0 for us in value.values())


def ours(found: Mapping[str, Quantiles]) -> str | None:
    """Return the name of our time, the best if there are several; None if there is none."""
    return next((name for name in OURS if name in found), None)


def ratios(found: Mapping[str, Quantiles]) -> dict[str, float]:
    """Return the others' medians over ours: more than 1 if ours is faster."""
    base = ours(found)
    if base is None:
        return {}
    return {name: each.p50_us / found[base].p50_us for name, each in found.items() if name not in OURS}


def identities(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of each row; rows with equal names are numbered."""
    found, seen = [], Counter[str]()
    for row in rows:
        fields = {field: row[field] for field in IDENTITY if field in row}
        name = " ".join(f"W={value}" if field == "world" else str(value) for field, value in fields.items())
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found


def flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the row's numbers and texts by name; nested values have paths, as in ("ours.p50_us", 12.5)."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, " ".join(map(str, value)) if isinstance(value, list | tuple) else value
