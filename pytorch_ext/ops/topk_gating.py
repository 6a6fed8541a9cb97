"""The gate of a mixture of experts: the k experts of each token, and their routing weights."""

import torch

from weft.ops import kernel_choice
from weft.ops.backward import first_order

SCORINGS = ("softmax", "sigmoid")


def topk_gating(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    normalize: bool = False,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routing weights and the numbers of the k experts with the largest scores.

    The scores are a softmax over all experts (Shazeer et al. 2017) or sigmoids (DeepSeek-AI 2024, equations 12 to 16).
    Of equal experts, the one with the lower number comes first, on every device; torch.topk promises no order. On GPUs
    it is one kernel for each pass, otherwise a sort.

    Args:
        logits: [..., E], the router's output.
        k: experts of a token, from 1 to E.
        scoring: "softmax" or "sigmoid".
        normalize: divide the weights of a token by their sum. With a softmax, that is the softmax over the k alone.
        bias: [E], added to the scores for the choice and not in the weights, for balance without a loss. It gets no
            gradient. Without it the experts with the largest logits are chosen.

    Returns:
        (weights [..., k], of the type of logits; index [..., k] int64), the largest first.

    Raises:
        ValueError: k, scoring or the bias does not fit.

    Examples:
        >>> weights, index = weft.topk_gating(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2, normalize=True)
        >>> weights, index
        (tensor([[0.5000, 0.5000]]), tensor([[1, 3]]))
    """
    experts = logits.size(-1)
    if not 1 <= k <= experts:
        raise ValueError(f"topk_gating: k={k} must be from 1 to the {experts} experts of logits {tuple(logits.shape)}")
    if scoring not in SCORINGS:
        raise ValueError(f"topk_gating: scoring={scoring!r} is not one of {', '.join(map(repr, SCORINGS))}")
    if bias is not None and tuple(bias.shape) != (experts,):
        raise ValueError(
            f"topk_gating: bias has shape {tuple(bias.shape)}; it must be ({experts},), one for each expert"
        )
    flat = logits.reshape(-1, experts)
    bias = None if bias is None else bias.detach()
    if kernel_choice.streams(flat) and experts <= _kernel().MOST_EXPERTS:
        weights, index = TopKGatingFunction.apply(flat, k, scoring, normalize, bias)
    else:
        weights, index = _by_sort(flat, k, scoring, normalize, bias)
    return weights.view(*logits.shape[:-1], k), index.view(*logits.shape[:-1], k)


class TopKGatingFunction(torch.autograd.Function):
    """weights [T, k], index [T, k] of logits [T, E]; backward  dlogits (formulas in `weft.kernels.topk_gating`).

    Saves logits and index; the scores are computed again.
    """

    @staticmethod
    def forward(ctx, logits, k, scoring, normalize, bias):
        logits = logits.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        ctx.options = {"softmax": scoring == "softmax", "normalize": normalize}
        weights, index = _kernel().topk_gating(logits, k, bias=bias, **ctx.options)
        ctx.save_for_backward(logits, index)
        ctx.mark_non_differentiable(index)
        return weights, index

    @staticmethod
    @first_order
    def backward(ctx, dw, _):
        logits, index = ctx.saved_tensors
        return _kernel().topk_gating_backward(dw.contiguous(), logits, index, **ctx.options), None, None, None, None


def _by_sort(logits, k: int, scoring: str, normalize: bool, bias) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    by = (wide if bias is None else scores + bias).detach()
    by = by.masked_fill(by.isnan(), float("-inf"))
    index = by.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, index)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    return weights.to(logits.dtype), index


def _kernel():
    """Return the kernels' module; it is imported only where a kernel runs."""
    from weft.kernels import topk_gating

    return topk_gating
