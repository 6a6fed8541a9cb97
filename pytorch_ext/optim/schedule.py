"""The learning rate that goes with a batch (Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2)."""

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def linear_scaling(
    optimizer: Optimizer,
    *,
    batch: int,
    base_batch: int,
    warmup_steps: int,
    decay: Callable[[int], float] | None = None,
    last_epoch: int = -1,
) -> LambdaLR:
    """Multiplies the rates that the optimizer has by k = batch / base_batch, from 1 to k over the first steps.

        rate(t) = base * (1 + (k - 1) * t / warmup_steps)       for t < warmup_steps
        rate(t) = base * k * decay(t)                           after

    Args:
        optimizer: with the rate that suits base_batch.
        batch: examples in a step, of all ranks together.
        warmup_steps: of the optimizer; in the paper 5 epochs.
        decay: from a step to a factor; None is 1.
        last_epoch: as of torch's schedules.

    Returns:
        A LambdaLR: call its step() after each optimizer.step(). Where the momentum does not have the rate inside
        (torch's SGD), a sudden change of the rate is a change of the momentum too (section 3, remark 2).

    Raises:
        ValueError: a batch less than 1, or warmup_steps less than 0.
    """
    if batch < 1 or base_batch < 1 or warmup_steps < 0:
        raise ValueError(
            f"linear_scaling: batch={batch} and base_batch={base_batch} must be at least 1, and "
            f"warmup_steps={warmup_steps} at least 0"
        )
    scale = batch / base_batch

    def factor(step: int) -> float:
        if step < warmup_steps:
            return 1 + (scale - 1) * step / warmup_steps
        return scale if decay is None else scale * decay(step)

    return LambdaLR(optimizer, factor, last_epoch)
