"""A training step of torch's DistributedDataParallel over weft and over gloo."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft.bench.measure import alternate

LAYERS, WIDTH, ROWS_PER_RANK = 12, 1024, 4
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
RTOL, ATOL = 1e-4, 1e-7  # for gradients: the two backends sum in different orders


def measure(rank: int, rounds: int, calls: int) -> tuple[dict[str, list[float]], int]:
    """Return microseconds a step (weft, gloo, no communication), and the number of differing gradient elements."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    torch.manual_seed(1 + rank)
    batch = torch.randn(ROWS_PER_RANK, WIDTH)
    ours = DistributedDataParallel(copy.deepcopy(layers))
    theirs = DistributedDataParallel(copy.deepcopy(layers), process_group=dist.new_group(backend="gloo"))

    def step(model: DistributedDataParallel) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(batch).square().mean().backward()

    def step_alone() -> None:
        with ours.no_sync():
            step(ours)

    step(ours)
    step(theirs)
    wrong = 0
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        wrong += int((~torch.isclose(a.grad, b.grad, rtol=RTOL, atol=ATOL)).sum())
    contenders = {"ordinary": lambda: step(ours), "gloo": lambda: step(theirs), "limit": step_alone}
    return alternate(contenders, meet=dist.barrier, rounds=rounds, calls=calls), wrong
