"""Reference for data parallelism in one process: the gradients of each rank, summed in the order of ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from weft.testing import reference


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a small model with sizes that no world size and no cache line divides, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.Linear(37, 29), nn.GELU(), nn.Linear(29, 5)).to(dtype)


def batch(step: int, rank: int, rows: int = 4) -> torch.Tensor:
    """Return a rank's inputs for a step of `mlp`."""
    return torch.randn(rows, 13, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def rank_order_gradients(
    model: nn.Module, losses: Sequence[Callable[[nn.Module], torch.Tensor]], op: str = "avg", wire_dtype=None
) -> list[torch.Tensor]:
    """Return each parameter's gradient after ranks with these losses reduce; leave the model's own gradients."""
    before = [parameter.grad for parameter in model.parameters()]
    per_rank = []
    for loss in losses:
        for parameter in model.parameters():
            parameter.grad = None
        loss(model).backward()
        per_rank.append(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]  # unused there
        )
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    average = op == "avg"
    return [reference.fused_sum(list(parts), wire_dtype, average=average) for parts in zip(*per_rank, strict=True)]
