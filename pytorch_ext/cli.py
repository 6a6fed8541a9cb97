"""The command line: `weft doctor`, `weft bench`, `weft tune`, `weft plan`."""

import argparse
import importlib
import shlex
import sys

_BENCHES = {
    "linear": "a tensor-parallel MLP step beside DTensor over gloo",
    "attention": "a sequence shared by CPU ranks beside one process with it whole",
    "data_parallel": "steps of weft.DataParallel and sets of gradients beside DDP over gloo and over weft, with memory",
    "collectives": "the collectives beside gloo, with nccl-tests' flags and columns",
    "matmul": "the linear layers' products at published models' shards beside torch.matmul, on a GPU",
    "attention_chunk": "an attention chunk, forward and backward, beside cuDNN, flash and FlexAttention, on a GPU",
    "bucket": "gradients into one buffer and back, and sums of buffers, beside _foreach_copy_, on a GPU",
    "cross_entropy": "the loss over a shard of the vocabulary beside eager and torch.compile, on a GPU",
    "communicating": "the kernels that cross ranks, as far as one GPU can tell: tax, overlap, host time",
    "launch": "the start of a kernel compiled ahead of time beside Triton's own launcher and compiler, on a GPU",
    "kernels": "the GPU kernels' benches as one table; --communicating: those of the kernels that cross ranks",
    "several_gpus": "collectives beside NCCL's and overlapped products, one rank a GPU",
}

_TUNED = ["matmul"]


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="weft", description="Kernels and collectives for one model on many devices.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="whether the package can do its job here; a block for a bug report")
    bench = commands.add_parser("bench", help="measure this machine")
    bench.add_argument(
        "bench",
        type=_underscored,
        choices=_BENCHES,
        help="; ".join(f"{name}: {text}" for name, text in _BENCHES.items()),
    )
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="its options; --help lists them")
    tune = commands.add_parser("tune", help="measure the tile configurations on this GPU and write the winners' table")
    tune.add_argument("op", choices=_TUNED)
    tune.add_argument("rest", nargs=argparse.REMAINDER, help="its options; --help lists them")
    plan = commands.add_parser("plan", help="which mesh to train a model on, by arithmetic; needs no GPU")
    planner = importlib.import_module("weft.planner.command")
    planner.add_arguments(plan)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return _doctor()
    if options.command == "plan":
        return planner.run(options)
    if options.command == "tune":
        return _tune(options.op, options.rest)
    return _bench(options.bench, options.rest, shlex.join(["weft", *arguments]))


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _doctor() -> int:
    from weft.doctor import doctor

    found = doctor()
    print(found)
    return 0 if found.healthy else 1


def _tune(op: str, arguments: list[str]) -> int:
    suite = importlib.import_module("weft.bench.tune")
    parser = argparse.ArgumentParser(prog=f"weft tune {op}", description=suite.__doc__)
    suite.add_arguments(parser)
    return suite.run(op, parser.parse_args(arguments))


def _bench(name: str, arguments: list[str], command: str) -> int:
    suite = importlib.import_module(f"weft.bench.{name}")
    parser = argparse.ArgumentParser(prog=f"weft bench {name}", description=_BENCHES[name])
    parser.add_argument("--world", type=int, default=2, help="ranks (default 2; of several_gpus, every GPU)")
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
