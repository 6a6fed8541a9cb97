"""`weft plan`: a ranked table of layouts, the reasons against the others, and the commands that start the best."""

import argparse
import json
import sys
from textwrap import fill

from weft.tools.planner.hardware import check_count, presets
from weft.tools.planner.job import OPTIMIZERS, OVERLAP, PRECISIONS, RECOMPUTE, Job
from weft.tools.planner.layout_search import Candidates, Plan, searched
from weft.tools.planner.model import Model
from weft.tools.planner.model import presets as models
from weft.tools.planner.validate import Comparison, mean_error, validate

USAGE_ERROR = 2
# Defaults for a plan; --validate has its own.
DEFAULTS = {"precision": "bf16", "optimizer": "adamw", "overlap": "some", "top": 10, "imbalance": 1.1}
_LONGEST = 8192  # tokens of a sequence by default: longer ones are a stage of their own at the end of a training
_STEP_TOKENS = 4 << 20  # of a step by default, as at the start of Llama 3's training (Llama Team 2024, 3.4.1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"a Hugging Face config.json, or one of {', '.join(models())}")
    parser.add_argument("--gpus", type=int, help="devices in all")
    parser.add_argument("--hardware", help=f"a file of weft bench --save, or one of {', '.join(presets())} (h100)")
    parser.add_argument(
        "--sequence-length", type=int, help=f"tokens of a sequence (default the model's own, up to {_LONGEST})"
    )
    parser.add_argument(
        "--global-batch", type=int, help=f"sequences of an optimizer step (default {_STEP_TOKENS >> 20}Mi tokens)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="of weights and activations (default bf16)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="its states take memory (default adamw)")
    parser.add_argument("--recompute", choices=RECOMPUTE, help="only this; otherwise each is tried")
    parser.add_argument("--overlap", choices=OVERLAP, help="communication that runs during arithmetic (default some)")
    parser.add_argument("--imbalance", type=float, help="tokens of the most loaded rank of experts over the mean (1.1)")
    parser.add_argument("--gpus-per-node", type=int, help="where it is not the hardware's")
    parser.add_argument("--top", type=int, help="layouts to print (default 10)")
    parser.add_argument("--plot", metavar="FILE", help="draw memory and the trade-off against time there (PNG)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--validate", metavar="FILE", help="compare the planner with the published runs of a CSV file")


