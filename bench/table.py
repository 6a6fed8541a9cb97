"""A row of any bench, and the table of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.bench.figures import OURS
from weft.bench.measure import Quantiles


@dataclass(frozen=True)
class Row:
    """Measured figures of one subject.

    Attributes:
        of: Identity of the row, by the fields of figures.IDENTITY.
        times: Microseconds by contender; figures.OURS names our contenders.
        peer: Contender that `ratio` compares with.
        facts: Other figures by name. A name ends in its unit; a share, bubble or part "of" something is a fraction.
        remark: Other observations, or the reason that a figure was not measured.
    """

    of: Mapping[str, str | int]
    times: Mapping[str, Quantiles] = field(default_factory=dict)
    peer: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    @property
    def ours(self) -> Quantiles | None:
        """Our time, the best if there are several."""
        return next((self.times[name] for name in OURS if name in self.times), None)

    @property
    def ratio(self) -> float | None:
        """Median of the peer over ours."""
        peer = self.times.get(self.peer or "")
        return peer.p50_us / self.ours.p50_us if peer and self.ours else None

    def as_dict(self) -> dict[str, Any]:
        times = {name: asdict(each) for name, each in self.times.items()}
        compared = {"peer": self.peer, "ratio": self.ratio}
        return {**self.of, "times": times, **compared, **self.facts, "remark": self.remark}


def not_measured(op: str, shape: str, reason: str) -> Row:
    return Row({"op": op, "shape": shape}, remark=f"not measured: {reason}")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and the cells of each row; every figure of any row has a column."""
    of = _names(row.of for row in rows)
    contenders = _names(row.times for row in rows)
    facts = _names(row.facts for row in rows)
    peers = {row.peer for row in rows if row.ratio is not None}
    headings = [*of, *(text for name in contenders for text in (f"{name} us", "p20-p80"))]
    headings += ["ratio"] * bool(peers) + [_heading(name) for name in facts]
    headings += ["remark"] * any(row.remark for row in rows)
    return headings, [_cells(row, of, contenders, facts, peers)[: len(headings)] for row in rows]


def _names(fields) -> list[str]:
    return list(dict.fromkeys(name for each in fields for name in each))


def _cells(row: Row, of, contenders, facts, peers) -> list[str]:
    cells = [str(row.of.get(name, "-")) for name in of]
    for name in contenders:
        cells += _time(row.times.get(name))
    if peers:
        beside = f" {row.peer}" if len(peers) > 1 else ""
        cells.append("-" if row.ratio is None else f"{row.ratio:.2f}x{beside}")
    return [*cells, *(_fact(name, row.facts.get(name)) for name in facts), row.remark]


def _time(time: Quantiles | None) -> list[str]:
    if time is None:
        return ["-", "-"]
    digits = 1 if time.p50_us < 1000 else 0
    return [f"{time.p50_us:.{digits}f}", time.spread(digits)]


def _heading(name: str) -> str:
    return name.replace("_bytes", "_MiB").replace("_", " ")


def _fact(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_fact(name, each)}" for key, each in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_fact(name, each) for each in value) or "-"
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return f"{value / 2**20:.1f}"
    if {"share", "of", "bubble", "formula"} & set(name.split("_")):
        return f"{value:.0%}"
    return f"{value:.4g}"
