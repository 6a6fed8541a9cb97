"""The variants of every op, and work on each of them, spread over the processor's cores."""

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
)
Place = tuple[str, str, int]  # an op, an architecture, and the number among its variants there
T = TypeVar("T")


@lru_cache
def record(op: str, architecture: str) -> list[launch.Launch]:
    """The launches of the op's variants, one for each. `op` is one of OPS, or the name of another module with a
    function `variants(architecture)`."""
    module = importlib.import_module(f"weft.kernels.{op}" if op in OPS else op)
    with launch.recording(architecture) as launches:
        module.variants(architecture)
    return list({_variant_of(recorded): recorded for recorded in launches}.values())


def _variant_of(recorded: launch.Launch) -> tuple:
    """The same for two launches that run the same machine code."""
    return id(recorded.kernel), repr(signature.specialise(recorded)), recorded.warps, recorded.stages


def places(ops: Sequence[str], architectures: Sequence[str]) -> list[Place]:
    return [
        (op, architecture, number)
        for op in ops
        for architecture in architectures
        for number in range(len(record(op, architecture)))
    ]


def on_each(work: Callable[[str, str, int], T], where: Sequence[Place], processes: int | None = None) -> list[T]:
    """What `work` gives for each place, in their order."""
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(work, *zip(*where, strict=True))) if where else []
