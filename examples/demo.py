"""`make demo`: train one model alone and split in several ways; only time and memory change.

The runs with invariant=4 have the same losses, weights and optimizer state to the bit. `make demo ALL=1` has more of
them.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.status import Status

SCRIPT = Path(__file__).parent / "train_lm.py"


class Run(NamedTuple):
    """A training: the options of train_lm.py, the run that it must equal, its processes and the cores of each."""

    options: str
    equals: str
    processes: int = 2
    cores: int = 1


ALONE, IN_UNITS, IN_PARTS = "one process", "one process, invariant", "one process, invariant, units"
RUNS = {
    ALONE: Run("", ALONE, 1, cores=2),
    "tensor parallel": Run("--tp 2", ALONE),
    "tensor parallel over gloo": Run("--tp 2 --backend gloo", ALONE),
    "data parallel": Run("--dp 2", ALONE),
    # One core for each process: the bits of layers that stay whole follow the number of threads.
    IN_UNITS: Run("--invariant 4", IN_UNITS, 1),
    "tensor x data, invariant": Run("--tp 2 --dp 2 --invariant 4", IN_UNITS, 4),
}
MORE = {
    "pipeline, invariant": Run("--pp 2 --invariant 4", IN_UNITS),
    IN_PARTS: Run("--invariant 4 --units 2", IN_PARTS, 1),
    "context, invariant, units": Run("--cp 2 --invariant 4 --units 2", IN_PARTS),
    "context x tensor, invariant, units": Run("--cp 2 --tp 2 --invariant 4 --units 2", IN_PARTS, 4),
}
# The first runs only differ in the order of some fp32 sums. A lost gradient or a bias added twice exceeds this at once.
LARGEST_DIFFERENCE = 0.01
COLUMNS = "{:<35}{:>5}{:>10}{:>11}{:>12}{:>12}{:>9}{:>12}  {:<8}"
HEADINGS = (
    ("", "", "", "beside one", "parameters", "MB on the", "last", "largest", "hash of"),
    ("run", "cores", "tokens/s", "process", "on a rank", "fullest", "loss", "difference", "state"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the curves and the plot")
    parser.add_argument("--all", action="store_true", help="more runs with invariant")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)

    console.print("the same model, seed and data:")
    for headings in HEADINGS:
        console.print(COLUMNS.format(*headings))
    figures, differences = {}, {}
    for name, run in {**RUNS, **(MORE if options.all else {})}.items():
        out = options.out / f"{re.sub('[^a-z]+', '_', name)}.json"
        with console.status(name) as status:
            trained = figures[name] = train(run, options.steps, out, status)
        differences[name] = difference(figures[run.equals], trained)
        console.print(row(name, run, trained, figures[ALONE], differences[name]))
        if differences[name] > LARGEST_DIFFERENCE:
            raise SystemExit("the losses differ by more than rounding can explain")
        if run.equals != ALONE and (differences[name] or trained["hashes"] != figures[run.equals]["hashes"]):
            raise SystemExit("the runs with invariant have different bits")
    plot(figures, options.out / "loss.png")
    console.print(f"loss curves: {options.out / 'loss.png'}")


def train(run: Run, steps: int, out: Path, status: Status) -> dict:
    """Run train_lm.py and return its figures; with several processes it runs under torchrun."""
    launch = []
    if run.processes > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.processes)]
    command = [sys.executable, *launch, str(SCRIPT), *run.options.split(), "--steps", str(steps), "--out", str(out)]
    paths = os.pathsep.join(filter(None, [str(SCRIPT.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": str(min(run.cores, os.cpu_count() or 1)), "PYTHONPATH": paths}
    out.unlink(missing_ok=True)
    said = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            said.append(line)
            status.update(line.strip())
    # Over gloo (torch 2.13) a process may abort while Python ends, after it has written its figures.
    if process.returncode and "gloo" not in run.options:
        raise SystemExit("".join(said))
    return json.loads(out.read_text())


def difference(first: dict, other: dict) -> float:
    gaps = [abs(a - b) for a, b in zip(first["losses"], other["losses"], strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def row(name: str, run: Run, trained: dict, alone: dict, difference: float) -> str:
    return COLUMNS.format(
        name,
        min(run.processes * run.cores, os.cpu_count() or 1),
        f"{trained['tokens_per_s']:.0f}",
        f"{trained['tokens_per_s'] / alone['tokens_per_s']:.2f}",
        f"{trained['parameters_per_rank']:,}",
        max(trained["peak_memory_mb"]),
        f"{trained['losses'][-1]:.4f}",
        f"{difference:.1e}" if difference else "0",
        trained["hashes"][str(len(trained["losses"]))][:8],
    )


def plot(figures: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, (curves, gaps) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    ordinary = [name for name, run in RUNS.items() if run.equals == ALONE]
    alone = figures[ALONE]["losses"]
    for line, name in enumerate(ordinary):
        losses = figures[name]["losses"]
        curves.plot(losses, label=name, linestyle=("-", "--", ":", "-.")[line], linewidth=2.5 - 0.5 * line)
        if name != ALONE:
            gap = [abs(a - b) or float("nan") for a, b in zip(alone, losses, strict=True)]
            gaps.semilogy(gap, "o+x"[line - 1], label=name)
    curves.set(title="loss", xlabel="step", ylabel="nats a byte")
    gaps.set(title="difference from one process (with invariant: none)", xlabel="step", ylabel="nats a byte")
    for axes in (curves, gaps):
        axes.legend()
        axes.grid(alpha=0.3)
    canvas.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
