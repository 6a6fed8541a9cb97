"""The picture that every bench has: each row's times, and the others' times over ours. Needs matplotlib."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from weft.bench.figures import identities, ours, ratios, times
from weft.bench.suites import RefusedError

_ROW_INCHES = 0.16  # for each contender
_MOST_PIXELS = 32000  # below matplotlib's 2^16, and within the size that browsers draw


def check() -> None:
    """Raise RefusedError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RefusedError("--plot and --html need matplotlib: pip install 'weft[plot]'") from None


def png(found: Mapping[str, Any]) -> bytes:
    """Return a PNG of the rows that have times.

    Left: the median and the 20th to 80th percentile of every contender in microseconds. Right: the others' medians
    over ours.
    """
    from matplotlib.figure import Figure

    named = zip(identities(found["rows"]), map(times, found["rows"]), strict=True)
    rows = [(name, row) for name, row in named if row]
    contenders = list(dict.fromkeys(name for _, row in rows for name in row))
    height = 1.8 + _ROW_INCHES * (len(contenders) + 1) * max(2, len(rows))
    figure = Figure(figsize=(13, height), layout="constrained")
    figure.suptitle(f"weft bench {found['bench']}: {found['device']}")
    if not rows:
        figure.text(0.5, 0.5, "no row was measured here; the table says why", ha="center")
    else:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        _times(left, rows, contenders)
        _ratios(right, rows, contenders)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=min(110, _MOST_PIXELS / height))
    return file.getvalue()


def _times(axes, rows: Sequence, contenders: Sequence[str]) -> None:
    for number, contender in enumerate(contenders):
        points = [(row[contender], at) for at, (_, row) in enumerate(rows) if contender in row]
        middle = [each.p50_us for each, _ in points]
        spread = [[each.p50_us - each.p20_us for each, _ in points], [each.p80_us - each.p50_us for each, _ in points]]
        places = [at + _place(number, len(contenders)) for _, at in points]
        axes.errorbar(middle, places, xerr=spread, fmt="o", markersize=4, color=f"C{number % 10}", label=contender)
    axes.set(xscale="log", xlabel="us: median, 20th to 80th percentile", yticks=range(len(rows)))
    axes.set_yticklabels([name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside lower center", ncols=8, fontsize="small")


def _ratios(axes, rows: Sequence, contenders: Sequence[str]) -> None:
    for at, (_, row) in enumerate(rows):
        for name, ratio in ratios(row).items():
            number = contenders.index(name)
            place = at + _place(number, len(contenders))
            axes.barh(place, ratio - 1, 0.8 / len(contenders), left=1, color=f"C{number % 10}")
            axes.annotate(f"{ratio:.3g}x", (ratio, place), fontsize="x-small", va="center")
    axes.axvline(1, color="black", linewidth=0.8)
    compared = {ours(row) for _, row in rows} - {None}
    axes.set(xscale="log", xlabel=f"median over that of {', '.join(sorted(map(str, compared))) or 'ours'}")
    axes.grid(alpha=0.3, axis="x")


def _place(number: int, count: int) -> float:
    """Return the offset of a contender within its row, so that contenders stand side by side."""
    return ((number + 0.5) / count - 0.5) * 0.8
