"""`weft bench --compare A B`: changes of our times between two runs of a bench, separated from noise."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from weft.bench.figures import OURS, identities, times
from weft.bench.measure import Quantiles
from weft.bench.report import VERSION, console
from weft.bench.suites import RefusedError

TOLERANCE = 0.05  # difference of two runs' medians that is no change, even if the rounds of each hardly differ
FEW_ROUNDS = 7  # with fewer, the percentiles say little
_FIELDS = {"bench": str, "device": str, "command": str, "environment": dict, "rounds": int, "rows": list}
SLOWER, FASTER, NOISE = "slower", "faster", "within noise"


@dataclass(frozen=True)
class Change:
    """One of our times in both runs.

    Attributes:
        row: The row's identity.
        contender: Name of our time.
        before, after: None if that run lacks the row.
        others: Geometric mean of the ratios of the row's contenders without weft, which is the machine's share.
        verdict: SLOWER, FASTER, NOISE, or "only in ...".
    """

    row: str
    contender: str
    before: Quantiles | None
    after: Quantiles | None
    others: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """Median after over median before."""
        return self.after.p50_us / self.before.p50_us if self.before and self.after else None


def run(files: Sequence[str], tolerance: float = TOLERANCE) -> int:
    """Print the changes; return 1 if a time is slower beyond noise, else 0.

    Args:
        files: Two files of `--json` or `--record`, compared by their last runs; or one file of `--record`, for its last
            two runs.
        tolerance: Relative difference of medians that is no change.

    Raises:
        RefusedError: A file is missing or is no result, or the two runs cannot be compared.
    """
    if len(files) == 1:
        runs = read(files[0])
        if len(runs) < 2:
            raise RefusedError(f"--compare: {files[0]} holds one run; name a second file")
        (before, after), names = runs[-2:], (f"{files[0]}, the last but one", f"{files[0]}, the last")
    elif len(files) == 2:
        (before, after), names = (read(file)[-1] for file in files), (files[0], files[1])
    else:
        raise RefusedError(f"--compare takes two files, or one of --record; {len(files)} were named")
    check_comparable(before, after, names)
    found = changes(before["rows"], after["rows"], tolerance)
    _print(found, before, after, names, tolerance)
    return 1 if any(change.verdict == SLOWER for change in found) else 0


def read(file: str) -> list[dict[str, Any]]:
    """Return the runs of a file, the oldest first."""
    path = Path(file)
    try:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        runs = [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise RefusedError(f"--compare: {file}: {error.strerror}") from None
    except ValueError as error:  # of JSON and of its encoding
        raise RefusedError(f"--compare: {file} is not JSON: {error}") from None
    if not runs:
        raise RefusedError(f"--compare: {file} is empty")
    for run in runs:
        _check_format(file, run)
    return runs


def _check_format(file: str, run: Any) -> None:
    version = run.get("weft_bench") if isinstance(run, dict) else None
    if version != VERSION:
        raise RefusedError(
            f"--compare: {file}: weft_bench is {version!r}, and this weft compares results of version {VERSION}: "
            "measure again with --json or --record"
        )
    lacking = [name for name, kind in _FIELDS.items() if not isinstance(run.get(name), kind)]
    if "rows" not in lacking and not all(isinstance(row, dict) for row in run["rows"]):
        lacking.append("rows")
    if lacking:
        raise RefusedError(f"--compare: {file} lacks {', '.join(lacking)}")


def check_comparable(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Raise RefusedError unless both runs are of one bench on one device."""
    for field, way_out in (("bench", "compare runs of one bench"), ("device", "measure both on one machine")):
        if before[field] != after[field]:
            raise RefusedError(
                f"--compare: {names[0]} is of {field} {before[field]!r}, {names[1]} of {after[field]!r}; {way_out}"
            )


