"""Cross entropy over logits whose vocabulary is split over ranks, without gathering them."""

import torch

from weft.comm.communicator import Communicator, communicator
from weft.ops.backward import first_order

_REDUCTIONS = ("mean", "sum", "none")


def parallel_cross_entropy(
    logits_shard: torch.Tensor,
    target: torch.Tensor,
    *,
    group=None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of logits of which each rank holds a shard of the vocabulary.

    Args:
        logits_shard: [..., V_r], floating point: this rank's contiguous part of the V logits, in rank order.
        target: [...] int64, the same on every rank; numbers in the whole vocabulary.
        group: the ranks that hold the shards.
        label_smoothing: mixes in the uniform distribution over the whole vocabulary (Szegedy et al. 2016, section 7).
        reduction: "mean" (over targets that are not ignored), "sum" or "none".

    Returns:
        A scalar, or [...] for "none", in fp32 (fp64 for fp64 logits); the same on every rank.

    Raises:
        ValueError, TypeError, IndexError: before anything is communicated but the sizes of the shards.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not one of {', '.join(_REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
    if not logits_shard.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits_shard.dtype}")
    if target.dtype != torch.int64:
        raise TypeError(
            f"target must hold class numbers (int64), got {target.dtype}; class probabilities are not taken"
        )
    if logits_shard.shape[:-1] != target.shape:
        raise ValueError(
            f"logits_shard has shape {tuple(logits_shard.shape)} and target {tuple(target.shape)}; "
            "they must be [..., V_r] and [...]"
        )
    losses = ParallelCrossEntropyFunction.apply(
        logits_shard.reshape(-1, logits_shard.size(-1)),
        target.reshape(-1),
        communicator(group),
        ignore_index,
        float(label_smoothing),
    )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class ParallelCrossEntropyFunction(torch.autograd.Function):
    """loss = l + (1 - s) (h - z[target]) + s (h - mean(z)), with smoothing s, and h = max z and l = log sum exp(z - h)
    over the whole vocabulary. They are kept apart: their sum would round away what a large h leaves of l.

    Per rank, with M tokens, V classes: z_shard_v [M, V_r]        target [M] whole        loss [M] whole

    forward   each rank: its maximum, its sum of exponentials against that maximum, its sum of logits, and the target's
              logit where it has it; [4, M] in fp32, exchanged in one all_gather and merged in rank order
    backward  dz_shard_v = (exp(z_shard_v - h - l) - (1 - s) onehot - s / V) dloss; nothing travels

    Saves z_shard_v, the target, and h and l [M].
    """

    @staticmethod
    def forward(ctx, logits, target, communicator: Communicator, ignore_index, smoothing):
        sizes = communicator.all_sizes(logits, -1)
        vocabulary, offset = sum(sizes), sum(sizes[: communicator.rank])
        ignored = target == ignore_index
        _check_targets(target.masked_select(~ignored), vocabulary)

        wide = logits.to(_wide(logits.dtype))
        local, here = _local_targets(target, ignored, offset, logits.size(-1))
        statistics = wide.new_empty(4, len(target))
        highest, exponentials, total, at_target = statistics.unbind(0)
        torch.amax(wide, -1, out=highest)
        torch.sum(_shifted(wide, highest).exp_(), -1, out=exponentials)
        torch.sum(wide, -1, out=total) if smoothing else total.zero_()
        at_target.copy_(wide.gather(-1, local.unsqueeze(-1)).squeeze(-1)).masked_fill_(~here, 0)

        ranks = communicator.all_gather(statistics.unsqueeze(0), 0, [1] * communicator.world)
        highest = ranks[:, 0].amax(0)
        exponentials = _sum_in_rank_order(ranks[:, 1] * _shifted(ranks[:, 0].t(), highest).t().exp())
        log_sum = exponentials.log()
        losses = log_sum + (1 - smoothing) * (highest - _sum_in_rank_order(ranks[:, 3]))
        if smoothing:
            losses += smoothing * (highest - _sum_in_rank_order(ranks[:, 2]) / vocabulary)
        ctx.save_for_backward(logits, target, highest, log_sum)
        ctx.offset, ctx.vocabulary, ctx.ignore_index, ctx.smoothing = offset, vocabulary, ignore_index, smoothing
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    @first_order
    def backward(ctx, dlosses):
        logits, target, highest, log_sum = ctx.saved_tensors
        ignored = target == ctx.ignore_index
        local, here = _local_targets(target, ignored, ctx.offset, logits.size(-1))
        dlogits = _shifted(logits.to(highest.dtype), highest).sub_(log_sum.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            dlogits -= ctx.smoothing / ctx.vocabulary
        hit = here.to(dlogits.dtype) * (1 - ctx.smoothing)
        dlogits.scatter_add_(-1, local.unsqueeze(-1), -hit.unsqueeze(-1))
        dlogits *= dlosses.masked_fill(ignored, 0).unsqueeze(-1)
        return dlogits.to(logits.dtype), None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shifted(z: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """z - by, row by row. A row of which every logit is -inf stays -inf and does not become NaN."""
    return z - by.masked_fill(by == -torch.inf, 0).unsqueeze(-1)


def _sum_in_rank_order(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _local_targets(target, ignored, offset, size):
    """Class numbers in this rank's shard (0 where the class is elsewhere), and the mask of those that are here."""
    local = target - offset
    here = (local >= 0) & (local < size) & ~ignored
    return local.masked_fill(~here, 0), here


def _check_targets(counted: torch.Tensor, vocabulary: int) -> None:
    if counted.numel() == 0:
        return
    lowest, highest = torch.aminmax(counted)
    if lowest < 0 or highest >= vocabulary:
        raise IndexError(
            f"targets span {int(lowest)} to {int(highest)}; they must lie in 0 to {vocabulary - 1} or be ignore_index"
        )
