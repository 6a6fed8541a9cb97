"""`make gpu`: what is to be known of weft on this machine's GPU, in order of worth, within a given time.

Each step is a process of its own: what fails or hangs costs its own figures only. Everything is written as it comes, to
a folder named after the device: the output of all steps to log.txt, the rows of a bench to <bench>.json after each row.
With --archive the folder is packed into one file after each step, for machines that return few files.

    make gpu                                            # every step, 570 seconds in all
    make gpu SECONDS=1500 STEPS="launches matmul"       # some of them
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import weft
from weft.bench import first_launches, suites
from weft.bench.device_time import Ceilings, ceilings, geometric_mean, keeping
from weft.bench.environment import environment, folder_name
from weft.bench.measure import ROUNDS
from weft.bench.report import results, save_json
from weft.bench.table import Row

LEAST_SECONDS = 20  # no step starts with less time left
_LARGE = "rank_order_sum", "communicating", "several_gpus"
SUITES = ("launch", "cross_entropy", "bucket", "attention_chunk", "matmul", *_LARGE)
COLLECTIVES = "rank_order_sum", "several_gpus", "tests_of_several", "tune_collectives"  # named together "collectives"


@dataclass(frozen=True)
class GpuStep:
    """A step: its work in a process of its own, and the most seconds that it may take."""

    run: Callable[[Path], int]
    seconds: int


def steps() -> dict[str, GpuStep]:
    """Return all steps, the most useful first."""
    return {
        "doctor": GpuStep(doctor, 60),
        "launches": GpuStep(launches, 240),
        **{suite: GpuStep(partial(bench, suite), 180) for suite in SUITES if suite not in _LARGE},
        "tune": GpuStep(tune, 240),
        "tests": GpuStep(tests, 600),
        "sanitizer": GpuStep(sanitizer, 300),
        "profile": GpuStep(profile, 90),
        **{suite: GpuStep(partial(bench, suite), 180) for suite in _LARGE},
        "tests_of_several": GpuStep(partial(tests, marker="gpus2"), 600),
        "tune_collectives": GpuStep(partial(tune, op="collectives"), 300),
    }


def main(arguments: list[str] | None = None) -> int:
    known = steps()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="where the device's folder goes")
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(known)}; collectives: some of these; all by default")
    parser.add_argument("--seconds", type=int, default=570, help="when the last step is ended")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the device's folder, made again after each step")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: the steps that the interpreter can run")
    parser.add_argument("--one", metavar="STEP", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.steps = [name for step in options.steps for name in (COLLECTIVES if step == "collectives" else [step])]
    if unknown := {*options.steps, *([options.one] if options.one else [])} - set(known):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not torch.cuda.is_available() and not options.rehearse:
        print(f"no CUDA device here: {weft.build_info()['gpu']}", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "rehearsal"
    folder = options.out / folder_name(device)
    folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        return known[options.one].run(folder)
    able = [name for name in options.steps or known if torch.cuda.is_available() or name in REHEARSED]
    return _run_all({name: known[name] for name in able}, folder, options)


def _run_all(chosen: dict[str, GpuStep], folder: Path, options) -> int:
    end = time.monotonic() + options.seconds
    outcome: dict[str, str] = {}
    for name, step in chosen.items():
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            outcome[name] = "not started: no time left"
            continue
        command = [sys.executable, "-u", __file__, str(options.out), "--one", name, *["--rehearse"] * options.rehearse]
        code = _streamed(command, folder / "log.txt", name, min(left, step.seconds))
        outcome[name] = {0: "ok", None: "ended: out of time"}.get(code, f"exit code {code}")
        (folder / "steps.json").write_text(json.dumps({"environment": environment(), "steps": outcome}, indent=1))
        if options.archive:
            _pack(folder, options.archive)
    print(", ".join(f"{name}: {said}" for name, said in outcome.items()))
    return int(any(said.startswith("exit") for said in outcome.values()))


def _streamed(command: list[str], log: Path, name: str, seconds: float) -> int | None:
    """Run a command with its output on the screen and in the log as it comes; return None if its time was over."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    over = threading.Event()

    def stop() -> None:
        over.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    assert process.stdout is not None
    with log.open("a") as file:
        for line in process.stdout:
            file.write(f"{name}: {line}")
            file.flush()
            print(f"{name}: {line}", end="", flush=True)
    code = process.wait()
    timer.cancel()
    return None if over.is_set() else code


