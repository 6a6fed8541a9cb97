"""Kernel or library: which of the two a matrix product takes, and why.

A product takes our kernel where a tuned table (`weft tune matmul`) has it measured on this architecture, at these sizes
within a factor of two, and at least as fast as the library's op with a separate epilogue. Everything else is the
library's: on the CPU, where our kernels do not run, and wherever nothing was measured.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.kernels.matmul_tiles import Problem

_PREFERENCES = ("auto", "kernel", "library")


@dataclass(frozen=True)
class Algorithm:
    """What runs, and why."""

    kernel: bool
    reason: str

    def __str__(self) -> str:
        return f"{'weft kernel' if self.kernel else 'ATen'}: {self.reason}"


_ON_CPU = Algorithm(False, "the kernels run on CUDA devices, the tensors are on the CPU")
_NO_TRITON = Algorithm(False, "triton is not installed (pip install weft[gpu])")
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_WANTED = Algorithm(True, "preferred by the caller")
_UNWANTED = Algorithm(False, "preferred by the caller")


def _checked(preference: str) -> str:
    if preference not in _PREFERENCES:
        raise ValueError(f"WEFT_KERNELS={preference!r} is not one of {', '.join(_PREFERENCES)}")
    return preference


_preference = _checked(os.environ.get("WEFT_KERNELS", "auto"))


@contextlib.contextmanager
def prefer(preference: str) -> Iterator[None]:
    """Inside, "kernel" or "library" runs whatever the tables say; "auto" is the default, or what WEFT_KERNELS says.

    Every rank must prefer the same: the two round differently.
    """
    global _preference
    before, _preference = _preference, _checked(preference)
    try:
        yield
    finally:
        _preference = before


def on_kernel(device: torch.device) -> bool:
    """Whether a product on this device may take our kernel at all: the quick question, which needs no triton."""
    return _preference == "kernel" or (device.type == "cuda" and _preference == "auto" and _HAS_TRITON)


def can_run(device: torch.device) -> bool:
    """Whether our kernels run on this device, wanted or not: on a GPU, and on the CPU in Triton's interpreter."""
    if device.type == "cuda" or not _HAS_TRITON:
        return _HAS_TRITON
    from weft.kernels import launch

    return launch.INTERPRETED


def streams(tensor: torch.Tensor) -> bool:
    """Whether a kernel bound by memory takes this tensor: on every GPU, since it passes once over what ATen's operators
    pass over several times, and for every type but fp64, which our kernels do not have."""
    return on_kernel(tensor.device) and tensor.dtype != torch.float64


def excluded(device: torch.device) -> Algorithm:
    """Why no product on this device takes our kernel, where `on_kernel` says so."""
    if _preference == "library":
        return _UNWANTED
    return _NO_TRITON if device.type == "cuda" else _ON_CPU


def algorithm(problem: "Problem", device: torch.device) -> Algorithm:
    """What runs this product on this device."""
    if not on_kernel(device):
        return excluded(device)
    return _WANTED if _preference == "kernel" else _measured(problem, device)


@lru_cache(maxsize=4096)
def _measured(problem: "Problem", device: torch.device) -> Algorithm:
    from weft.kernels import launch
    from weft.kernels.matmul_tiles import choose_tile

    if problem.dtype not in launch.DTYPES:
        return Algorithm(False, f"the kernel does not take {problem.dtype}")
    entry = choose_tile(problem, device).entry
    architecture = launch.architecture_of(device)
    if entry is None:
        return Algorithm(False, f"not measured at this size on {architecture}; `weft tune matmul` measures it")
    ratio = entry.peer_us / entry.ours_us
    sizes = "x".join(str(entry.problem[name]) for name in "mnk")
    return Algorithm(ratio >= 1.0, f"the kernel has {ratio:.2f} times ATen's speed at {sizes} on {architecture}")
