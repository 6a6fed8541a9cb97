"""The command line: `weft bench`."""

import argparse
import importlib
import sys

_BENCHES = {"linear": "a tensor-parallel MLP step beside DTensor over gloo"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="weft", description="Kernels and collectives for one model on many devices.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure this machine")
    benches = bench.add_subparsers(dest="bench", required=True)
    for name, purpose in _BENCHES.items():
        one = benches.add_parser(name, help=purpose, description=purpose)
        one.add_argument("--world", type=int, default=2, help="ranks (default 2)")
        one.add_argument("--rounds", type=int, default=21, help="measurements of each contender (default 21)")
        one.add_argument("--json", metavar="FILE", help="also save the results there")
    options = parser.parse_args(arguments)
    return _bench(options)


def _bench(options: argparse.Namespace) -> int:
    from weft.bench.report import report

    suite = importlib.import_module(f"weft.bench.{options.bench}")
    rows = suite.run(world=options.world, rounds=options.rounds)
    command = f"weft bench {options.bench} --world {options.world} --rounds {options.rounds}"
    report(rows, command, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