def changes(before: list[dict], after: list[dict], tolerance: float = TOLERANCE) -> list[Change]:
    """Return the change of each of our times in either run, matched by the identity of its row."""
    old = dict(zip(identities(before), map(times, before), strict=True))
    new = dict(zip(identities(after), map(times, after), strict=True))
    matched = {row: (old.get(row, {}), new.get(row, {})) for row in {**old, **new}}
    noise = max(1 + tolerance, drift(matched.values()))
    found: list[Change] = []
    for row, (was, now) in matched.items():
        others = _geometric_mean(_ratios(was, now))
        names = [name for name in OURS if name in was or name in now]
        found += [_change(row, name, was.get(name), now.get(name), others, noise) for name in names]
    return found


def drift(matched: Iterable[tuple[Mapping[str, Quantiles], Mapping[str, Quantiles]]]) -> float:
    """Return the factor by which two runs of the same code differ, at least 1.

    It is the 80th percentile, over all rows, of the changes up or down of contenders that do not run weft.
    """
    away = sorted(max(ratio, 1 / ratio) for was, now in matched for ratio in _ratios(was, now))
    return away[round(0.8 * (len(away) - 1))] if away else 1.0


def _ratios(was: Mapping[str, Quantiles], now: Mapping[str, Quantiles]) -> list[float]:
    """Return the ratios of the contenders that run nothing of weft."""
    names = [name for name in was if name in now and name not in OURS and "weft" not in name]
    return [now[name].p50_us / was[name].p50_us for name in names]


def _change(row, name, before: Quantiles | None, after: Quantiles | None, others, noise: float) -> Change:
    if before is None or after is None:
        verdict = "only in the second" if before is None else "only in the first"
    elif after.p50_us > before.p50_us * noise and after.p20_us > before.p80_us:
        verdict = SLOWER
    elif after.p50_us * noise < before.p50_us and after.p80_us < before.p20_us:
        verdict = FASTER
    else:
        verdict = NOISE
    return Change(row, name, before, after, others, verdict)


def _geometric_mean(ratios: list[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _print(found: list[Change], before, after, names: tuple[str, str], tolerance: float) -> None:
    table = Table(title=f"weft bench {before['bench']}: {before['device']}", title_justify="left")
    for number, heading in enumerate(
        ["row", "ours", "first us", "p20-p80", "second us", "p20-p80", "second / first", "others", "verdict"]
    ):
        table.add_column(heading, justify="left" if number in (0, 8) else "right")
    for change in found:
        table.add_row(*map(escape, (change.row, change.contender, *_cells(change))))
    to = console()
    to.print(table)
    for place, run, name in (("first", before, names[0]), ("second", after, names[1])):
        with_ = ", ".join(f"{key} {run['environment'].get(key)}" for key in ("weft", "commit", "torch"))
        to.print(f"{place}: {name}: {with_}; {run['command']}", highlight=False, markup=False, soft_wrap=True)
    few = min(before["rounds"], after["rounds"])
    lines = [
        f"slower or faster: the medians differ by more than {tolerance:.0%} and by more than contenders without weft "
        "do (others: their mean in the row), and the 20th to 80th percentiles of the two runs do not meet",
        *([f"{few} rounds say little about noise; {FEW_ROUNDS} or more would"] if few < FEW_ROUNDS else []),
        ", ".join(
            f"{sum(change.verdict.startswith(verdict) for change in found)} {verdict}"
            for verdict in (SLOWER, FASTER, NOISE, "only in")
        )
        + " one of the two",
    ]
    for line in lines:
        to.print(line, highlight=False, markup=False, soft_wrap=True)


def _cells(change: Change) -> list[str]:
    cells = []
    for each in (change.before, change.after):
        cells += [f"{each.p50_us:.1f}", each.spread(1)] if each else ["-", "-"]
    for ratio in (change.ratio, change.others):
        cells.append(f"{ratio:.2f}x" if ratio is not None else "-")
    return [*cells, change.verdict]
