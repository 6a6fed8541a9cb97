"""`make gpu`: test, check and measure on this machine's GPU, into a folder named after the device.

A step can be asked for by name (`make gpu STEPS="tests matmul"`) and leaves its own files. So a machine lent for
minutes can run one step after another, the most useful first.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import weft
from weft.bench import suites
from weft.bench.device_time import ceilings, geometric_mean
from weft.bench.environment import folder_name
from weft.bench.measure import ROUNDS
from weft.bench.report import results, save_json

SUITES = (
    *("launch", "matmul", "attention_chunk", "bucket", "cross_entropy"),
    *("rank_order_sum", "communicating", "several_gpus"),
)


def main(arguments: list[str] | None = None) -> int:
    steps: dict[str, Callable[[Path], int]] = {"tests": tests, "sanitizer": sanitizer, "tune": tune}
    steps |= {suite: partial(bench, suite) for suite in SUITES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="where the device's folder goes")
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(steps)}; all but tune by default")
    options = parser.parse_args(arguments)
    if unknown := set(options.steps) - set(steps):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    if not torch.cuda.is_available():
        print(f"no CUDA device here: {weft.build_info()['gpu']}", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name()
    folder = Path(options.out) / folder_name(device)
    folder.mkdir(parents=True, exist_ok=True)
    codes = {step: steps[step](folder) for step in options.steps or [step for step in steps if step != "tune"]}
    print(", ".join(f"{step}: {'ok' if code == 0 else f'exit code {code}'}" for step, code in codes.items()))
    return max(codes.values())


def tests(folder: Path) -> int:
    return _logged([sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"], folder / "pytest.txt")


def sanitizer(folder: Path) -> int:
    """Run the tests marked sanitize under memcheck, racecheck and synccheck."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    python = [sys.executable, "-m", "pytest", "-q", "-m", "sanitize", "-p", "no:cacheprovider"]
    return max(
        _logged([program, "--tool", tool, "--error-exitcode", "9", *python], folder / f"{tool}.txt")
        for tool in ("memcheck", "racecheck", "synccheck")
    )


def tune(folder: Path) -> int:
    """Write the tuned table beside the results; copy it to kernels/configs to use it."""
    return _logged([sys.executable, "-m", "weft.cli", "tune", "matmul", "--out", str(folder)], folder / "tune.txt")


def bench(suite: str, folder: Path) -> int:
    module = importlib.import_module(f"weft.bench.{suite}")
    limits = ceilings()
    rows_found = module.rows(limits)
    found = results(suite, suites.SUITES[suite], module, rows_found, f"make gpu STEPS={suite}", ROUNDS)
    rows = found["rows"]
    found |= {
        "build": weft.build_info(),
        "ceilings": {"tera_operations": limits.tera_operations, "terabytes": limits.terabytes},
        "geometric_mean_ratio": means(rows, "ratio"),
        "geometric_mean_tax": means(rows, "tax"),
    }
    save_json(found, str(folder / f"{suite}.json"))
    for row in rows:
        print(f"{row['op']:<36} {row['shape']:<56} {figures(row)}")
    for name in ("geometric_mean_ratio", "geometric_mean_tax"):
        print(name, json.dumps(found[name]))
    return 0


def means(rows: list[dict], figure: str) -> dict[str, float]:
    """Return the geometric mean of a figure for each op, over the rows that have it and were measured with a peer."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["ratio"] is not None and row.get(figure) is not None:
            found.setdefault(row["op"], []).append(row[figure])
    return {op: geometric_mean(values) for op, values in found.items()}


def figures(row: dict) -> str:
    """Return the measured figures of a row as text."""
    texts = [f"{row['times']['ours']['p50_us']:>10.1f} us"] if row["times"] else []
    texts += [f"{row['ratio']:.2f}x {row['peer']}"] if row["ratio"] is not None else []
    texts += [f"tax {row['tax']:.3f}"] if row.get("tax") is not None else []
    texts += [f"{row['of_ceiling']:.0%} of ceiling"] if row.get("of_ceiling") is not None else []
    return "  ".join([*texts, row["remark"]]).rstrip()


def _logged(command: list[str], log: Path) -> int:
    done = subprocess.run(command, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    print(done.stdout[-3000:])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
