"""Learning rates in proportion to the batch (Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2)."""

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
    """Return a schedule that multiplies the optimizer's rates by k = batch / base_batch after a warmup from 1 to k.

        rate(t) = base * (1 + (k - 1) * t / warmup_steps)       for t < warmup_steps
        rate(t) = base * k * decay(t)                           after

    Args:
        optimizer: optimizer with the rates that suit base_batch.
        batch: examples in a step, over all ranks.
        base_batch: examples in a step for which the optimizer's rates were chosen.
        warmup_steps: optimizer steps from the first rate to the k-fold rate; in the paper 5 epochs.
        decay: function from a step to a factor; None is 1.
        last_epoch: as in torch's schedules.

    Returns:
        A LambdaLR; call its step() after each optimizer.step(). If the momentum does not have the rate inside (torch's
        SGD), a sudden change of the rate also changes the momentum (section 3, remark 2).

    Raises:
        ValueError: a batch is less than 1, or warmup_steps is less than 0.

    Examples:
        >>> optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
        >>> schedule = weft.linear_scaling(optimizer, batch=1024, base_batch=256, warmup_steps=4)
        >>> rates = []
        >>> for _ in range(6):
        ...     optimizer.step()
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
        ...     schedule.step()
        >>> rates
        [0.1, 0.175, 0.25, 0.325, 0.4, 0.4]
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
