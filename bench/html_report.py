"""A bench's results as one HTML page without network or script, with its pictures embedded."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from weft.bench.figures import identities, ours, times
from weft.bench.report import remarks

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: 0.25em 0.7em; text-align: right; }
th:first-child, td:first-child, #versions * { text-align: left; }
td { white-space: nowrap; }
th { border-bottom: 2px solid #666; }
.wide { overflow-x: auto; }
img { max-width: 100%; }
code { background: #f2f2f2; padding: 0.1em 0.3em; }
"""


def page(
    found: Mapping[str, Any], columns: Sequence[str], cells: Sequence[Sequence[str]], pictures: list[bytes]
) -> str:
    """Return the page's text.

    Args:
        found: Results of `report.results`.
        columns: Headings of the suite's table.
        cells: Cells of each row of the suite's table.
        pictures: PNG files.
    """
    facts = [(name, str(found[name])) for name in ("date", "device")]
    title = escape(f"weft bench {found['bench']}")
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{title}</h1>",
        f"<p><code>{escape(found['command'])}</code></p>",
        '<div class="wide">',
        _table("results", columns, cells),
        "</div>",
        *(f"<p>{escape(text)}.</p>" for text in remarks(found)),
        *(_picture(data, number) for number, data in enumerate(pictures, start=1)),
        "<h2>Every time</h2>",
        "<p>Microseconds. The last column is the median over ours: more than 1x is slower than ours.</p>",
        _table("times", ["row", "contender", "p20", "p50", "p80", "over ours"], _every_time(found["rows"])),
        "<h2>Where and with what</h2>",
        _table(
            "versions", ["what", "is"], [*facts, *((key, str(value)) for key, value in found["environment"].items())]
        ),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _every_time(rows: Sequence[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    for name, row in zip(identities(rows), map(times, rows), strict=True):
        base = ours(row)
        for contender, each in row.items():
            over = f"{each.p50_us / row[base].p50_us:.3g}x" if base else "-"
            yield name, contender, f"{each.p20_us:.1f}", f"{each.p50_us:.1f}", f"{each.p80_us:.1f}", over


def _table(identity: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table id="{identity}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'


def _picture(data: bytes, number: int) -> str:
    return f'<p><img alt="plot {number}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></p>'
