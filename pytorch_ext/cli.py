"""The command line; also as `python -m weft`."""

import argparse
import importlib
import os
import shlex
import sys

_TUNED = {
    **dict.fromkeys(("matmul", "attention", "grouped"), "weft.bench.tune"),
    "collectives": "weft.bench.tune_collectives",
}


USAGE_ERROR = 2
INTERRUPTED = 130  # a shell's exit status for a command that Ctrl-C ended


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        print(end="", flush=True)  # a closed pipe raises here, where it is caught
        return status
    except BrokenPipeError:  # the reader (head, for example) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # keeps the flush at exit from raising again
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("weft"):
            raise
        print(f"weft: no module named {error.name!r}, which this command needs: install it", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("weft: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    options = make_parser().parse_args(arguments)
    if options.command == "doctor":
        return _doctor()
    if options.command == "plan":
        return importlib.import_module("weft.tools.planner.plan_command").run(options)
    if options.command == "explain":
        return importlib.import_module("weft.tools.explanation.explain_command").run(options)
    if options.command == "stuck":
        from weft.comm import rank_report

        print(rank_report.table(rank_report.reports()))
        return 0
    if options.command == "compare":
        return importlib.import_module("weft.tools.compare.compare_command").run(options)
    if options.command == "trace":
        return importlib.import_module("weft.tools.tracing.trace_command").run(options)
    if options.command == "run":
        environment = {**os.environ, "WEFT_AS_GLOO": "1"}
        os.execve(sys.executable, [sys.executable, options.script, *options.rest], environment)
    if options.command == "tune":
        return _tune(options.op, options.rest)
    return importlib.import_module("weft.bench.command").run(options, shlex.join(["weft", *arguments]))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft", description="Kernels and collectives for one model on many devices.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="check whether the package can do its job here, and print a block for a bug report"
    )
    bench = commands.add_parser("bench", help="measure this machine")
    importlib.import_module("weft.bench.command").add_arguments(bench)
    tune = commands.add_parser(
        "tune", help="measure what is the fastest on these GPUs, and write the table that is used"
    )
    tune.add_argument("op", choices=_TUNED)
    tune.add_argument("rest", nargs=argparse.REMAINDER, help="its options; --help lists them")
    plan = commands.add_parser("plan", help="compute which mesh to train a model on; needs no GPU")
    importlib.import_module("weft.tools.planner.plan_command").add_arguments(plan)
    run = commands.add_parser("run", help="run a Python script, with weft's groups where it asks for gloo's")
    run.add_argument("--as-gloo", action="store_true", required=True, help="set WEFT_AS_GLOO=1 for it and its children")
    run.add_argument("script", help="a Python file")
    run.add_argument("rest", nargs=argparse.REMAINDER, help="the script's arguments")
    commands.add_parser("stuck", help="print what the ranks on this machine are doing, the one they wait for first")
    trace = commands.add_parser("trace", help="record what every rank does and when, and say where the time goes")
    trace.add_argument("file", help="of all ranks, for ui.perfetto.dev; without --run it is there")
    trace.add_argument("--run", help='the program: "torchrun --nproc-per-node 4 train.py"')
    trace.add_argument("--steps", default="0-9", help="the steps of the optimizer to keep, as 0,1 or 0-9 (default 0-9)")
    trace.add_argument("--html", metavar="FILE", help="write the report as a page too")
    trace.add_argument("--hardware", help="what the planner expects collectives of: a preset or a file of weft bench")

    compare = commands.add_parser(
        "compare", help="record a program as one process and on ranks, and say where the runs part first"
    )
    compare.add_argument("--reference", required=True, help='the plain program, one process: "python train.py"')
    compare.add_argument("--run", required=True, help='the other: "torchrun --nproc-per-node 2 train.py --tp 2"')
    compare.add_argument("--steps", help="the steps of the optimizer to compare, as 0,1 or 0-9 (default 0,1)")
    compare.add_argument("--rename", action="append", default=[], metavar="RUN=REFERENCE", help="parts of module names")
    compare.add_argument("--keep", metavar="FOLDER", help="keep the recordings there")
    compare.add_argument("--all", action="store_true", help="print every difference")
    explain = commands.add_parser(
        "explain", help='print what plan="auto" splits of a Hugging Face model; needs no weights'
    )
    explain.add_argument("config", help="a config.json, or the folder that has it")
    explain.add_argument("--tp", type=int, default=2, help="ranks that split the layers (default 2)")
    explain.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _doctor() -> int:
    from weft.tools.diagnosis import doctor

    found = doctor()
    print(found)
    return 0 if found.healthy else 1


def _tune(op: str, arguments: list[str]) -> int:
    suite = importlib.import_module(_TUNED[op])
    parser = argparse.ArgumentParser(prog=f"weft tune {op}", description=suite.__doc__)
    suite.add_arguments(parser)
    return suite.run(op, parser.parse_args(arguments))
