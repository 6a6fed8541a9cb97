"""Choice between weft's kernel and the library, with the reason.

A product of matrices, grouped or not, and attention that torch has too, take the kernel where a table (`weft tune`; for
matrices also `weft.warm_up`) has a measurement of it on this architecture, with sizes within a factor of two, and where
the kernel was at least as fast as the library's op with a separate epilogue.
The library runs everything else that it has: on the CPU, where weft's kernels do not run, and without a measurement.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from weft.arguments import check_choice

if TYPE_CHECKING:
    from weft.kernels.attention_tiles import AttentionProblem
    from weft.kernels.config import Entry
    from weft.kernels.grouped_matmul import GroupedProblem
    from weft.kernels.launch import Origin
    from weft.kernels.matmul_tiles import Problem
    from weft.ops.attention_blocks import AttentionChunk

_PREFERENCES = ("auto", "kernel", "library")


@dataclass(frozen=True)
class Algorithm:
    """The implementation that runs, and the reason."""

    kernel: bool
    reason: str

    def __str__(self) -> str:
        return f"{'weft kernel' if self.kernel else 'ATen'}: {self.reason}"


_ON_CPU = Algorithm(False, "the kernels run on CUDA devices, the tensors are on the CPU")
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_WANTED = Algorithm(True, "preferred by the caller")
_UNWANTED = Algorithm(False, "preferred by the caller")


def _checked(preference: str) -> str:
    check_choice("WEFT_KERNELS", preference, _PREFERENCES)
    return preference


_preference = _checked(os.environ.get("WEFT_KERNELS", "auto"))


@contextlib.contextmanager
def prefer(preference: str) -> Iterator[None]:
    """Prefer the kernel or the library inside a `with` block.

    Every rank must prefer the same, since the two round differently.

    Args:
        preference: "kernel" or "library", regardless of the tables, or "auto" to follow them. Outside of any block the
            environment variable WEFT_KERNELS gives the preference, "auto" by default.
    """
    global _preference
    before, _preference = _preference, _checked(preference)
    _devices.clear()
    try:
        yield
    finally:
        _preference = before
        _devices.clear()


class _Devices(dict[torch.device, bool]):
    """Whether a product on a device may take weft's kernel at all."""

    def __missing__(self, device: torch.device) -> bool:
        auto = device.type == "cuda" and _preference == "auto"
        self[device] = _preference == "kernel" or (auto and _why_no_code(device) is None)
        return self[device]


_devices = _Devices()
on_kernel = _devices.__getitem__  # no call of a Python function: each product of each layer asks


def can_run(device: torch.device) -> bool:
    """Return True if weft's kernels can run on this device, regardless of the preference.

    They can on a GPU, and on the CPU in Triton's interpreter.
    """
    if device.type == "cuda":
        return _why_no_code(device) is None
    from weft.kernels import launch

    return launch.INTERPRETED


def check_kernels(devices: Iterable[torch.device]) -> None:
    """Raise ValueError, with the reason, if weft's kernels do not run on one of these GPUs; for `strict=True`."""
    for device in devices:
        reason = _why_no_code(device) if device.type == "cuda" and _preference != "library" else None
        if reason is not None:
            raise ValueError(f"parallelize: strict, and weft's kernels do not run on {device}: {reason}")


@lru_cache
def _why_no_code(device: torch.device) -> str | None:
    """Return the reason if a GPU has neither kernels compiled ahead of time nor a compiler for it, else None."""
    from weft.kernels import dispatch, launch

    refusal = launch.why_no_variants(device)
    if refusal is not None or _HAS_TRITON:
        return refusal
    found = dispatch.archive_of(launch.code_architecture(device))
    return f"triton is not installed (pip install weft[gpu]), and {found}" if isinstance(found, str) else None


def streams(tensor: torch.Tensor) -> bool:
    """Return True if a memory-bound kernel takes this tensor.

    It does on every GPU, since it reads once where ATen's operators read several times. It takes every type except
    fp64, which weft's kernels do not have.
    """
    return on_kernel(tensor.device) and tensor.dtype != torch.float64


def excluded(device: torch.device) -> Algorithm:
    """Return the reason why no product on this device takes weft's kernel, for devices where `on_kernel` is False."""
    if _preference == "library":
        return _UNWANTED
    return Algorithm(False, _why_no_code(device) or "") if device.type == "cuda" else _ON_CPU


def algorithm(problem: "Problem", device: torch.device) -> Algorithm:
    """Return the implementation that runs this product on this device."""
    if not on_kernel(device):
        return excluded(device)
    if _asked is not None:
        _asked.add((problem, device))
    return _WANTED if _preference == "kernel" else _measured(problem, device)


_asked: "set[tuple[Problem, torch.device]] | None" = None


