"""weft bench kernels: the benches of the GPU kernels as one table; --communicating: the kernels that cross ranks."""

import argparse
import importlib

from weft.bench.device_time import LIMIT
from weft.bench.table import Row

__all__ = ["LIMIT", "SUITES", "add_arguments", "run"]

# Arguments of each suite. The matmul takes the ends of the splits and of the tokens, which bound those between.
SUITES = {
    "matmul": ["--tp", "1", "--tp", "8", "--tokens", "1024", "--tokens", "16384"],
    "attention_chunk": [],
    "bucket": [],
    "cross_entropy": [],
}
COMMUNICATING: dict[str, list[str]] = {"communicating": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--communicating", action="store_true", help="the kernels that cross ranks, on one GPU")


def run(options) -> list[Row]:
    found: list[Row] = []
    for name, arguments in (COMMUNICATING if options.communicating else SUITES).items():
        suite = importlib.import_module(f"weft.bench.{name}")
        parser = argparse.ArgumentParser()
        parser.set_defaults(rounds=options.rounds)
        suite.add_arguments(parser)
        found += suite.run(parser.parse_args(arguments))
    return found
