"""warm_up: measure the products of a model once, weft's kernel beside the library, and use the faster one everywhere.

The first rank measures and sends what it found to all ranks, since ranks that chose for themselves could run different
kernels, which round differently. The measurements are kept on disk, by GPU, driver and the kernels' source.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from weft import _C
from weft.arguments import check_choice
from weft.comm.registry import communicator
from weft.kernels import archive, config, launch, matmul_tiles
from weft.kernels.config import Config, Entry, MatmulConfig
from weft.kernels.matmul import matmul
from weft.kernels.matmul_tiles import Problem
from weft.ops import kernel_choice
from weft.ops.activation import ACTIVATIONS
from weft.ops.matmul import accumulate, gated
from weft.rng import restore_rng_state, rng_states
from weft.tools.rounds import in_turn

C = TypeVar("C", bound=Config)
_LOG = logging.getLogger("weft")
_ROUNDS = 11
_FLUSH_BYTES = 256 << 20  # more than any L2: 50 MB on an H100 and an H200, 126 MB on a B200
_CYCLES_PER_US = 2000  # of a multiprocessor at its highest clock; at a lower one a pause is longer
_LONGEST_PAUSE_US = 5000.0  # for calls that wait for the device themselves, which no pause helps
_CHECKED_ROWS = 64
_SETTING = os.environ.get("WEFT_TUNE", "")
check_choice("WEFT_TUNE", _SETTING, ("", "0", "1"))


def warm_up(model: nn.Module, *example: Any, **keywords: Any) -> None:
    """Measure each product of the model that no table has, and take weft's kernel where it is the faster one.

    A collective call of all ranks of the default group. The model runs forward once, without gradients; buffers and
    random states are as before afterwards. The products of backward follow from those of forward. On the CPU, and
    where WEFT_TUNE=0 is set, nothing is measured and every product is the library's. `weft.explain(model)` shows the
    choice for each product, with the measured ratio.

    Args:
        model: what is trained: a result of `weft.parallelize`, or any module of parallel layers.
        *example, **keywords: arguments of the model, with the sizes of a training step.

    Raises:
        ValueError: the ranks have different GPUs, so that one rank cannot measure for all.

    Examples:
        >>> layer = weft.ParallelLinear(16, 64, style="column")
        >>> weft.warm_up(layer, torch.randn(4, 16))
    """
    if _SETTING == "0":
        return
    problems, device = _products_of(model, example, keywords)
    here = (_name_of(device), sorted(problems, key=str))
    ranks = communicator(None) if dist.is_initialized() else None
    every = [here] if ranks is None else ranks.all_gather_object(here)
    names = sorted({name for name, _ in every if name})
    if not names:
        return
    if len(names) > 1:
        raise ValueError(
            f"warm_up: the ranks have {' and '.join(names)}; what is fast on one need not be on the other, so leave "
            "warm_up out"
        )
    asked = list(dict.fromkeys(problem for _, problems in every for problem in problems))
    start = time.perf_counter()
    found = _known_or_measured(asked, device) if ranks is None or ranks.rank == 0 else []
    entries = found if ranks is None else ranks.all_gather_object(found)[0]
    use(entries, launch.architecture_of(device))
    if ranks is None or ranks.rank == 0:
        ours = sum(entry.ours_us <= entry.peer_us for entry in entries)
        seconds = time.perf_counter() - start
        _LOG.info("warm_up: weft's kernel for %d of %d products, in %.1f s", ours, len(asked), seconds)


def before_first_call(model: nn.Module) -> None:
    """Make the model's first call start with a `warm_up` on its arguments, unless WEFT_TUNE=0."""

    def first(model, arguments, keywords) -> None:
        handle.remove()
        warm_up(model, *arguments, **keywords)

    handle = model.register_forward_pre_hook(first, with_kwargs=True, prepend=True)


def use(entries: Iterable[Entry[MatmulConfig]], architecture: str) -> None:
    """Let products of these and similar sizes follow the measurements from now on."""
    config.add_entries("matmul", architecture, entries)
    matmul_tiles.forget_choices()
    matmul.kinds.clear()  # type: ignore[attr-defined]
    kernel_choice.forget_choices()


def measured(problem: Problem, device: torch.device) -> Entry[MatmulConfig] | None:
    """Return the fastest tile configuration with a correct result, with its time and the library's; None if none is."""
    calls = product_calls(problem, device)
    return fastest(problem.key(), problem.dtype, tiles_of(problem, device), calls, device)


def tiles_of(problem: Problem, device: torch.device) -> list[MatmulConfig]:
    """Return the tile configurations that can compute a product, with each number of pieces of K."""
    tiles = matmul_tiles.listed(launch.architecture_of(device), problem.dtype, problem.narrow)
    return matmul_tiles.candidates(tiles, problem.k)


