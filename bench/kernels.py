"""weft bench kernels: the benches of the GPU kernels one after another, as one table; with --communicating, those of
the kernels that cross ranks."""

import argparse
import importlib

from weft.bench import line
from weft.bench.device_time import LIMIT, ContestRow
from weft.bench.line import Line, columns

__all__ = ["LIMIT", "SUITES", "add_arguments", "cells", "columns", "run"]

# With the arguments that each gets: the ends of the splits and of the tokens tell what is between them.
SUITES = {
    "matmul": ["--tp", "1", "--tp", "8", "--tokens", "1024", "--tokens", "16384"],
    "attention_chunk": [],
    "bucket": [],
    "cross_entropy": [],
}
COMMUNICATING: dict[str, list[str]] = {"communicating": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--communicating", action="store_true", help="the kernels that cross ranks, on one GPU")


def run(options) -> list[ContestRow | Line]:
    found: list[ContestRow | Line] = []
    for name, arguments in (COMMUNICATING if options.communicating else SUITES).items():
        suite = importlib.import_module(f"weft.bench.{name}")
        parser = argparse.ArgumentParser()
        parser.set_defaults(rounds=options.rounds)
        suite.add_arguments(parser)
        found += suite.run(parser.parse_args(arguments))
    return found


def cells(row: ContestRow | Line) -> list[str]:
    return line.cells(line.line_of(row) if isinstance(row, ContestRow) else row)
