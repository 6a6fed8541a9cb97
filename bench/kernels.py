"""weft bench kernels: the benches of the GPU kernels as one table; --communicating: the kernels that cross ranks."""

import argparse
import importlib
from typing import Any

from weft.bench.device_time import LIMIT
from weft.bench.suites import options_of
from weft.bench.table import Row

__all__ = ["LIMIT", "SUITES", "add_arguments", "run"]

# Options of each suite. The matmul takes the ends of the splits and of the tokens, which bound those between.
SUITES: dict[str, dict[str, Any]] = {
    "matmul": {"tp": [1, 8], "tokens": [1024, 16384]},
    "attention_chunk": {},
    "bucket": {},
    "cross_entropy": {},
}
COMMUNICATING: dict[str, dict[str, Any]] = {"communicating": {}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--communicating", action="store_true", help="the kernels that cross ranks, on one GPU")


def run(options) -> list[Row]:
    found: list[Row] = []
    for name, given in (COMMUNICATING if options.communicating else SUITES).items():
        suite = importlib.import_module(f"weft.bench.{name}")
        found += suite.run(options_of(suite, rounds=options.rounds, **given))
    return found