@dataclass(frozen=True)
class TileCalls(Generic[C]):
    """Calls of one computation, which are compared and timed.

    Attributes:
        ours: Returns the kernel's result with a tile configuration; None lets the kernel choose.
        library: Returns the library's result.
        exact: The results' first rows in fp64.
        reset: Prepares a call whose result is compared.
        operands: The two matrices of a product.
    """

    ours: Callable[[C | None], torch.Tensor]
    library: Callable[[], torch.Tensor]
    exact: torch.Tensor
    reset: Callable[[], object] = lambda: None
    operands: tuple[torch.Tensor, ...] = ()

    def first_rows(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the rows of a call's result that `exact` has too."""
        self.reset()
        return call()[: len(self.exact)].clone()


def fastest(
    key: dict[str, Any], dtype: torch.dtype, tiles: Iterable[C], calls: TileCalls[C], device: torch.device
) -> Entry[C] | None:
    """Return the fastest tile configuration with a correct result, with its time and the library's; None if none is.

    Args:
        key: the problem, as the table is to have it.
        dtype: type of the operands.
    """

    def error_of(call: Callable[[], torch.Tensor]) -> float:
        return float((calls.first_rows(call).double() - calls.exact).abs().max())

    allowed = 4 * error_of(calls.library) + torch.finfo(dtype).eps * float(calls.exact.abs().max())
    right: dict[str, C] = {}
    for tile in tiles:
        try:
            error = error_of(partial(calls.ours, tile))
        except launch.NotCompiledError as refusal:  # a table has times of the code that is shipped
            _LOG.warning("left out: %s for %s: %s", tile, key, refusal)
            continue
        if error <= allowed:
            right[str(tile)] = tile
        else:
            _LOG.warning("left out: %s for %s: off by %.3g, allowed %.3g", tile, key, error, allowed)
    if not right:
        return None
    named = {name: partial(calls.ours, tile) for name, tile in right.items()}
    times = medians_us({**named, "library": calls.library}, device)
    best = min(right, key=lambda name: times[name])
    return Entry(key, right[best], times[best], times["library"])


def medians_us(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return each call's median time; see `device_us`."""
    return {name: median(times) for name, times in device_us(calls, device, _ROUNDS).items()}


def device_us(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    report: Callable[[int, int], object] = lambda done, rounds: None,
) -> dict[str, list[float]]:
    """Return each call's time on the device in each round, measured in alternation with a cold L2.

    Before the start event the device is kept busy for twice the host's time of the call. Without that pause the call
    waits for its own launches: a loss of 185 us took 650, behind a peer that had emptied the queue.

    Args:
        report: See `in_turn`.
    """
    samples: dict[str, list] = {name: [] for name in calls}
    pause_us = dict.fromkeys(calls, 0.0)
    on_gpu = device.type == "cuda"
    flush = torch.empty(_FLUSH_BYTES if on_gpu else 0, dtype=torch.uint8, device=device)
    for name, call, counts in in_turn(calls, rounds, report=report):
        flush.zero_()
        if on_gpu:
            torch.cuda._sleep(int(pause_us[name] * _CYCLES_PER_US))
        start, end = (torch.cuda.Event(enable_timing=True) if on_gpu else _HostEvent() for _ in range(2))
        start.record()
        began = time.perf_counter()
        call()
        host_us = (time.perf_counter() - began) * 1e6
        end.record()
        if counts:
            samples[name].append((start, end))
        else:
            pause_us[name] = min(2 * host_us, _LONGEST_PAUSE_US)
    if on_gpu:
        torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) * 1e3 for start, end in pairs] for name, pairs in samples.items()}


