"""weft bench launch: the cost of starting a kernel that was compiled ahead of time, on a GPU.

    host     the host's time for one launch while the device keeps up: ours, Triton's own launcher, torch.add
    cold     a process's first call until its result is complete: ours, Triton with an empty and with a warm disk cache
    kernel   the device's time: ours, and the same kernel as Triton compiles it here

The launches are those of `bucket.reduce` (few arguments) and `matmul` (over fifty, with tensor descriptors).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from weft.bench import device_time
from weft.bench.flag_tax import unsplit
from weft.bench.measure import Quantiles, alternate
from weft.bench.table import Row, not_measured
from weft.kernels import bucket, dispatch, language, launch
from weft.kernels.launch import Launch
from weft.kernels.matmul import matmul

LIMIT = "none: ratios to the peers of the same run"
TRITON, ADD = "Triton's launcher", "torch.add"
EMPTY, WARM = "Triton, empty cache", "Triton, warm cache"

_CALLS = 100  # between two synchronisations: few enough that no launch waits for room in the stream
_COLD_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")


def run(options) -> list[Row]:
    parts = options.part or PARTS
    if reason := _why_not():
        return [not_measured(part, "", reason) for part in parts]
    return [line for part in parts for line in PARTS[part](options.rounds)]


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    if language.VERSION is None or language.INTERPRETED:
        return "triton, which is the peer, is not installed or interprets"
    found = dispatch.archive_of(launch.code_architecture(torch.device("cuda")))
    return found if isinstance(found, str) else None


def _host(rounds: int) -> Iterator[Row]:
    x = torch.ones(64, device="cuda")
    out = torch.empty_like(x)
    for name, recorded in _recorded().items():
        contenders: dict[str, Callable[[], object]] = {
            "ours": partial(by_us, recorded),
            TRITON: partial(by_triton, recorded),
            ADD: partial(torch.add, x, x, out=out),
        }
        samples = alternate(contenders, meet=torch.cuda.synchronize, rounds=rounds, calls=_CALLS)
        times = {contender: Quantiles.of(samples[contender]) for contender in contenders}
        yield Row({"op": "host time of a launch", "shape": name}, times, TRITON)


def _cold(rounds: int) -> Iterator[Row]:
    for name in _CALLS_OF:
        with tempfile.TemporaryDirectory() as warm:
            first_call_us(name, jit=True, cache=warm)
            samples: dict[str, list[float]] = {"ours": [], EMPTY: [], WARM: []}
            for _ in range(_COLD_ROUNDS):
                samples["ours"].append(first_call_us(name, jit=False, cache=warm))
                samples[WARM].append(first_call_us(name, jit=True, cache=warm))
                with tempfile.TemporaryDirectory() as empty:
                    samples[EMPTY].append(first_call_us(name, jit=True, cache=empty))
        found = {contender: Quantiles.of(times) for contender, times in samples.items()}
        facts = {"ratio_to_empty_cache": found[EMPTY].p50_us / found["ours"].p50_us}
        yield Row({"op": "first call of a process", "shape": name}, found, WARM, facts)


def _kernel(rounds: int) -> Iterator[Row]:
    archive = dispatch.archive_of(launch.code_architecture(torch.device("cuda")))
    versions = f"ours by triton {getattr(archive, 'triton', '')}, the peer by {language.VERSION}"
    for name, recorded in _recorded(large=True).items():
        calls = {"ours": partial(by_us, recorded), TRITON: partial(by_triton, recorded)}
        times = device_time.alternate(calls, rounds)
        yield Row({"op": "time of the kernel", "shape": name}, times, TRITON, remark=versions)


PARTS: dict[str, Callable[[int], Iterable[Row]]] = {"host": _host, "cold": _cold, "kernel": _kernel}


def by_us(recorded: Launch) -> None:
    constants = recorded.constants
    launch.launch(
        recorded.kernel, recorded.grid, *recorded.arguments, warps=recorded.warps, stages=recorded.stages, **constants
    )


def by_triton(recorded: Launch) -> None:
    recorded.kernel[recorded.grid](*recorded.arguments, **recorded.constants, **recorded.options)


def reduce_once(large: bool = False) -> torch.Tensor:
    count = 1 << 24 if large else 4096
    out = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    bucket.reduce([torch.ones_like(out)] * 4, out)
    return out


def multiply_once(large: bool = False) -> torch.Tensor:
    size = 4096 if large else 256
    x, w = (torch.ones(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return matmul(x, w.t(), config=unsplit(x, w.t()))[0]


_CALLS_OF: dict[str, Callable[..., torch.Tensor]] = {"bucket.reduce": reduce_once, "matmul": multiply_once}


def _recorded(large: bool = False) -> dict[str, Launch]:
    """Return the launch of each call on device tensors; raise unless it was compiled ahead of time."""
    found = {}
    architecture = launch.code_architecture(torch.device("cuda"))
    for name, call in _CALLS_OF.items():
        with launch.recording(architecture) as launches:
            call(large)
        (recorded,) = launches
        origin = launch.origin(recorded, architecture)
        if origin.how != "ahead-of-time":
            raise AssertionError(f"{name}: {origin}")
        found[name] = recorded
    return found


def first_call_us(name: str, jit: bool, cache: str) -> float:
    """Return the time of a new process's first call, after its CUDA context and tensors exist."""
    command = [sys.executable, "-W", "ignore", "-m", "weft.bench.launch", name, "jit" if jit else "compiled"]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    environment.pop("WEFT_NO_JIT", None)
    if not jit:
        environment["WEFT_NO_JIT"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return float(done.stdout)


def _time_first_call(name: str, how: str) -> None:
    from weft import _C

    dispatch.use(_C.launch if how == "compiled" else None)
    torch.ones(1 << 16, dtype=torch.bfloat16, device="cuda").add_(1).sum().item()
    start = time.perf_counter()
    _CALLS_OF[name]()
    torch.cuda.synchronize()
    print((time.perf_counter() - start) * 1e6)


if __name__ == "__main__":
    _time_first_call(*sys.argv[1:])