def run(options: argparse.Namespace) -> int:
    """Print the plans or the validation and return 0; if that fails, print a message and return 2."""
    try:
        _check(options)
        vars(options).update({name: value for name, value in DEFAULTS.items() if getattr(options, name) is None})
        return _validate(options) if options.validate else _plan(options)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError, OverflowError) as error:
        print(f"weft plan: {error}", file=sys.stderr)
        return USAGE_ERROR


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for --top below 1, and for options that --validate would ignore."""
    if options.top is not None and options.top < 1:
        raise ValueError(f"--top {options.top} must be at least 1")
    if options.validate:
        asked = ("model", "gpus", "hardware", "sequence_length", "global_batch", "recompute", "gpus_per_node", "plot")
        given = [name.replace("_", "-") for name in (*asked, *DEFAULTS) if getattr(options, name) is not None]
        if given:
            options_given = ", ".join(name if name == "model" else f"--{name}" for name in given)
            raise ValueError(f"--validate takes a run's options from its row of the file: leave out {options_given}")


def _take_defaults(options: argparse.Namespace, model: Model) -> list[str]:
    """Set the options that nobody gave, and return what was taken for each."""
    taken = []
    if options.hardware is None:
        options.hardware = "h100"
        taken.append("--hardware h100")
    if options.sequence_length is None:
        if not model.context_length:
            raise ValueError(f"{model.name} does not say how long its sequences are: give --sequence-length")
        options.sequence_length = min(model.context_length, _LONGEST)
        longer = f" is {model.context_length}" if model.context_length > _LONGEST else ""
        taken.append(f"--sequence-length {options.sequence_length} (the model's own{longer})")
    if options.global_batch is None:
        check_count("gpus", options.gpus)
        check_count("sequence_length", options.sequence_length)
        of_each = max(1, _STEP_TOKENS // (options.sequence_length * options.gpus))
        options.global_batch = of_each * options.gpus
        taken.append(f"--global-batch {options.global_batch}")
    return taken


def _plan(options: argparse.Namespace) -> int:
    lacking = [name for name, value in (("a model", options.model), ("--gpus", options.gpus)) if value is None]
    if lacking:
        known = f"; models known by name are {', '.join(models())}" if options.model is None else ""
        raise ValueError(f"needs {' and '.join(lacking)}, as in `weft plan llama-3-8b --gpus 16`{known}")
    model = Model.of(options.model)
    taken = _take_defaults(options, model)
    batch = options.sequence_length, options.global_batch, options.precision, options.optimizer
    devices = options.hardware, options.gpus, options.recompute, options.gpus_per_node
    job, found = searched(model, *devices, *batch, overlap=options.overlap, imbalance=options.imbalance)
    plans = found.plans[: options.top]
    if options.json:
        found_plans = [plan.as_dict() for plan in plans]
        print(json.dumps({"plans": found_plans, "rejected": [*map(vars, found.rejected)], "defaults": taken}, indent=2))
    else:
        if taken:
            print(f"By default: {', '.join(taken)}.\n")
        _print_plans(job, options.gpus, found, plans)
    if options.plot:
        from weft.tools.planner.chart import plot

        plot(plans, options.plot)
    return 0


def _print_plans(job: Job, gpus: int, found: Candidates, plans: list[Plan]) -> None:
    model = job.model
    console = _console()
    experts = ""
    if model.experts:
        of_experts = model.layers * model.experts * model.expert_parameters
        experts = (
            f"; {of_experts / 1e9:.2f}B in {model.experts} experts a layer, {model.active_parameters / 1e9:.2f}B active"
            f"\nper token, imbalance {job.imbalance:g}"
        )
    print(
        f"{model.name}: {model.parameters / 1e9:.2f}B parameters{experts}, {gpus} x {job.hardware.name},\nsequence "
        f"{job.sequence_length}, global batch {job.global_batch}, {job.precision}, {job.optimizer}"
    )
    table = _table("", f"#|{' '.join(plans[0].mesh)}|micro|schedule|recompute|ZeRO|step s|MFU|GiB")
    parts = _table("where time and memory go", "#|TFLOP/s|bubble|waits|weights|gradients|optimizer|activations|rest")
    for number, plan in enumerate(plans, 1):
        layout, step, split = plan.layout, plan.step, plan.memory.split()
        named = [split[name] for name in ("weights", "gradients", "optimizer", "activations")]
        schedule = layout.schedule + (f" {layout.chunks}" if layout.chunks > 1 else "") if layout.pp > 1 else "-"
        table.add_row(
            str(number),
            " ".join(str(size) for size in plan.mesh.values()),
            f"{layout.micro_batch} ({layout.micro_batches(job)})",
            schedule,
            layout.recompute,
            str(layout.zero),
            f"{step.seconds:.4g}",
            f"{step.mfu:.1%}",
            f"{plan.memory.total / 2**30:.3g}",
        )
        parts.add_row(
            str(number),
            f"{step.flops_per_s / 1e12:.3g}",
            f"{step.bubble:.1%}",
            f"{step.exposed_s / step.seconds:.1%}",
            *(f"{size / 2**30:.3g}" for size in (*named, plan.memory.total - sum(named))),
        )
    console.print(table)
    console.print(parts)
    again = "its attention and MLP, and keeps its norms" if job.fused_attention else "its attention's scores"
    width = console.width
    note = (
        f"TFLOP/s per device: 6 N D + attention's causal half, N the parameters that tokens are multiplied with, D the "
        f"tokens; recomputation is not counted. MFU: of {job.peak_flops / 1e12:g}. Memory: of "
        f"{job.hardware.memory_bytes / 2**30:.1f} GiB; rest: logits, buffers, workspace, fragmentation. waits: "
        f"communication that nothing hides. micro: sequences of a micro-batch (how many a step). recompute: "
        f"of each layer, selective computes again {again}; full all of it. Weights to rest are GiB."
    )
    print(fill(note, width))
    print("\nNot chosen:")
    for rejection in found.rejected:
        print(fill(f"  {rejection.family:<20} {rejection.why}", width, subsequent_indent=" " * 23))
    command = plans[0].torchrun
    if len(command) > width - 2:
        command = command.replace(" --nproc-per-node", " \\\n    --nproc-per-node", 1)
    print(
        f"\nTo start the first, on each node:\n  {command}\n"
        "and in train.py, after `model = ...`, the same on every rank:\n"
    )
    print("".join(f"  {line}\n" if line else "\n" for line in plans[0].code.splitlines()), end="")


def _validate(options: argparse.Namespace) -> int:
    compared = validate(options.validate)
    if options.json:
        names = ("source", "parameters", "gpus", "unit", "published", "predicted", "error", "flops")
        rows = [{name: getattr(comparison, name) for name in names} for comparison in compared]
        print(json.dumps({"rows": rows, "mean_error": mean_error(compared)}, indent=2))
        return 0
    _print_comparisons(compared)
    return 0


def _print_comparisons(compared: list[Comparison]) -> None:
    table = _table(
        "the planner and published runs",
        "source|model|GPUs|pp x dp x cp x tp|micro-batch, chunks|recompute|published|planner|error|FLOPs counted",
    )
    for comparison in compared:
        layout = comparison.layout
        table.add_row(
            comparison.source,
            f"{comparison.parameters / 1e9:.1f}B",
            str(comparison.gpus),
            f"{layout.pp}x{layout.dp}x{layout.cp}x{layout.tp}",
            f"{layout.micro_batch}, {layout.chunks}",
            layout.recompute,
            f"{comparison.published:g} {comparison.unit}",
            f"{comparison.predicted:.4g}",
            f"{comparison.error:+.1%}",
            comparison.flops if comparison.unit != "s" else "",
        )
    _console().print(table)
    print(f"mean error {mean_error(compared):.1%} over {len(compared)} rows")


def _console():
    from rich.console import Console

    return Console() if Console().is_terminal else Console(width=200)


def _table(title: str, columns: str):
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE, title_justify="left", padding=0)
    for number, column in enumerate(columns.split("|")):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table