class _HostEvent:
    """An event of the host, for the interpreter."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "_HostEvent") -> float:
        return (end.seconds - self.seconds) * 1e3


def _products_of(model: nn.Module, example, keywords) -> tuple[set[Problem], torch.device]:
    """Return the products that a training step of the model on these arguments asks for, and their device."""
    states = rng_states(model)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), kernel_choice.asked() as asked:
        model(*example, **keywords)
        for buffer, before in buffers:
            buffer.copy_(before)
    for kind, state in states.items():
        restore_rng_state(kind, state, model)
    to_main_grad = any(getattr(parameter, "main_grad", None) is not None for parameter in model.parameters())
    forward = {problem for problem, _ in asked if problem.dtype in launch.DTYPES}
    devices = {device for _, device in asked}
    every = {product for problem in forward for product in (problem, *backward_of(problem, to_main_grad))}
    return every, devices.pop() if devices else torch.device("cpu")


def product(m: int, n: int, k: int, layout: str, dtype: torch.dtype, fused: str = "none") -> Problem:
    """Return the problem of a product of contiguous tensors.

    It is aligned if the contiguous dimension of both operands is a multiple of 16 bytes.
    """
    contiguous = (m if layout[0] == "t" else k), (k if layout[1] == "t" else n)
    return Problem(m, n, k, layout, all(size * dtype.itemsize % 16 == 0 for size in contiguous), dtype, fused)


def backward_of(problem: Problem, to_main_grad: bool) -> tuple[Problem, Problem]:
    """Return dgrad and wgrad of the layer whose forward is the problem."""
    width = problem.n * (2 if problem.fused.endswith("_gated") else 1)  # of dz
    dgrad = product(problem.m, problem.k, width, "nn", problem.dtype)
    wgrad = product(width, problem.k, problem.m, "tn", problem.dtype, "main_grad" if to_main_grad else "none")
    # Each half of a gated layer's weight has a product of its own.
    return replace(dgrad, precision=problem.precision), replace(wgrad, precision=problem.precision, m=problem.n)


def product_calls(problem: Problem, device: torch.device) -> TileCalls[MatmulConfig]:
    """Return calls of a product on operands of its own."""
    # The model's random numbers stay as they are.
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int, letter: str, scale: float = 1.0) -> torch.Tensor:
        stored = (columns, rows) if letter == "t" else (rows, columns)
        per_line = 16 // problem.dtype.itemsize
        rest = stored[1] % per_line
        padding = -rest % per_line if problem.aligned else int(rest == 0)
        padded = torch.randn(stored[0], stored[1] + padding, device=device, generator=generator) * scale
        found = padded.to(problem.dtype)[:, : stored[1]]
        return found.t() if letter == "t" else found

    is_gated = problem.fused.endswith("_gated")
    a = matrix(problem.m, problem.k, problem.layout[0])
    b = matrix(problem.k, problem.n * (1 + is_gated), problem.layout[1], problem.k**-0.5)
    exact = a[:_CHECKED_ROWS].double() @ b.double()
    name = problem.fused.removesuffix("_gated")
    if name == "none":
        return TileCalls(lambda tile: matmul(a, b, config=tile)[0], lambda: a @ b, exact, operands=(a, b))
    if name == "main_grad":
        total = torch.zeros(problem.m, problem.n, device=device)

        def by_library() -> torch.Tensor:
            with kernel_choice.prefer("library"):
                accumulate(a, b, total)
            return total

        return TileCalls(
            lambda tile: matmul(a, b, addend=total, out=total, config=tile)[0], by_library, exact, total.zero_
        )
    activate = ACTIVATIONS[name].apply
    if is_gated:
        gate, up = b.chunk(2, 1)
        exact_gate, exact_up = exact.chunk(2, 1)
        return TileCalls(
            lambda tile: matmul(a, gate, b_up=up, activation=name, keep_z=True, config=tile)[0],
            lambda: gated(a @ b, name),
            activate(exact_gate) * exact_up,
        )
    return TileCalls(
        lambda tile: matmul(a, b, activation=name, keep_z=True, config=tile)[0],
        lambda: activate(a @ b),
        activate(exact),
    )


def _known_or_measured(problems: Iterable[Problem], device: torch.device) -> list[Entry[MatmulConfig]]:
    """Return an entry for each product; those that are not on disk are measured and added there."""
    file = _folder(device) / "matmul.json"
    known = {_text(entry.problem): entry for entry in config.read_table(file, MatmulConfig)} if file.exists() else {}
    before = len(known)
    found = []
    for problem in problems:
        entry = known.get(_text(problem.key())) or measured(problem, device)
        if entry is not None:
            known[_text(entry.problem)] = entry
            found.append(entry)
    if len(known) > before:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = config.table_text(list(known.values()), {"device": _name_of(device)})
        archive.write_whole(file, text.encode())
    return found


def _text(key: Mapping) -> str:
    return str(sorted(key.items()))


def _folder(device: torch.device) -> Path:
    """Return the folder of this device's measurements: they hold for its driver, these kernels and this torch."""
    sources = b"".join(path.read_bytes() for path in sorted(archive.SOURCES.glob("*.py")))
    driver = _C.launch.driver()["version"]
    versions = f"{driver} {torch.__version__} {launch.language.VERSION}".encode()
    name = re.sub(r"[^a-z0-9]+", "-", _name_of(device).lower()).strip("-")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "weft" / "tuned" / f"{name}-{hashlib.sha256(sources + versions).hexdigest()[:16]}"


def _name_of(device: torch.device) -> str:
    """Return the name of the device that computes, "" if none of weft's kernels runs on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "interpreter" if kernel_choice.on_kernel(device) else ""
