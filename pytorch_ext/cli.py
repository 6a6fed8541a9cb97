"""The command line: `weft bench`."""

import argparse
import importlib
import shlex
import sys

_BENCHES = {
    "linear": "a tensor-parallel MLP step beside DTensor over gloo",
    "collectives": "the collectives beside gloo, with nccl-tests' flags and columns",
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="weft", description="Kernels and collectives for one model on many devices.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure this machine")
    bench.add_argument("bench", choices=_BENCHES, help="; ".join(f"{name}: {text}" for name, text in _BENCHES.items()))
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="its options; --help lists them")
    options = parser.parse_args(arguments)
    return _bench(options.bench, options.rest, shlex.join(["weft", *arguments]))


def _bench(name: str, arguments: list[str], command: str) -> int:
    suite = importlib.import_module(f"weft.bench.{name}")
    parser = argparse.ArgumentParser(prog=f"weft bench {name}", description=_BENCHES[name])
    parser.add_argument("--world", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=int, default=21, help="measurements of each contender (default 21)")
    parser.add_argument("--json", metavar="FILE", help="also save the results there")
    parser.add_argument("--plot", metavar="FILE", help="also draw them there, where the bench can")
    suite.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.plot and not hasattr(suite, "plot"):
        parser.error(f"weft bench {name} draws nothing")

    from weft.bench.report import report

    rows = suite.run(options)
    report(suite, rows, command, options.json)
    if options.plot:
        suite.plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