@contextlib.contextmanager
def asked() -> "Iterator[set[tuple[Problem, torch.device]]]":
    """Collect the products that are asked for inside a `with` block, with their devices."""
    global _asked
    before, _asked = _asked, set()
    try:
        yield _asked
    finally:
        _asked = before


def attention_algorithm(
    kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: "AttentionChunk"
) -> Algorithm:
    """Choose kernel or torch for attention that torch supports.

    Args:
        kind: "forward" or "backward".
        q, k, v: [B, H, Sq, D], [B, Hkv, Sk, D] and [B, Hkv, Sk, Dv].
    """
    if not on_kernel(q.device):
        return excluded(q.device)
    if _preference == "kernel":
        return _WANTED
    if chunk.library != "deterministic":
        return Algorithm(False, "tables have the time of torch's deterministic function")
    from weft.kernels.attention_tiles import AttentionProblem

    op = "attention_forward" if kind == "forward" else "attention_dkdv"  # its row has the time of the whole backward
    return _by_table(op, AttentionProblem.of(q, k, v, chunk.rules), q.device)


def grouped_algorithm(problem: "GroupedProblem", device: torch.device) -> Algorithm:
    """Return the implementation of a grouped product that torch's grouped_mm computes too."""
    return _WANTED if _preference == "kernel" else _by_table("grouped_matmul", problem, device)


_SIZES = {  # of a table's problems: what a reason names
    "attention_forward": ("queries", "keys"),
    "attention_dkdv": ("queries", "keys"),
    "grouped_matmul": ("rows", "columns", "depth"),
}


@lru_cache(maxsize=4096)
def _by_table(op: str, problem: "AttentionProblem | GroupedProblem", device: torch.device) -> Algorithm:
    from weft.kernels import config, launch

    architecture, kind = launch.architecture_of(device), op.partition("_")[0]
    tiles = config.AttentionConfig if kind == "attention" else config.MatmulConfig
    entry = config.measured(op, architecture, problem.key(), tiles) if _HAS_TRITON else None
    if entry is None:
        return Algorithm(False, f"not measured at this size on {architecture}; `weft tune {kind}` measures it")
    return _faster(entry, f"{'x'.join(str(entry.problem[name]) for name in _SIZES[op])} on {architecture}")


def _faster(entry: "Entry", where: str) -> Algorithm:
    ratio = entry.peer_us / entry.ours_us
    return Algorithm(ratio >= 1.0, f"the kernel has {ratio:.2f} times ATen's speed at {where}")


def forget_choices() -> None:
    """Choose anew, by measurements that were added."""
    _measured.cache_clear()
    _by_table.cache_clear()


@lru_cache(maxsize=4096)
def _measured(problem: "Problem", device: torch.device) -> Algorithm:
    from weft.kernels import launch
    from weft.kernels.matmul_tiles import choose_tile

    if problem.dtype not in launch.DTYPES:
        return Algorithm(False, f"the kernel does not take {problem.dtype}")
    entry = choose_tile(problem, device).entry
    architecture = launch.architecture_of(device)
    if entry is None:
        return Algorithm(False, f"not measured at this size on {architecture}; `weft.warm_up` measures it")
    if not _HAS_TRITON:
        code = origin(problem, launch.code_architecture(device))
        if code.how == "nowhere":
            return Algorithm(False, code.why)
    sizes = "x".join(str(entry.problem[name]) for name in "mnk")
    return _faster(entry, f"{sizes} on {architecture}")


def origin(problem: "Problem", architecture: str) -> "Origin":
    """Return the origin of the kernel's machine code for the product, on a device of that architecture.

    Where the product takes several launches, the first that is not compiled ahead of time decides.
    """
    from weft.kernels import launch
    from weft.kernels.matmul import matmul

    def operand(rows: int, columns: int, turned: bool) -> torch.Tensor:
        shape = (columns, rows) if turned else (rows, columns)
        matrix = torch.empty(shape, dtype=problem.dtype, device="meta")
        return matrix.t() if turned else matrix

    a_turned, b_turned = (letter == "t" for letter in problem.layout)
    a, b = operand(problem.m, problem.k, a_turned), operand(problem.k, problem.n, b_turned)
    name = problem.fused.removesuffix("_gated")
    activation = None if name in ("none", "main_grad") else name
    total = torch.empty(problem.m, problem.n, device="meta") if name == "main_grad" else None
    gated = problem.fused.endswith("_gated")
    with launch.recording(architecture) as launches:
        matmul(
            a,
            b,
            b_up=b if gated else None,
            addend=total,
            out=total,
            activation=activation,
            keep_z=activation is not None,
        )
    origins = [launch.origin(recorded, architecture) for recorded in launches]
    return next((found for found in origins if found.how != "ahead-of-time"), origins[0])
