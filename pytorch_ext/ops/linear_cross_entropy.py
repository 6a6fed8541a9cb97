"""A linear layer and the cross entropy of its outputs in one op, whose logits take no more memory than it needs anyway.

Whole logits cost nothing while they are no larger than the fp32 sum of dw that chunks need: at most 2K tokens in bf16.
More tokens are cut into chunks, and each chunk reads and writes that sum: 4 bytes for each element of the weight.
"""

import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.ops import matmul
from weft.ops.autocast import cast_operands, without_autocast
from weft.ops.backward import as_matrix, first_order
from weft.ops.cross_entropy import (
    check_options,
    check_targets,
    compare_first_call,
    gradient_,
    merged_losses,
    part_statistics,
)

_CHUNK_BYTES = 1 << 26  # of logits that exist at a time
_KEEPS_LOGITS = True  # all of them where they fit; the bench has the chunks beside that
_waiting = WeakIdKeyDictionary()  # weights, each with a weak reference to what waits for a loss's backward
_LEAST_TOKENS, _MOST_LEAST_TOKENS = 1024, 4096  # of a chunk: with fewer it would spend its time on the sum of dw


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

    The logits of up to 2K tokens (K in fp32) are kept for backward, which overwrites them with their gradient: they
    take no more memory than dw in fp32. Of more tokens, the logits of 1024 to 4096 exist at a time. Forward then
    computes the gradients of a reduced loss as well; until backward they take fp32 memory of the sizes of x and of the
    weight. Backward computes the logits once more where neither is possible: for "none" and fp16 in chunks, and while
    an earlier loss of the same weight waits for its backward.

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
    compare_first_call(ranks, target)
    main_grad, parameter = getattr(weight, "main_grad", None), weight
    x, weight, bias = cast_operands(x, weight, bias)
    if x.dtype != weight.dtype or x.size(-1) != weight.size(1) or x.shape[:-1] != target.shape:
        raise ValueError(
            f"linear_cross_entropy: x is {x.dtype} {tuple(x.shape)}, the weight {weight.dtype} {tuple(weight.shape)} "
            f"and the target {tuple(target.shape)}; they must be [..., K], [V_r, K] of the same type, and [...]"
        )
    # Not whether anything waits: ranks must agree on the chunks.
    trains = torch.is_grad_enabled() and weight.requires_grad
    fits = target.numel() * x.element_size() <= weight.size(1) * _wide(x.dtype).itemsize
    one_chunk = _KEEPS_LOGITS and trains and fits
    ahead = one_chunk or (torch.is_grad_enabled() and reduction != "none" and x.dtype != torch.float16)
    token = None
    if ahead and weight.requires_grad and not torch.compiler.is_compiling():
        earlier = _waiting.get(parameter)
        ahead = earlier is None or earlier() is None
        if ahead:
            token = _Waiting()
            _waiting[parameter] = weakref.ref(token)
    needs = tuple(
        ahead and not one_chunk and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    )
    with without_autocast(x.device.type):
        loss = LinearCrossEntropyFunction.apply(
            *(as_matrix(x), weight, bias, target.reshape(-1), ranks, ignore_index, smoothing, reduction, main_grad),
            *(needs, token, trains, one_chunk, one_chunk and ahead),
        )
    return loss.view(target.shape) if reduction == "none" else loss


