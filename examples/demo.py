"""`make demo`: train one model alone, split in two ways, and over gloo; only time and memory change.

The last five runs have invariant=4: their losses and weights are the same to the bit.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ALONE, ALONE_IN_UNITS = "one process", "one process, invariant"
SCRIPT = Path(__file__).parent / "train_lm.py"
UNITS = ["--invariant", "4", "--units", "2"]
RUNS = {
    ALONE: [],
    "tensor parallel, 2 ranks": ["--tp", "2"],
    "data parallel, 2 ranks": ["--dp", "2"],
    "tensor parallel over gloo": ["--tp", "2", "--backend", "gloo"],
    ALONE_IN_UNITS: UNITS,
    "tensor parallel, invariant": ["--tp", "2", *UNITS],
    "data parallel, invariant": ["--dp", "2", *UNITS],
    "context parallel, invariant": ["--cp", "2", *UNITS],
    "pipeline, invariant": ["--pp", "2", *UNITS],
}
# The first runs only differ in the order of some fp32 sums. A lost gradient or a bias added twice exceeds this at once.
LARGEST_DIFFERENCE = 0.01


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the curves and the plot")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 110)

    figures = {}
    for name, arguments in RUNS.items():
        console.rule(name)
        figures[name] = train(arguments, options.steps, options.out / f"{name.replace(' ', '_').replace(',', '')}.json")

    differences = {name: difference(figures[reference_of(name)], run) for name, run in figures.items()}
    console.print(table(figures, differences))
    plot(figures, options.out / "loss.png")
    console.print(f"loss curves: {options.out / 'loss.png'}")
    worst = max(differences.values())
    if worst > LARGEST_DIFFERENCE:
        raise SystemExit(f"the curves differ by {worst:.4f}, more than rounding can explain ({LARGEST_DIFFERENCE})")
    in_units = [name for name in RUNS if reference_of(name) == ALONE_IN_UNITS]
    if any(differences[name] for name in in_units) or len({figures[name]["weights"] for name in in_units}) > 1:
        raise SystemExit("the runs with invariant have different bits")


def reference_of(name: str) -> str:
    return ALONE_IN_UNITS if "--invariant" in RUNS[name] else ALONE


def train(arguments: list[str], steps: int, out: Path) -> dict:
    """Run train_lm.py and return its figures; with several ranks it runs under torchrun, one core a rank.

    With invariant every process has one core: the bits of layers that stay whole follow the number of threads.
    """
    launch, cores = [], 1 if "--invariant" in arguments else os.cpu_count() or 1
    if {"--tp", "--dp", "--cp", "--pp"} & set(arguments):
        launch, cores = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 1
    command = [sys.executable, *launch, str(SCRIPT), *arguments, "--steps", str(steps), "--out", str(out)]
    paths = os.pathsep.join(filter(None, [str(SCRIPT.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores), "PYTHONPATH": paths}
    out.unlink(missing_ok=True)
    # Over gloo (torch 2.13) a process may abort while Python ends, after it has written its figures.
    subprocess.run(command, check="gloo" not in arguments, env=environment)
    return json.loads(out.read_text())


def difference(first: dict, other: dict) -> float:
    gaps = [abs(a - b) for a, b in zip(first["losses"], other["losses"], strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def table(figures: dict[str, dict], differences: dict[str, float]) -> Table:
    shown = Table(title="the same model, seed and data")
    shown.add_column("run")
    for heading in (
        "last loss",
        "largest difference",
        "weights (hash)",
        "tokens/s",
        "peak MB a rank",
        "parameters a rank",
    ):
        shown.add_column(heading, justify="right")
    for name, run in figures.items():
        shown.add_row(
            name,
            f"{run['losses'][-1]:.4f}",
            f"{differences[name]:.1e}",
            run["weights"][:8],
            f"{run['tokens_per_s']:.0f}",
            ", ".join(map(str, run["peak_memory_mb"])),
            f"{run['parameters_per_rank']:,}",
        )
    return shown


def plot(figures: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, (curves, gaps) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    ordinary = {name: run for name, run in figures.items() if reference_of(name) == ALONE}
    alone = figures[ALONE]["losses"]
    for line, (name, run) in enumerate(ordinary.items()):
        curves.plot(run["losses"], label=name, linestyle=("-", "--", ":", "-.")[line], linewidth=2.5 - 0.5 * line)
        if name != ALONE:
            gap = [abs(a - b) or float("nan") for a, b in zip(alone, run["losses"], strict=True)]
            gaps.semilogy(gap, "o+x"[line - 1], label=name)
    curves.set(title="loss", xlabel="step", ylabel="nats a byte")
    gaps.set(title="difference from one process (with invariant: none)", xlabel="step", ylabel="nats a byte")
    for axes in (curves, gaps):
        axes.legend()
        axes.grid(alpha=0.3)
    canvas.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
