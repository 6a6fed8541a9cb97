"""`weft bench`: measure one suite and print, draw and save its results; or compare runs; or measure the machine."""

import argparse
import importlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.bench import suites
from weft.bench.measure import ROUNDS
from weft.bench.suites import SUITES, RefusedError, positive

USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {suite.text}" for name, suite in SUITES.items())
    parser.add_argument("bench", nargs="?", metavar="BENCH", help=listed)
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="find regressions beyond noise: two files of --json or --record, or one of --record for its last two runs",
    )
    parser.add_argument(
        "--tolerance",
        type=_share,
        metavar="SHARE",
        help="with --compare: a difference of medians that is no change (default 0.05)",
    )
    parser.add_argument(
        "--save", metavar="FILE", help="measure this machine's processor as hardware for `weft plan --hardware FILE`"
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="with --save: how many are to share this machine (default: one a core)",
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="the bench's own options; BENCH --help lists them")


def run(options: argparse.Namespace, command: str) -> int:
    """Run the request; return 2 with a message if it is refused, 1 if a result is wrong or slower, else 0."""
    try:
        _check(options)
        if options.compare:
            from weft.bench import compare

            return compare.run(options.compare, compare.TOLERANCE if options.tolerance is None else options.tolerance)
        if options.save:
            from weft.bench import machine

            return machine.save(_writable(options.save), options.ranks, command)
        return _measure(options.bench.replace("-", "_"), options.rest, command)
    except RefusedError as error:
        print(f"weft bench: {error}", file=sys.stderr)
        return USAGE_ERROR
    except AssertionError as error:  # a result is wrong, so nothing is timed
        print(f"weft bench: {error}", file=sys.stderr)
        return 1


def _check(options: argparse.Namespace) -> None:
    requests = [name for name in ("bench", "compare", "save") if getattr(options, name)]
    if len(requests) != 1:
        raise RefusedError("say one of: a bench (weft bench --help lists them), --compare A B, --save FILE")
    for option, of in (("tolerance", "compare"), ("ranks", "save")):
        if getattr(options, option) is not None and requests != [of]:
            raise RefusedError(f"--{option} needs --{of}")
    if options.bench and options.bench.replace("-", "_") not in SUITES:
        raise RefusedError(f"there is no bench {options.bench!r}; there are {', '.join(SUITES)}")


def _measure(name: str, arguments: list[str], command: str) -> int:
    suite, module = SUITES[name], importlib.import_module(f"weft.bench.{name}")
    options = _parser(name, module).parse_args(arguments)
    from weft.bench import html_report, plot, report
    from weft.bench.table import table

    if options.plot or options.html:
        plot.check()
    record = report.history(options.record or None, name, suite) if options.record is not None else None
    written = [str(path) for path in (options.json, options.csv, options.plot, options.html, record) if path]
    for path in written:
        _writable(path)  # fail before an hour of measuring, not after it
    rows = _rows(name, module, options, report.console())
    found = report.results(name, suite, module, rows, command, options.rounds)
    columns, cells = table(rows)
    if options.json:
        report.save_json(found, options.json)
    if options.csv:
        report.save_csv(found, options.csv)
    if record:
        report.append(found, record)
    pictures = _pictures(module, rows, found) if options.plot or options.html else []
    if options.plot:
        Path(options.plot).write_bytes(pictures[0])
    if options.html:
        Path(options.html).write_text(html_report.page(found, columns, cells, pictures))
    report.print_table(found, columns, cells)  # last: if the reader closes the pipe (head), the files are complete
    for path in written:
        print(f"saved to {path}")
    return 0


def _rows(name: str, module, options: argparse.Namespace, console) -> list:
    from weft.bench.progress import Bar

    rows = []
    with Bar(name, console) as bar:
        for row in module.run(options):
            rows.append(row)
            bar.rows = len(rows)
    return rows


def _pictures(module, rows: list, found: Mapping[str, Any]) -> list[bytes]:
    """Return PNGs: the bench's own picture if it has one, and the common one."""
    from weft.bench import plot

    pictures = []
    if hasattr(module, "plot"):
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            module.plot(rows, file.name)
            pictures.append(Path(file.name).read_bytes())
    return [*pictures, plot.png(found)]


def _parser(name: str, module) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"weft bench {name}", description=SUITES[name].text)
    parser.add_argument("--world", type=positive, default=2, help="ranks (default 2; of several_gpus, every GPU)")
    parser.add_argument(
        "--rounds", type=positive, default=ROUNDS, help=f"measurements of each contender (default {ROUNDS})"
    )
    parser.add_argument("--json", metavar="FILE", help="save everything there")
    parser.add_argument("--csv", metavar="FILE", help="save the rows there, a column for each figure")
    parser.add_argument("--plot", metavar="FILE", help="draw them there (PNG)")
    parser.add_argument("--html", metavar="FILE", help="write one page with tables and plots there")
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="append the run to FOLDER/<device>/<bench>.jsonl (default: bench/results of this checkout)",
    )
    suites.add_arguments(module, parser)
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to less than 1")
    return value


def _writable(path: str) -> str:
    """Return the path after checking that the file can be written; make its folder."""
    existed = Path(path).exists()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a"):
            pass
        if not existed:
            Path(path).unlink()
    except OSError as error:
        raise RefusedError(f"cannot write {path}: {error.strerror}") from None
    return path
