"""Cross entropy over logits with a vocabulary split over ranks, without gathering the logits."""

import torch

from weft.arguments import check_choice
from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.forward.functions import seen_by_modes
from weft.ops import kernel_choice
from weft.ops.backward import first_order
from weft.ops.invariant import in_own_memory
from weft.ops.library import register
from weft.sharding.bits import mark_of_bits

_REDUCTIONS = ("mean", "sum", "none")


def parallel_cross_entropy(
    logits_shard: torch.Tensor,
    target: torch.Tensor,
    *,
    group: Group = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    overwrite_logits: bool = False,
    invariant: int | None = None,
) -> torch.Tensor:
    """Return torch.nn.functional.cross_entropy of logits with one shard of the vocabulary on each rank.

    Args:
        logits_shard: [..., V_r], floating point: this rank's contiguous part of the V logits, in rank order.
        target: [...] int64, class numbers in the whole vocabulary; the same on every rank.
        group: the ranks that hold the shards.
        ignore_index: a target with no loss and no gradient.
        label_smoothing: share of the uniform distribution over the whole vocabulary in the target, 0 to 1 (Szegedy et
            al. 2016, section 7).
        reduction: "mean" (over targets that are not ignored), "sum" or "none".
        overwrite_logits: backward writes the gradient over the logits, which saves memory of their size. The logits
            must not be read after backward, and a second backward is an error.
        invariant: number of equal units of the vocabulary, which the number of ranks must divide. The loss and its
            gradient then have the same bits on every such number of ranks, one included.

    Returns:
        A scalar, or [...] for "none", in fp32 (fp64 for fp64 logits); the same on every rank.

    Raises:
        ValueError, TypeError: an invalid argument, raised before any communication. Or, in the first call over these
            ranks, the targets differ, or the logits do not; raised on every rank.
        IndexError: a target out of range; raised on every rank.
        RuntimeError: a target out of range on a GPU or under torch.compile. The device raises it, since a check on the
            host would have to wait for the device.

    Examples:
        >>> logits, target = torch.randn(4, 10), torch.tensor([1, 9, 0, 5])
        >>> part = logits.chunk(2, dim=-1)[dist.get_rank()]
        >>> loss = weft.parallel_cross_entropy(part, target)
        >>> torch.allclose(loss, nn.functional.cross_entropy(logits, target))
        True
    """
    _check_logits(logits_shard, target)
    check_options(target, label_smoothing, reduction)
    ranks = communicator(group)
    if invariant is not None:
        options = {"group": ranks, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        options |= {"reduction": reduction, "overwrite_logits": overwrite_logits, "invariant": invariant}
        if (seen := seen_by_modes(parallel_cross_entropy, logits_shard, target, **options)) is not None:
            return seen[0]
        if overwrite_logits:
            raise ValueError("parallel_cross_entropy: overwrite_logits=True is not supported with invariant")
        sizes = ranks.all_sizes(logits_shard, -1)
        if invariant < 1 or invariant % ranks.world_size or sum(sizes) % invariant or len(set(sizes)) > 1:
            raise ValueError(
                f"parallel_cross_entropy: invariant={invariant}: the ranks' {sizes} classes must be that many equal "
                "units, and each rank must have equally many of them"
            )
    return _reduced(logits_shard, target, ranks, ignore_index, label_smoothing, reduction, overwrite_logits, invariant)


def fused_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of whole logits [..., V] on one device; torch.compile traces it without a break.

    Arguments are those of `parallel_cross_entropy`.
    """
    _check_logits(logits, target)
    check_options(target, label_smoothing, reduction)
    return _reduced(logits, target, None, ignore_index, label_smoothing, reduction, overwrite_logits, None)


def check_options(target: torch.Tensor, label_smoothing: float, reduction: str) -> None:
    """Check what the losses of logits and of a linear layer have in common; raise ValueError or TypeError."""
    check_choice("reduction", reduction, _REDUCTIONS)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
    if target.dtype != torch.int64:
        raise TypeError(
            f"target must hold class numbers (int64), got {target.dtype}; class probabilities are not taken"
        )


def compare_first_call(ranks: Communicator | None, target: torch.Tensor, logits: torch.Tensor | None = None) -> None:
    """Check that the ranks have the same targets and parts of the logits, in their first loss. A collective call then.

    Raises:
        ValueError: the targets differ, or the logits do not; raised on every rank.
    """
    if ranks is None or ranks.world_size == 1 or "losses" in ranks.compared or torch.compiler.is_compiling():
        return
    if type(target) is not torch.Tensor or target.is_meta or _captures(target):
        return
    ranks.compared.add("losses")
    if logits is not None and (not logits.numel() or bool((logits == logits.flatten()[0]).all())):
        logits = None  # of one value, which each part may have
    own = [int(mark_of_bits(target)), 0 if logits is None else int(mark_of_bits(logits))]
    where = ranks.device_of_numbers(target.device)
    rows = ranks.all_gather(torch.tensor([own], device=where), 0, [1] * ranks.world_size).tolist()
    for rank, row in zip(ranks.global_ranks, rows, strict=True):
        if row[0] != rows[0][0]:
            raise ValueError(
                f"the targets differ between rank {ranks.global_ranks[0]} and rank {rank}, which have parts of the "
                "same classes: pass the same targets on both"
            )
    if logits is not None and all(row[1] == own[1] for row in rows):
        raise ValueError(
            f"parallel_cross_entropy: the ranks have the same logits, of {logits.size(-1)} classes, and each must have "
            "its part of them: compute F.cross_entropy of whole logits"
        )


def _captures(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_logits(logits: torch.Tensor, target: torch.Tensor) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if logits.shape[:-1] != target.shape and target.dtype == torch.int64:
        raise ValueError(
            f"logits_shard has shape {tuple(logits.shape)} and target {tuple(target.shape)}; "
            "they must be [..., V_r] and [...]"
        )


def _reduced(logits, target, ranks, ignore_index, label_smoothing, reduction, overwrite_logits, units) -> torch.Tensor:
    compare_first_call(ranks, target, logits)
    loss = ParallelCrossEntropyFunction.apply(
        logits.reshape(-1, logits.size(-1)),
        target.reshape(-1),
        ranks,
        ignore_index,
        float(label_smoothing),
        reduction,
        overwrite_logits,
        units,
    )
    return loss.view(target.shape) if reduction == "none" else loss


class ParallelCrossEntropyFunction(torch.autograd.Function):
    """loss = l + (1 - s) (h - z[target]) + s (h - mean(z)), with h = max z, l = log sum exp(z - h) and smoothing s.

    h and l are taken over the whole vocabulary. They stay apart because in their sum a large h would round l away.

    Per rank, with M tokens, V classes: z_shard_v [M, V_r]        target [M] whole        loss [M] whole

    forward   each rank computes its maximum, its sum of exponentials against that maximum, its sum of logits, and the
              target's logit if it has it: [4, M] in fp32, exchanged in one all_gather and merged in rank order
    backward  dz_shard_v = (exp(z_shard_v - h - l) - (1 - s) onehot - s / V) dloss; nothing travels

    Saves z_shard_v, the target, and h and l [M]. Without ranks the vocabulary is whole and nothing travels.

    With units of the vocabulary, a rank computes the four numbers of each unit that it has, in calls of one shape, and
    [V, 4, M] are merged in the order of units.
    """

    @staticmethod
    def forward(
        ctx, logits, target, ranks: Communicator | None, ignore_index, smoothing, reduction, overwrite_logits, units
    ):
        vocabulary, offset = logits.size(-1), 0
        if ranks is not None:
            sizes = ranks.all_sizes(logits, -1)
            vocabulary, offset = sum(sizes), sum(sizes[: ranks.rank])
        parts = _parts(logits, offset, None if units is None or ranks is None else units // ranks.world_size)
        of_parts = [part_statistics(z, target, o, ignore_index, smoothing > 0).unsqueeze(0) for z, o in parts]
        statistics = of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts)
        if ranks is not None:
            statistics = ranks.all_gather(statistics, 0, [len(parts)] * ranks.world_size)
        arguments = vocabulary, ignore_index, smoothing
        losses, highest, log_sum, loss, count, valid = merged_losses(
            statistics, target, *arguments, reduction == "mean"
        )
        check_targets(target, ignore_index, vocabulary, valid)
        ctx.save_for_backward(logits, target, highest, log_sum, count if reduction == "mean" else None)
        ctx.arguments, ctx.offset, ctx.parts = arguments, offset, None if units is None else len(parts)
        ctx.overwrite_logits = overwrite_logits
        return losses if reduction == "none" else loss

    @staticmethod
    @first_order
    def backward(ctx, dloss):
        logits, target, highest, log_sum, count = ctx.saved_tensors
        dlosses = (dloss if count is None else dloss / count).expand(len(target))
        of_rows = target, highest, log_sum, dlosses
        if ctx.parts is not None:
            parts = _parts(logits, ctx.offset, ctx.parts)
            dlogits = torch.cat([_gradient(z, *of_rows, offset, *ctx.arguments) for z, offset in parts], -1)
            return dlogits, *[None] * 7
        if not ctx.overwrite_logits:
            return _gradient(logits, *of_rows, ctx.offset, *ctx.arguments), *[None] * 7
        gradient_(logits, *of_rows, ctx.offset, *ctx.arguments)
        torch.autograd.graph.increment_version(logits)  # another backward that saved them then raises
        return logits.detach(), *[None] * 7


def _parts(logits: torch.Tensor, offset: int, count: int | None) -> list[tuple[torch.Tensor, int]]:
    """Return equal parts of the logits, each in memory of its own, with their offsets; all of them if count is None."""
    if count is None:
        return [(logits, offset)]
    parts = logits.chunk(count, -1)
    return [(in_own_memory(part), offset + i * part.size(-1)) for i, part in enumerate(parts)]


def _statistics_operator(logits, target, offset, ignore_index, smoothing):
    """Return [4, M]: maximum, sum of exponentials against it, sum of logits, the target's logit.

    The sum of logits is 0 without smoothing; the target's logit is 0 on ranks without that class.
    """
    if kernel_choice.streams(logits):
        from weft.kernels.cross_entropy import cross_entropy_statistics

        return cross_entropy_statistics(logits, target, offset=offset, ignore_index=ignore_index, smoothing=smoothing)
    wide = logits.to(_wide(logits.dtype))
    local, here = _local_targets(target, target == ignore_index, offset, logits.size(-1))
    statistics = wide.new_empty(4, len(target))
    highest, exponentials, total, at_target = statistics.unbind(0)
    torch.amax(wide, -1, out=highest)
    torch.sum(_shifted(wide, highest).exp_(), -1, out=exponentials)
    torch.sum(wide, -1, out=total) if smoothing else total.zero_()
    at_target.copy_(wide.gather(-1, local.unsqueeze(-1)).squeeze(-1)).masked_fill_(~here, 0)
    return statistics


def _losses_operator(statistics, target, vocabulary, ignore_index, smoothing, mean):
    """Return losses, h and l [M], then scalars: their sum or mean, the number of targets, and whether all are valid."""
    if kernel_choice.streams(statistics):
        from weft.kernels.cross_entropy import cross_entropy_losses

        return cross_entropy_losses(
            statistics, target, vocabulary=vocabulary, ignore_index=ignore_index, smoothing=smoothing, mean=mean
        )
    ignored = target == ignore_index
    highest = statistics[:, 0].amax(0)
    log_sum = _sum_in_rank_order(statistics[:, 1] * _shifted(statistics[:, 0].t(), highest).t().exp()).log()
    losses = log_sum + (1 - smoothing) * (highest - _sum_in_rank_order(statistics[:, 3]))
    if smoothing:
        losses = losses + smoothing * (highest - _sum_in_rank_order(statistics[:, 2]) / vocabulary)
    losses.masked_fill_(ignored, 0)
    count = (~ignored).sum().to(losses.dtype)
    loss = losses.sum() / count if mean else losses.sum()
    valid = (((target >= 0) & (target < vocabulary)) | ignored).all().to(losses.dtype)
    return losses, highest, log_sum, loss, count, valid


def _losses_fake(statistics, target, *_):
    of_rows = [statistics.new_empty(target.size(0)) for _ in range(3)]
    return *of_rows, *(statistics.new_empty(()) for _ in range(3))


def _gradient_operator(logits, target, highest, log_sum, dlosses, offset, vocabulary, ignore_index, smoothing):
    """Return dz [M, V_r], in the logits' type."""
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(logits, target, highest, log_sum, dlosses, offset, vocabulary, ignore_index, smoothing, dlogits)
    return dlogits


def _overwriting_operator(logits, target, highest, log_sum, dlosses, offset, vocabulary, ignore_index, smoothing):
    _write_gradient(logits, target, highest, log_sum, dlosses, offset, vocabulary, ignore_index, smoothing, logits)


def _write_gradient(logits, target, highest, log_sum, dlosses, offset, vocabulary, ignore_index, smoothing, out):
    if kernel_choice.streams(logits):
        from weft.kernels.cross_entropy import cross_entropy_gradient

        cross_entropy_gradient(
            logits,
            target,
            highest,
            log_sum,
            dlosses,
            offset=offset,
            vocabulary=vocabulary,
            ignore_index=ignore_index,
            smoothing=smoothing,
            out=out,
        )
        return
    ignored = target == ignore_index
    local, here = _local_targets(target, ignored, offset, logits.size(-1))
    dlogits = _shifted(logits.to(highest.dtype), highest).sub_(log_sum.unsqueeze(-1)).exp_()
    if smoothing:
        dlogits -= smoothing / vocabulary
    hit = here.to(dlogits.dtype) * (1 - smoothing)
    dlogits.scatter_add_(-1, local.unsqueeze(-1), -hit.unsqueeze(-1))
    dlogits *= dlosses.masked_fill(ignored, 0).unsqueeze(-1)
    out.copy_(dlogits)


part_statistics = register(
    "cross_entropy_statistics(Tensor logits, Tensor target, int offset, int ignore_index, bool smoothing) -> Tensor",
    _statistics_operator,
    lambda logits, target, *_: logits.new_empty((4, target.size(0)), dtype=_wide(logits.dtype)),
)
merged_losses = register(
    "cross_entropy_losses(Tensor statistics, Tensor target, int vocabulary, int ignore_index, float smoothing, "
    "bool mean) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _losses_operator,
    _losses_fake,
)
_GRADIENT_ARGUMENTS = (
    "Tensor target, Tensor highest, Tensor log_sum, Tensor dlosses, int offset, int vocabulary, int ignore_index, "
    "float smoothing"
)
_gradient = register(
    f"cross_entropy_gradient(Tensor logits, {_GRADIENT_ARGUMENTS}) -> Tensor",
    _gradient_operator,
    lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
gradient_ = register(
    f"cross_entropy_gradient_(Tensor(a!) logits, {_GRADIENT_ARGUMENTS}) -> ()",
    _overwriting_operator,
    lambda *_: None,
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shifted(z: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return z - by, row by row. A row with only -inf stays -inf and does not become NaN."""
    return z - by.masked_fill(by == -torch.inf, 0).unsqueeze(-1)


def _sum_in_rank_order(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _local_targets(target, ignored, offset, size):
    """Return class numbers in this rank's shard (0 for classes elsewhere), and the mask of targets in this shard."""
    local = target - offset
    here = (local >= 0) & (local < size) & ~ignored
    return local.masked_fill(~here, 0), here


def check_targets(target: torch.Tensor, ignore_index: int, vocabulary: int, valid: torch.Tensor) -> None:
    if target.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(valid, f"targets must lie in 0 to {vocabulary - 1} or be ignore_index")
    elif not valid:
        lowest, highest = torch.aminmax(target.masked_select(target != ignore_index))
        raise IndexError(
            f"targets span {int(lowest)} to {int(highest)}; they must lie in 0 to {vocabulary - 1} or be ignore_index"
        )