def _pack(folder: Path, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = archive.with_suffix(".part")
    with tarfile.open(temporary, "w:gz") as packed:
        packed.add(folder, folder.name)
    temporary.replace(archive)


def doctor(folder: Path) -> int:
    """Print what `weft doctor` finds; it exits with 1 where something is amiss, which ends nothing here."""
    print(weft.build_info())
    return _run([sys.executable, "-m", "weft.cli", "doctor"]) and 0


def launches(folder: Path) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    for row in first_launches.rows(device, first_launches.TIMES if device.type == "cuda" else 1):
        rows.append(row)
        print(f"{row.of['op']:<36} {row.of['shape']:<56} {row.remark or 'ok'}")
        save_json(
            {"environment": environment(), "rows": [row.as_dict() for row in rows]}, str(folder / "launches.json")
        )
    faults = sum(map(first_launches.is_fault, rows))
    print(f"{len(rows)} checks, {faults} with a fault")
    return int(faults > 0)


def tests(folder: Path, marker: str = "gpu") -> int:
    """Run the tests with a marker. Without a GPU they are skipped, and the launcher's run on a stub driver."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--maxfail", "20"]
    code = _run([*pytest, "-m", marker])
    return code if torch.cuda.is_available() else code or _run([*pytest, "-q", "tests/csrc/test_launch.py"])


def sanitizer(folder: Path) -> int:
    """Run the tests marked sanitize under memcheck, racecheck and synccheck."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    python = [sys.executable, "-m", "pytest", "-q", "-m", "sanitize", "-p", "no:cacheprovider"]
    return max(
        _run([program, "--tool", tool, "--error-exitcode", "9", *python])
        for tool in ("memcheck", "racecheck", "synccheck")
    )


def profile(folder: Path) -> int:
    """Print the time of each kernel in a training step of the loss, an MLP and attention."""
    from weft.ops import kernel_choice
    from weft.ops.attention import attention
    from weft.ops.linear_cross_entropy import fused_linear_cross_entropy
    from weft.ops.matmul import gated_linear

    device = torch.device("cuda")
    x = torch.randn(4096, 2048, device=device).bfloat16().requires_grad_()
    gate, up = (torch.randn(5632, 2048, device=device).bfloat16().requires_grad_() for _ in range(2))
    q, k, v = (torch.randn(4, 16, 2048, 128, device=device).bfloat16().requires_grad_() for _ in range(3))
    words = torch.randn(32000, 2048, device=device).bfloat16().requires_grad_()
    target = torch.randint(0, 32000, (4096,), device=device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with kernel_choice.prefer("kernel"), torch.profiler.profile(activities=activities) as profiled:
        for _ in range(5):
            gated_linear(x, gate, up).sum().backward()
            attention(q, k, v, causal=True).sum().backward()
            fused_linear_cross_entropy(x, words, target).backward()
        torch.cuda.synchronize()
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=60))
    return 0


def tune(folder: Path, op: str = "matmul") -> int:
    """Write the tuned table beside the results; copy it to the folder that `weft tune` names to use it."""
    if op == "collectives" and torch.cuda.device_count() < 2:
        print("needs several GPUs")
        return 0
    models = ["--model", "llama-3-8b"] if op == "matmul" else []
    return _run([sys.executable, "-m", "weft.cli", "tune", op, *models, "--out", str(folder)])


def bench(suite: str, folder: Path) -> int:
    module = importlib.import_module(f"weft.bench.{suite}")
    limits = ceilings()
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        kept = _found(suite, module, rows, limits)["rows"][-1]
        print(f"{kept['op']:<36} {kept['shape']:<56} {figures(kept)}")
        save_json(_found(suite, module, rows, limits), str(folder / f"{suite}.json"))

    with keeping(keep):
        rows = list(module.rows(limits))
    found = _found(suite, module, rows, limits)
    save_json(found, str(folder / f"{suite}.json"))
    for name in ("geometric_mean_ratio", "geometric_mean_tax"):
        print(name, json.dumps(found[name]))
    return 0


def _found(suite: str, module, rows: list[Row], limits: Ceilings) -> dict:
    found = results(suite, suites.SUITES[suite], module, rows, f"make gpu STEPS={suite}", ROUNDS)
    return found | {
        "build": weft.build_info(),
        "ceilings": {"tera_operations": limits.tera_operations, "terabytes": limits.terabytes},
        "geometric_mean_ratio": means(found["rows"], "ratio"),
        "geometric_mean_tax": means(found["rows"], "tax"),
    }


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


def _run(command: list[str]) -> int:
    """Run a command whose output is this step's."""
    sys.stdout.flush()
    return subprocess.run(command).returncode


REHEARSED = ("doctor", "launches", "tests")

if __name__ == "__main__":
    sys.exit(main())
