"""The grouping of layers into contiguous parts whose largest cost is as small as possible."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import nn

from weft.pipeline.layer_graph import Chain

ROUNDS = 3  # of timing; the fastest round counts


def balanced(costs: Sequence[Sequence[float]]) -> list[int]:
    """Return the number of costs in each part, in sequence, at least one each.

    The largest sum of a part is as small as possible. Among such cuts, the sums up to each part are as equal as
    possible (least squares), from the front.

    Args:
        costs: for each part all costs as they are there: ranks may differ in speed.

    Raises:
        ValueError: fewer costs than parts.
    """
    n, parts = len(costs[0]), len(costs)
    if parts > n:
        raise ValueError(f"balanced: {n} layers cannot make {parts} parts")
    until = [[0.0, *accumulate(own)] for own in costs]
    # best[k]: (largest sum, sum of squares, sizes) of the first k costs in the parts so far
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for part in range(1, parts + 1):
        reached = {}
        for k in range(part, n - parts + part + 1):
            choices = (
                (max(largest, own), squares + own * own, [*sizes, k - before])
                for before, (largest, squares, sizes) in best.items()
                if before < k
                for own in [until[part - 1][k] - until[part - 1][before]]
            )
            reached[k] = min(choices, key=lambda choice: choice[:2])
        best = reached
    return best[n][2]


def times(chain: Chain, inputs: Sequence[torch.Tensor]) -> list[float]:
    """Return the forward seconds of each layer on these inputs, the fastest of a few rounds."""
    stages = chain.stages([1] * len(chain.layers))
    fastest = [float("inf")] * len(stages)
    with undisturbed(chain.model), torch.no_grad():
        for _ in range(ROUNDS):
            values = tuple(inputs)
            for number, stage in enumerate(stages):
                _synchronize(values)
                start = time.perf_counter()
                values = stage(*values)
                _synchronize(values)
                fastest[number] = min(fastest[number], time.perf_counter() - start)
    return fastest


def _synchronize(values) -> None:
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        torch.cuda.synchronize()


@contextmanager
def undisturbed(*modules: nn.Module) -> Iterator[None]:
    """Restore buffers (a norm's running means) and random numbers after the runs inside."""
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
