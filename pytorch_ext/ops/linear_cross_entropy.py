"""A linear layer and the cross entropy of its outputs in one op, which holds the logits of a few classes at a time."""

from itertools import pairwise

import torch

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.ops import matmul
from weft.ops.autocast import cast_operands, without_autocast
from weft.ops.backward import as_matrix, first_order
from weft.ops.cross_entropy import check_options, check_targets, gradient_, merged_losses, part_statistics

_CHUNK_BYTES = 1 << 26  # of logits that exist at a time
_LEAST_CLASSES = 1024  # of a chunk: a product with fewer would spend its time on reading x


def parallel_linear_cross_entropy(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    bias_shard: torch.Tensor | None = None,
    *,
    group: Group = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross entropy of x @ weight.T + bias, with one shard of the vocabulary on each rank.

    The logits are computed for some classes at a time, and again in backward. So the memory of the loss does not grow
    with the vocabulary; the price is one more product of the layer.

    If the weight has an attribute `main_grad` (fp32, of the weight's shape), backward adds the gradient to that in
    fp32. The weight's `.grad` then stays None.

    Args:
        x: [..., K], the same on every rank.
        weight_shard: [V_r, K]: this rank's contiguous part of the classes, in rank order.
        target: [...] int64, class numbers in the whole vocabulary; the same on every rank.
        bias_shard: [V_r].
        group: the ranks that hold the shards.
        ignore_index: a target with no loss and no gradient.
        label_smoothing: share of the uniform distribution over the whole vocabulary in the target, 0 to 1.
        reduction: "mean" (over targets that are not ignored), "sum" or "none".

    Returns:
        A scalar, or [...] for "none", in fp32 (fp64 for fp64 operands); the same on every rank.

    Raises:
        ValueError, TypeError: an invalid argument. Raised before any communication.
        IndexError: a target out of range; raised on every rank. On a GPU the device raises a RuntimeError.

    Examples:
        >>> hidden, target = torch.randn(4, 16), torch.tensor([1, 9, 0, 5])
        >>> head = weft.ColumnParallelLinear(16, 10)
        >>> loss = weft.parallel_linear_cross_entropy(hidden, head.weight, target, head.bias)
        >>> torch.allclose(loss, weft.parallel_cross_entropy(head(hidden), target))
        True
    """
    options = ignore_index, float(label_smoothing), reduction
    return _applied(x, weight_shard, bias_shard, target, communicator(group), *options)


def fused_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross entropy of x @ weight.T + bias on one device, from a whole weight [V, K].

    Arguments are those of `parallel_linear_cross_entropy`.
    """
    return _applied(x, weight, bias, target, None, ignore_index, float(label_smoothing), reduction)


def _applied(x, weight, bias, target, ranks, ignore_index, smoothing, reduction) -> torch.Tensor:
    check_options(target, smoothing, reduction)
    main_grad = getattr(weight, "main_grad", None)
    x, weight, bias = cast_operands(x, weight, bias)
    if x.dtype != weight.dtype or x.size(-1) != weight.size(1) or x.shape[:-1] != target.shape:
        raise ValueError(
            f"linear_cross_entropy: x is {x.dtype} {tuple(x.shape)}, the weight {weight.dtype} {tuple(weight.shape)} "
            f"and the target {tuple(target.shape)}; they must be [..., K], [V_r, K] of the same type, and [...]"
        )
    with without_autocast(x.device.type):
        loss = LinearCrossEntropyFunction.apply(
            as_matrix(x), weight, bias, target.reshape(-1), ranks, ignore_index, smoothing, reduction, main_grad
        )
    return loss.view(target.shape) if reduction == "none" else loss


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss of z = x @ w.T + b; its mathematics is in ParallelCrossEntropyFunction.

    Per rank, with M tokens, K inputs, V classes:
        x [M, K] whole        w_shard_v [V_r, K]        b_shard_v [V_r]        target [M] whole        loss [M] whole

    The rank's classes are cut into chunks c, one after another; z_c [M, V_c] exists for one chunk at a time.

    forward   z_c = x @ w_c.T + b_c and its statistics; those of all chunks of all ranks in one all_gather
    backward  z_c once more; dz_c over it;   dw_c = dz_c.T @ x,   db_c = dz_c.sum(0)
              dx = all_reduce(sum over c of dz_c @ w_c), summed in fp32 on each rank

    Saves x, w_shard_v, b_shard_v, the target, and h and l [M].
    """

    @staticmethod
    def forward(
        ctx, x, weight, bias, target, ranks: Communicator | None, ignore_index, smoothing, reduction, main_grad
    ):
        sizes, rank = [weight.size(0)], 0
        if ranks is not None:
            sizes, rank = ranks.all_sizes(weight, 0), ranks.rank
        vocabulary, offset = sum(sizes), sum(sizes[:rank])
        each = [_chunks(classes, len(x), x.element_size()) for classes in sizes]
        statistics = torch.stack(
            [
                part_statistics(
                    _logits(x, weight, bias, start, stop), target, offset + start, ignore_index, smoothing > 0
                )
                for start, stop in each[rank]
            ]
        )
        if ranks is not None:
            statistics = ranks.all_gather(statistics, 0, [len(chunks) for chunks in each])
        arguments = vocabulary, ignore_index, smoothing
        losses, highest, log_sum, loss, count, valid = merged_losses(
            statistics, target, *arguments, reduction == "mean"
        )
        check_targets(target, ignore_index, vocabulary, valid)
        ctx.save_for_backward(x, weight, bias, target, highest, log_sum, count if reduction == "mean" else None)
        ctx.chunks, ctx.ranks, ctx.main_grad = each[rank], ranks, main_grad
        ctx.offset, ctx.arguments = offset, arguments
        return losses if reduction == "none" else loss

    @staticmethod
    @first_order
    def backward(ctx, dloss):
        x, weight, bias, target, highest, log_sum, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dlosses = (dloss if count is None else dloss / count).expand(len(target))
        dx = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if needs_x else None
        dw, main_grad = None, ctx.main_grad if needs_weight else None
        if main_grad is not None:
            matmul.check_main_grad(main_grad, tuple(weight.shape))
        elif needs_weight:
            dw = torch.empty_like(weight)
        db = torch.empty_like(bias) if needs_bias else None
        for start, stop in ctx.chunks:
            dz = _logits(x, weight, bias, start, stop)
            gradient_(dz, target, highest, log_sum, dlosses, ctx.offset + start, *ctx.arguments)
            if dx is not None:
                matmul.accumulate_operator(dz, weight[start:stop], dx)
            if dw is not None:
                dw[start:stop] = matmul.linear_wgrad_operator(dz, x)
            elif main_grad is not None:
                matmul.accumulate_operator(dz.t(), x, main_grad[start:stop])
            if db is not None:
                torch.sum(dz, 0, out=db[start:stop])
        if dx is not None:
            dx = dx.to(x.dtype)
            if ctx.ranks is not None:
                ctx.ranks.all_reduce_(dx)
        return dx, dw, db, None, None, None, None, None, None


def _chunks(classes: int, tokens: int, element_bytes: int) -> list[tuple[int, int]]:
    """Return the first and last class of each chunk of a shard; every rank computes the same for every shard."""
    size = max(_LEAST_CLASSES, _CHUNK_BYTES // (max(tokens, 1) * element_bytes) // 128 * 128)
    return list(pairwise([*range(0, classes, size), classes])) or [(0, 0)]


def _logits(x, weight, bias, start: int, stop: int) -> torch.Tensor:
    return matmul.linear_operator(x, weight[start:stop], None if bias is None else bias[start:stop], None)[0]
