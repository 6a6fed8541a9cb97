"""The variants of every op, and a function to run work on each of them on all processor cores."""

import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import TypeVar

from weft.kernels import launch, signature

OPS = (
    "matmul",
    "attention",
    "cross_entropy",
    "bucket",
    "signal",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "all_reduce",
    "grouped_matmul",
    "permute",
    "topk_gating",
)
COMMUNICATING = ("signal", "all_gather_matmul", "matmul_reduce_scatter", "all_reduce")
Place = tuple[str, str, int]  # an op, an architecture, and the variant's number there
T = TypeVar("T")


@lru_cache
def record(op: str, architecture: str) -> list[launch.Launch]:
    """Return the launches of the op's variants, one for each.

    Args:
        op: one of OPS, or the name of another module with a function `variants(architecture)`.
    """
    module = importlib.import_module(f"weft.kernels.{op}" if op in OPS else op)
    with launch.recording(architecture) as launches:
        module.variants(architecture)
    return list({variant_of(recorded): recorded for recorded in launches}.values())


def communicating(architecture: str) -> list[launch.Launch]:
    """Return the launches of all kernels that wait for other ranks or run between such waits."""
    return [recorded for op in COMMUNICATING for recorded in record(op, architecture)]


def variant_of(recorded: launch.Launch) -> tuple:
    """Return a key that is equal for launches with the same machine code."""
    return id(recorded.kernel), repr(signature.specialise(recorded)), recorded.warps, recorded.stages


def places(ops: Sequence[str], architectures: Sequence[str]) -> list[Place]:
    return [
        (op, architecture, number)
        for op in ops
        for architecture in architectures
        for number in range(len(record(op, architecture)))
    ]


def on_each(work: Callable[[str, str, int], T], where: Sequence[Place], processes: int | None = None) -> list[T]:
    """Run `work` for each place in a pool of processes; return the results in order."""
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(work, *zip(*where, strict=True))) if where else []
