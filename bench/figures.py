"""What the rows of all benches have in common, read from their dictionaries: times, whose they are, what identifies a
row."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.bench.measure import Quantiles

OURS = ("ours", "symmetric", "weft", "ordinary")  # the first that a row has is what its ratios are to
# The fields that say what a row is of; everything else in it was measured.
IDENTITY = ("op", "operation", "name", "paradigm", "method", "mesh", "shape", "length", "bytes", "dtype", "world")
_TIMES = {"p20_us", "p50_us", "p80_us"}


def times(row: Mapping[str, Any]) -> dict[str, Quantiles]:
    """The times of a row by contender, without what is no time."""
    return {name: Quantiles(**value) for name, value in row.get("times", {}).items() if _is_time(value)}


def _is_time(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != _TIMES:
        return False
    return all(isinstance(us, int | float) and not isinstance(us, bool) and us > 0 for us in value.values())


def ours(found: Mapping[str, Quantiles]) -> str | None:
    """The name of our time among them, the best where there are several."""
    return next((name for name in OURS if name in found), None)


def ratios(found: Mapping[str, Quantiles]) -> dict[str, float]:
    """The others' medians over ours: more than 1 where we are faster."""
    mine = ours(found)
    if mine is None:
        return {}
    return {name: each.p50_us / found[mine].p50_us for name, each in found.items() if name not in OURS}


def identities(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each row is of, in words; rows that would be called the same are numbered."""
    found, seen = [], Counter[str]()
    for row in rows:
        fields = {field: row[field] for field in IDENTITY if field in row}
        name = " ".join(f"W={value}" if field == "world" else str(value) for field, value in fields.items())
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found


def flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The row's numbers and texts, those inside of others by their path: ("ours.p50_us", 12.5)."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, " ".join(map(str, value)) if isinstance(value, list | tuple) else value
