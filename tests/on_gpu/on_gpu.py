"""`make gpu`: what is to be known of weft on this machine's GPU, in order of worth, within a given time.

Each step is a process of its own: what fails or hangs costs its own figures only. Everything is written as it comes, to
a folder named after the device: the output of all steps to log.txt, the rows of a step to <step>.json after each row.
With --archive the folder is packed into one file every few seconds, for machines that return few files. The last lines
are a table of all that was found.

    make gpu                                            # every step, 570 seconds in all
    make gpu STEPS=first                                # the first ten minutes on a GPU: what is shipped, no compiler
    make gpu STEPS=second                               # kernels side by side, tables, a step, sanitizers, tests
    make gpu SECONDS=1500 STEPS="launches matmul"       # some of them
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import weft
from weft.bench import kernels, suites
from weft.bench.device_time import Ceilings, ceilings, geometric_mean, keeping
from weft.bench.environment import environment, folder_name
from weft.bench.measure import ROUNDS
from weft.bench.report import results, save_json
from weft.bench.table import Row
from weft.kernels import dispatch, launch
from weft.testing import cases

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "helpers")]
import first_launches  # noqa: E402
import guarded  # noqa: E402

LEAST_SECONDS = 15  # no step starts with less time left
MOST_LINES = 60  # of the table
_PACK_EVERY_S = 2
_LAST_LINES_S = 5
_WORKERS = 4  # groups of first launches at a time
_SAVE_EVERY_ROWS = 10
_REHEARSAL = 5  # times as long, for Triton's interpreter
_LARGE = "rank_order_sum", "communicating", "several_gpus"
SUITES = ("launch", "cross_entropy", "bucket", "grouped_matmul", "attention_chunk", "matmul", *_LARGE)
COLLECTIVES = "rank_order_sum", "several_gpus", "tests_of_several", "tune_collectives"  # named together "collectives"
_ACROSS = ("communicating", "collectives")  # groups of first launches of virtual ranks

# Commands: their steps, each with the second at which it ends. A step that ends early leaves its time to the next.
COMMANDS = {
    "first": {"doctor": 40, "launches": 110, "products": 190, "attentions": 260, "losses": 320, "across": 420},
    "second": {
        "across": 45,
        "attention_tiles": 105,
        "tune_attention": 120,
        "losses": 160,
        "wgrad_tiles": 220,
        "invariant_products": 250,
        "llama_step": 290,
        "sanitizer": 390,
        "shared_gpu": 500,
        "chosen_tests": 570,
    },
}
_OWN_FILES = "attention_tiles", "wgrad_tiles", "invariant_products"
_SHIPPED = {"WEFT_NO_JIT": "1"}  # of the first command and of tables: nothing is compiled there

_ATTENTIONS = [
    case
    for case in cases.ATTENTIONS
    if case.kv_heads < case.heads and (case.head_dim, case.sequence) in ((128, 2048), (128, 8192), (64, 8192))
]


@dataclass(frozen=True)
class GpuStep:
    """A step: its work in a process of its own, and the most seconds that it may take."""

    run: Callable[[Path, float], int]
    seconds: int


def steps() -> dict[str, GpuStep]:
    """Return all steps, the most useful first."""
    alone = [group for group in first_launches.groups() if group not in _ACROSS]
    return {
        "doctor": GpuStep(doctor, 60),
        "launches": GpuStep(partial(launches, alone, "launches"), 240),
        **{
            suite: GpuStep(partial(bench, suite, **kernels.SUITES.get(suite, {})), 180)
            for suite in SUITES
            if suite not in _LARGE
        },
        "tune": GpuStep(tune, 240),
        "tune_others": GpuStep(partial(tune, ops=("attention", "grouped")), 120),
        "tests": GpuStep(tests, 600),
        "sanitizer": GpuStep(sanitizer, 300),
        "profile": GpuStep(profile, 90),
        **{suite: GpuStep(partial(bench, suite), 180) for suite in _LARGE},
        "tests_of_several": GpuStep(partial(tests, marker="gpus2"), 600),
        "tune_collectives": GpuStep(partial(tune, ops=("collectives",)), 300),
        "across": GpuStep(across, 100),
        "llama_step": GpuStep(partial(bench, "llama_step", rounds=7), 90),
        **parts(),
    }


def parts() -> dict[str, GpuStep]:
    """Return the steps that are parts of the others, in the time that a command has for them."""
    narrow = {"model": ["llama-3-8b"], "tp": (8,), "tokens": (8192,), "rounds": 11}
    benches = {
        "products": ("matmul", 100, {"model": ["llama-3-8b"], "tp": (1, 8), "tokens": (8192,)}),
        "attentions": ("attention_chunk", 90, {"attentions": _ATTENTIONS, "compiled": False, "rounds": 7}),
        "attention_tiles": ("attention_chunk", 60, {"attentions": _ATTENTIONS, "tiles": True, "rounds": 11}),
        "wgrad_tiles": ("matmul", 60, {"only": "wgrad", "tiles": True, **narrow}),
        "invariant_products": ("matmul", 30, {"invariant": True, **narrow}),
    }
    return {
        **{
            name: GpuStep(partial(bench, suite, step=name, **given), seconds)
            for name, (suite, seconds, given) in benches.items()
        },
        "losses": GpuStep(losses, 60),
        "tune_attention": GpuStep(partial(tune, ops=("attention",)), 60),
        "chosen_tests": GpuStep(partial(tests, chosen=_CHOSEN), 240),
        "shared_gpu": GpuStep(partial(tests, chosen=_SHARED_GPU, workers=4), 120),
    }


def main(arguments: list[str] | None = None) -> int:
    known = steps()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="where the device's folder goes")
    parser.add_argument(
        "steps", nargs="*", help=f"of {', '.join(known)}; first, second, collectives: some of these; all by default"
    )
    parser.add_argument("--seconds", type=int, default=570, help="when the last step is ended")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the device's folder, made again every few seconds")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: what the interpreter can run")
    parser.add_argument("--one", metavar="STEP", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of time.monotonic()
    options = parser.parse_args(arguments)
    command = options.steps[0] if options.steps and options.steps[0] in COMMANDS else ""
    ends = {
        step: second * (_REHEARSAL if options.rehearse else 1) for step, second in COMMANDS.get(command, {}).items()
    }
    options.steps = [*ends, *options.steps[1:]] if command else options.steps
    options.steps = [name for step in options.steps for name in (COLLECTIVES if step == "collectives" else [step])]
    if unknown := {*options.steps, *([options.one] if options.one else [])} - set(known):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join([*known, *COMMANDS])}")
    if not torch.cuda.is_available() and not options.rehearse:
        print(f"no CUDA device here: {weft.build_info()['gpu']}", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "rehearsal"
    folder = options.out / folder_name(device)
    folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        return known[options.one].run(folder, options.until)
    if command == "first":
        os.environ |= _SHIPPED
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each stream of the virtual ranks
    chosen = {name: known[name] for name in options.steps or known if options.steps or name not in parts()}
    return _run_all(chosen, folder, options, ends)


def _run_all(chosen: dict[str, GpuStep], folder: Path, options, ends: dict[str, int]) -> int:
    """Run the steps one after another, each until its second of `ends`, or as long as it may take."""
    began = time.monotonic()
    outcome: dict[str, str] = {}
    pack = partial(_pack, folder, options.archive) if options.archive else lambda: None
    for name, step in chosen.items():
        now = time.monotonic() - began
        limit = min(options.seconds, ends.get(name, now + step.seconds)) - now
        if limit < LEAST_SECONDS:
            outcome[name] = "not started: no time left"
            continue
        command = [sys.executable, "-u", __file__, str(options.out), "--one", name]
        command += ["--until", str(began + now + limit), *["--rehearse"] * options.rehearse]
        code = _streamed(command, folder / "log.txt", name, limit, pack)
        took = f" ({time.monotonic() - began - now:.0f} s)"
        outcome[name] = {0: "ok", None: "ended: out of time"}.get(code, f"exit code {code}") + took
        (folder / "steps.json").write_text(json.dumps({"environment": environment(), "steps": outcome}, indent=1))
        pack()
    print("\n".join(_table(folder)))
    print(", ".join(f"{name}: {said}" for name, said in outcome.items()))
    return int(any(said.startswith("exit") for said in outcome.values()))


def _streamed(
    command: list[str], log: Path, name: str, seconds: float, pack: Callable[[], None] = lambda: None
) -> int | None:
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
    reader = threading.Thread(target=_copy_lines, args=(process.stdout, log, name, pack), daemon=True)
    reader.start()
    code = process.wait()
    timer.cancel()
    reader.join(_LAST_LINES_S)  # a process that it left behind may hold the pipe
    return None if over.is_set() else code


def _copy_lines(lines: Iterable[str], log: Path, name: str, pack: Callable[[], None]) -> None:
    packed = time.monotonic()
    with log.open("a") as file:
        for line in lines:
            file.write(f"{name}: {line}")
            file.flush()
            print(f"{name}: {line}", end="", flush=True)
            if time.monotonic() - packed > _PACK_EVERY_S:
                pack()
                packed = time.monotonic()


def _pack(folder: Path, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = archive.with_suffix(".part")
    with tarfile.open(temporary, "w:gz", compresslevel=3) as packed:
        packed.add(folder, folder.name)
    temporary.replace(archive)


def _table(folder: Path) -> list[str]:
    """Return what the folder's rows say in at most MOST_LINES lines: faults, then a line for each op, then rows."""
    found = {
        path.stem: json.loads(path.read_text())["rows"] for path in sorted(folder.glob("*.json")) if _has_rows(path)
    }
    faults = [f"{row['op']}  {row['shape']}  {row['remark']}" for rows in found.values() for row in rows if _fault(row)]
    lines = [f"{len(faults)} faults", *faults[: MOST_LINES // 2]]
    singles: list[str] = []
    for step, rows in found.items():
        for op in dict.fromkeys(row["op"] for row in rows):
            of_op = [row for row in rows if row["op"] == op]
            ratios = [row["ratio"] for row in of_op if row["ratio"] is not None]
            right = sum(not _fault(row) for row in of_op)
            spread = f"  {geometric_mean(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            lines.append(f"{step:<18} {op:<40} {right} of {len(of_op)} right{spread}")
            singles += [f"{op:<32} {row['shape']:<56} {figures(row)}" for row in of_op if row["times"]]
    return [line[:190] for line in [*lines, *singles][:MOST_LINES]]


def _has_rows(path: Path) -> bool:
    return "rows" in json.loads(path.read_text())


def _fault(row: dict) -> bool:
    return row["remark"].startswith("FAULT")


def doctor(folder: Path, end: float) -> int:
    """Print what `weft doctor` finds, and which of the listed launches the archive does not serve.

    Neither ends anything here: what is amiss shows in the later steps too.
    """
    print(weft.build_info())
    _run([sys.executable, "-m", "weft", "doctor"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    architecture = launch.code_architecture(device) if device.type == "cuda" else "sm_90"
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return _run([sys.executable, "-c", _SERVED, architecture], compiling) and 0


_SERVED = """
import sys, weft.ops
from weft.kernels import launch, variants
architecture = sys.argv[1]
listed = [made for op in variants.OPS for made in variants.record(op, architecture)]
missing = [made for made in listed if launch.origin(made, architecture).how != "ahead-of-time"]
print(f"{architecture}: {len(listed) - len(missing)} of {len(listed)} listed launches are compiled ahead of time")
for made in missing[:5]:
    print(f"    {made.kernel.__name__} {made}: {launch.origin(made, architecture)}")
"""


def launches(groups: Sequence[str], name: str, folder: Path, end: float) -> int:
    """Check the groups of first launches, several at a time, each in a process of its own."""
    rows: list[dict] = []
    lock = threading.Lock()
    known = {"environment": environment(), "build": weft.build_info()}
    check_s = guarded.CHECK_S * (1 if torch.cuda.is_available() else _REHEARSAL)

    def keep(row: dict) -> None:
        with lock:
            rows.append(row)
            print(f"{row['op']:<40} {row['shape'][:90]:<90} {row['remark'] or 'ok'}", flush=True)
            if len(rows) % _SAVE_EVERY_ROWS == 0 or _fault(row):
                save_json(known | {"rows": rows}, str(folder / f"{name}.json"))

    with ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(lambda group: guarded.rows(group, end - 3, keep, check_s), groups))
    save_json(known | {"rows": rows}, str(folder / f"{name}.json"))
    faults = sum(map(_fault, rows))
    print(f"{len(rows)} checks, {faults} with a fault")
    return int(faults > 0)


def across(folder: Path, end: float) -> int:
    """Check kernels and collectives of virtual ranks, and time the sum of 2 and 4 buffers."""
    code = launches(_ACROSS, "across", folder, end - 25)
    return max(code, bench("rank_order_sum", folder, end, step="across", worlds=(2, 4)))


def losses(folder: Path, end: float) -> int:
    """Time losses, grouped products and buckets."""
    options: dict[str, dict] = {
        "cross_entropy": {"tensor_parallel": (1, 8), "compiled": False},
        "grouped_matmul": {},
        "bucket": {},
    }
    return max([bench(suite, folder, end, step="losses", **given) for suite, given in options.items()])


_CHOSEN = ("tests/csrc/test_cuda_collectives.py", "tests/csrc/test_launch_on_gpu.py", "tests/kernels", "tests/ops")
_SHARED_GPU = ("tests/test_training_on_gpu.py", "tests/comm/test_cuda.py", "tests/data_parallel/test_gpu.py")
# Those of one rank first: a tool may run one kernel at a time, and ranks wait for each other.
_SANITIZED = (
    "tests/kernels/test_matmul.py::test_every_configuration_gives_the_product[1]",
    "tests/kernels/test_bucket.py::test_packing_writes_every_tensor_and_zeros_between[torch.bfloat16-1.0]",
    "tests/kernels/test_cross_entropy.py::test_cutting_rows_into_pieces_changes_roundings_only[3]",
    "tests/csrc/test_cuda_collectives.py::test_small_calls_are_right[two_shot]",
)
_TOOL_S = 70  # of compute-sanitizer


def tests(folder: Path, end: float, marker: str = "gpu", chosen: Sequence[str] = (), workers: int = 8) -> int:
    """Run the tests with a marker. Without a GPU they are skipped, and the launcher's run on a stub driver."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--maxfail", "20", "--import-mode=importlib"]
    several = ["-n", str(workers), "-v"] if importlib.util.find_spec("xdist") else []
    # Interrupted before the step is ended, pytest prints what has failed so far.
    limit = ["timeout", "-s", "INT", str(max(1, int(end - time.monotonic()) - 10))]
    code = _run([*limit, *pytest, *several, "-m", marker, *chosen])
    return code if torch.cuda.is_available() else code or _run([*pytest, "-q", "tests/csrc/test_launch.py"])


def sanitizer(folder: Path, end: float) -> int:
    """Run four small launches under memcheck and racecheck; all that are marked, with synccheck, if there is time."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        print(f"there is no {program}")
        return 0
    python = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    rows: list[dict] = []
    for tool, which, text in [
        *((tool, _SANITIZED, "four small launches") for tool in ("memcheck", "racecheck")),
        *((tool, ("-m", "sanitize"), "all marked tests") for tool in ("memcheck", "racecheck", "synccheck")),
    ]:
        left = int(end - time.monotonic()) - 5
        if left < LEAST_SECONDS:
            break
        limit = ["timeout", "-s", "INT", str(min(left, _TOOL_S))]
        checked = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        code = _run([*limit, *checked, *python, *which])
        said = {0: "", 124: "ended: out of time", 9: "FAULT: the tool found errors"}.get(
            code, f"FAULT: exit code {code}"
        )
        rows.append({"op": tool, "shape": text, "times": {}, "ratio": None, "remark": said})
        saved = {"command": "make gpu STEPS=sanitizer", "environment": environment(), "rows": rows}
        save_json(saved, str(folder / "sanitizer.json"))
    return int(any(map(_fault, rows)))


def profile(folder: Path, end: float) -> int:
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


def tune(folder: Path, end: float, ops: Sequence[str] = ("matmul",)) -> int:
    """Write tuned tables to a folder beside the results; copy them to the folder that `weft tune` names to use them."""
    if not torch.cuda.is_available() or ("collectives" in ops and torch.cuda.device_count() < 2):
        print("needs a GPU" if "collectives" not in ops else "needs several GPUs")
        return 0
    if not isinstance(dispatch.archive_of(launch.code_architecture(torch.device("cuda"))), str):
        os.environ |= _SHIPPED
    models = {"matmul": ["--model", "llama-3-8b"]}
    commands = [[sys.executable, "-m", "weft", "tune", op, *models.get(op, [])] for op in ops]
    return max(_run([*command, "--out", str(folder / "tuned")]) for command in commands)


def bench(suite: str, folder: Path, end: float, step: str = "", **given) -> int:
    """Run a bench with the given options; without a GPU say that it needs one.

    Args:
        step: The step that runs the bench, for the command in the file; a step named like the bench by default.
    """
    if suites.SUITES[suite].on_gpu and not torch.cuda.is_available():
        print(f"{suite}: measured on a GPU only")
        return 0
    module = importlib.import_module(f"weft.bench.{suite}")
    options = suites.options_of(module, **{"rounds": ROUNDS, **given})
    limits = ceilings()
    rows: list[Row] = []
    file = folder / f"{step if step in _OWN_FILES else suite}.json"
    found_now = partial(_found, suite, module, rows, limits, step or suite, options)

    def keep(row: Row) -> None:
        rows.append(row)
        kept = found_now()["rows"][-1]
        print(f"{kept['op']:<36} {kept['shape']:<56} {figures(kept)}")
        save_json(found_now(), str(file))

    code = 0
    with keeping(keep):
        try:
            rows[:] = list(module.run(options))
        except Exception as error:  # of what prepares a contest; the next bench goes on
            traceback.print_exc()
            keep(Row({"op": suite, "shape": ""}, remark=f"FAULT: {type(error).__name__}: {error}"))
            code = 1
    found = found_now()
    save_json(found, str(file))
    for name in ("geometric_mean_ratio", "geometric_mean_tax"):
        print(name, json.dumps(found[name]))
    return max(code, int(any(map(_fault, found["rows"]))))


def _found(suite: str, module, rows: list[Row], limits: Ceilings, step: str, options) -> dict:
    found = results(suite, suites.SUITES[suite], module, rows, f"make gpu STEPS={step}", options.rounds)
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


def _run(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run a command whose output is this step's."""
    sys.stdout.flush()
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