class _Waiting:
    """Lives as long as logits or gradients of a loss wait for backward. Those of one loss of a weight do at a time."""


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss of z = x @ w.T + b; its mathematics is in ParallelCrossEntropyFunction.

    Per rank, with M tokens, K inputs, V classes:
        x [M, K] whole        w_shard_v [V_r, K]        b_shard_v [V_r]        target [M] whole        loss [M] whole

    The tokens are cut into chunks c, one after another; z_c [M_c, V_r] exists for one chunk at a time. A whole z is one
    chunk; it is kept, and what follows for "gradients" happens in backward, with the loss's gradient, without sums.

    forward   z_c = x_c @ w.T + b and its statistics; those of all ranks in one all_gather for each chunk
    gradients dz_c over z_c;   dx_c = dz_c @ w,   dw = sum over c of dz_c.T @ x_c,   db = sum over c of dz_c.sum(0),
              in fp32: in forward, for a loss of 1, where the loss is reduced (Hsu et al. 2024), else in backward, after
              z_c once more
    backward  each times the gradient of the loss, and rounded;   dx = all_reduce(dx)

    Saves x, w_shard_v, b_shard_v, the target, and h and l [M], with a whole z; or dx, dw and db. Backward overwrites z:
    a second backward computes it again.
    """

    @staticmethod
    def forward(
        ctx, x, weight, bias, target, ranks: Communicator | None, ignore_index, smoothing, reduction, main_grad, needs,
        token, trains, one_chunk, keeps_logits,
    ):  # fmt: skip
        sizes, rank = [weight.size(0)], 0
        if ranks is not None:
            sizes, rank = ranks.all_sizes(weight, 0), ranks.rank
        arguments = sum(sizes[:rank]), sum(sizes), ignore_index, smoothing
        ctx.chunks = [slice(0, len(x))] if one_chunk else _chunks(x, max(sizes), trains)
        sums = _GradientSums(x, weight, bias, needs) if any(needs) else None
        each = []
        for rows in ctx.chunks:
            z = _logits(x[rows], weight, bias)
            statistics = part_statistics(z, target[rows], arguments[0], ignore_index, smoothing > 0).unsqueeze(0)
            if ranks is not None:
                statistics = ranks.all_gather(statistics, 0, [1] * ranks.world_size)
            each.append(merged_losses(statistics, target[rows], *arguments[1:], False))
            if sums is not None:
                _, highest, log_sum, *_ = each[-1]
                gradient_(z, target[rows], highest, log_sum, torch.ones_like(highest), *arguments)
                sums.add(rows, z, x, weight)
        losses, highest, log_sum, loss, count, valid = each[0] if len(each) == 1 else _joined(each)
        check_targets(target, ignore_index, arguments[1], valid)
        ctx.ranks, ctx.main_grad, ctx.arguments = ranks, main_grad, arguments
        ctx.token, ctx.one_chunk, ctx.has_logits = token, one_chunk, keeps_logits
        ctx.at_once, ctx.dtypes = sums is not None, [None if t is None else t.dtype for t in (x, weight, bias)]
        mean = count if reduction == "mean" else None
        loss = loss if mean is None else loss / count
        if sums is not None:
            ctx.save_for_backward(mean, *sums.of_all)
        else:
            ctx.save_for_backward(mean, x, weight, bias, target, highest, log_sum, z if keeps_logits else None)
        return losses if reduction == "none" else loss

    @staticmethod
    @first_order
    def backward(ctx, dloss):
        count, *saved = ctx.saved_tensors
        ctx.token = None
        scale = dloss if count is None else (dloss / count).masked_fill(count == 0, 0)
        if ctx.at_once:
            dx, dw, db = saved
        else:
            x, weight, bias, *of_rows, kept = saved
            of_rows, scale = [*of_rows, scale.expand(len(of_rows[0]))], None
            sums = None if ctx.one_chunk else _GradientSums(x, weight, bias, ctx.needs_input_grad)
            for rows in ctx.chunks:
                # .data has a version of its own: another backward may ask for what is saved.
                z = kept.data if ctx.has_logits else _logits(x[rows], weight, bias)
                ctx.has_logits = False
                gradient_(z, *(t[rows] for t in of_rows), *ctx.arguments)
                if sums is not None:
                    sums.add(rows, z, x, weight)
            dx, dw, db = _gradients(z, x, weight, ctx) if sums is None else sums.of_all
        if ctx.main_grad is not None and dw is not None:
            matmul.check_main_grad(ctx.main_grad, tuple(dw.shape))
            ctx.main_grad.add_(dw) if scale is None else ctx.main_grad.addcmul_(dw, scale)
            dw = None
        dx, dw, db = (
            None if t is None else _scaled(t, scale, dtype) for t, dtype in zip((dx, dw, db), ctx.dtypes, strict=True)
        )
        if dx is not None and ctx.ranks is not None:
            ctx.ranks.all_reduce_(dx)
        return dx, dw, db, *[None] * 11


def _gradients(dz, x, weight, ctx) -> tuple:
    """Return dx, dw and db of all tokens, None if not needed; dw is None where it was added to a main_grad."""
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    dx = matmul.linear_dgrad_operator(dz, weight) if needs_x else None
    dw = None
    if needs_weight and ctx.main_grad is not None:
        matmul.check_main_grad(ctx.main_grad, tuple(weight.shape))
        _accumulate(dz.t(), x, ctx.main_grad)
    elif needs_weight:
        dw = matmul.linear_wgrad_operator(dz, x)
    return dx, dw, matmul.column_sums(dz) if needs_bias else None


def _joined(each: list) -> list[torch.Tensor]:
    """Return the losses, h and l of all chunks, the sum of losses, the number of targets, and if all are valid."""
    *of_rows, sums, counts, valid = zip(*each, strict=True)
    return [*map(torch.cat, of_rows), torch.stack(sums).sum(), torch.stack(counts).sum(), torch.stack(valid).amin()]


class _GradientSums:
    """Sums of the gradients of x, weight and bias over the chunks, in fp32 (fp64 for fp64); None if not needed."""

    def __init__(self, x, weight, bias, needs):
        self.of_all = tuple(
            torch.zeros_like(t, dtype=_wide(x.dtype)) if needed else None
            for t, needed in zip((x, weight, bias), needs[:3], strict=True)
        )

    def add(self, rows: slice, dz, x, weight) -> None:
        dx, dw, db = self.of_all
        if dx is not None:
            _accumulate(dz, weight, dx[rows])
        if dw is not None:
            _accumulate(dz.t(), x[rows], dw)
        if db is not None:
            db += dz.sum(0, dtype=db.dtype)


def _scaled(total, scale, dtype) -> torch.Tensor:
    """Return total * scale, rounded once; scale None is 1."""
    if scale is None:
        return total.to(dtype)
    return torch.mul(total, scale, out=torch.empty_like(total, dtype=dtype))


def _accumulate(a, b, total) -> None:
    """Add a @ b to total; on a CPU rounded to a's type first, since products in fp32 take it three times as long."""
    if total.device.type == "cpu" and a.dtype != total.dtype:
        total += a @ b
    else:
        matmul.accumulate_operator(a, b, total)


def _chunks(x: torch.Tensor, classes: int, trains: bool) -> list[slice]:
    """Return the tokens of each chunk; the same on every rank, for the largest shard of the classes.

    A chunk of a weight that trains has 4096 tokens or more, if its logits are then no larger than the sum of dw.
    """
    (tokens, features), bytes_each = x.shape, x.element_size()
    as_many_bytes = features * _wide(x.dtype).itemsize // bytes_each
    least = min(max(_LEAST_TOKENS, as_many_bytes), _MOST_LEAST_TOKENS) if trains else _LEAST_TOKENS
    size = max(least, _CHUNK_BYTES // (max(classes, 1) * bytes_each) // 128 * 128)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)] or [slice(0, 0)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(x, weight, bias) -> torch.Tensor:
    return matmul.linear_operator(x, weight, bias, None)[0]
