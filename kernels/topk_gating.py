"""topk_gating: the k experts of each token, and their routing weights.

    s        = softmax(logits) or sigmoid(logits), over the E experts of a token
    index    = the k experts with the largest logits; with a bias [E], with the largest s + bias
    w        = s[index], or s[index] / sum(s[index]) if normalised

Of equal experts, the one with the lower number comes first. NaN counts as the least, and the weights of its token are
NaN. The bias chooses and does not weigh (DeepSeek-AI 2024, equation 16).

    backward  ds[index] = dw, or (dw - sum(dw w)) / sum(s[index]) if normalised;   softmax   dl = s (ds - sum(ds s))
                                                                                   sigmoid   dl = ds s (1 - s)

The forward reads T E elements and writes 2 T k; it takes about 5 k T E operations. The backward reads T E + 2 T k and
writes T E. A program has whole tokens: nothing is summed across programs, in fp32, without atomics. Only logits and
index are saved; s is computed again.

It was run in the interpreter and compiled; it was never timed. Tests: tests/kernels/test_topk_gating.py.
"""

import torch

from weft.kernels import launch
from weft.kernels.language import cdiv, tl, triton
from weft.kernels.replay import replayed

MOST_EXPERTS = 1024
_LANES = (64, 256, MOST_EXPERTS)  # experts of a token in a program; few sizes, so that few variants serve all
_BLOCK = 1024  # elements of a program, 8 for each thread of 4 warps


@replayed
def topk_gating(
    logits: torch.Tensor,
    k: int,
    *,
    softmax: bool = True,
    normalize: bool = False,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights [T, k] of the type of logits, index [T, k] int64), in descending order of the choice.

    Args:
        logits: [T, E], bf16, fp16 or fp32, with contiguous rows.
        k: from 1 to E.
        softmax: the scores are a softmax; False: sigmoids.
        normalize: divide the weights of a token by their sum.
        bias: [E] fp32, contiguous: added to the scores for the choice alone.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    op = "topk_gating"
    lanes = _check(op, logits, k)
    launch.check_memory(op, logits=logits, bias=bias)
    launch.check_dtype(op, (torch.float32,), bias=bias)
    tokens, experts = logits.shape
    launch.check_shape(op, (experts,), bias=bias)
    weights = launch.empty((tokens, k), logits.dtype, logits.device)
    index = launch.empty((tokens, k), torch.int64, logits.device)
    rows = _BLOCK // lanes
    launch.launch(
        _topk_gating_kernel,
        (cdiv(tokens, rows),),
        logits,
        bias,
        weights,
        index,
        tokens,
        experts,
        k,
        logits.stride(0),
        ROWS=rows,
        LANES=lanes,
        SOFTMAX=softmax,
        NORMALIZE=normalize,
    )
    return weights, index


@replayed
def topk_gating_backward(
    dw: torch.Tensor,
    logits: torch.Tensor,
    index: torch.Tensor,
    *,
    softmax: bool = True,
    normalize: bool = False,
) -> torch.Tensor:
    """Return dlogits [T, E], of the type of logits.

    Args:
        dw: [T, k], of the type of logits, contiguous.
        logits, softmax, normalize: as in `topk_gating`.
        index: [T, k] int64, contiguous, that `topk_gating` returned.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    op = "topk_gating_backward"
    lanes = _check(op, logits, index.size(-1))
    launch.check_memory(op, dw=dw, logits=logits, index=index)
    launch.check_dtype(op, (logits.dtype,), dw=dw)
    launch.check_dtype(op, (torch.int64,), index=index)
    (tokens, experts), k = logits.shape, index.size(-1)
    launch.check_shape(op, (tokens, k), dw=dw, index=index)
    if not (dw.is_contiguous() and index.is_contiguous()):
        raise ValueError(f"{op}: dw has strides {dw.stride()} and index {index.stride()}; make both contiguous")
    dlogits = launch.empty((tokens, experts), logits.dtype, logits.device)
    rows = _BLOCK // lanes
    launch.launch(
        _topk_gating_backward_kernel,
        (cdiv(tokens, rows),),
        dw,
        logits,
        index,
        dlogits,
        tokens,
        experts,
        k,
        logits.stride(0),
        ROWS=rows,
        LANES=lanes,
        SOFTMAX=softmax,
        NORMALIZE=normalize,
    )
    return dlogits


def _check(op: str, logits: torch.Tensor, k: int) -> int:
    """Check the arguments of both passes; return the number of lanes for the experts of a token."""
    launch.check_dtype(op, logits=logits)
    if logits.dim() != 2 or (logits.size(1) > 1 and logits.stride(1) != 1):
        raise ValueError(
            f"{op}: logits {tuple(logits.shape)} with strides {logits.stride()} must be a matrix [T, E] with rows that "
            "are contiguous"
        )
    if not 1 <= k <= logits.size(1) <= MOST_EXPERTS:
        raise ValueError(
            f"{op}: k={k} and {logits.size(1)} experts; k must be from 1 to the experts, and these at most "
            f"{MOST_EXPERTS}"
        )
    return next(lanes for lanes in _LANES if lanes >= logits.size(1))


@triton.jit(do_not_specialize=["tokens", "experts", "chosen"])
def _topk_gating_kernel(
    logits,  # [T, E], contiguous rows
    bias,  # [E], or None
    weights,  # [T, k], contiguous
    index,  # [T, k], contiguous
    tokens,
    experts,
    chosen,  # k
    stride,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    # 1. Score all experts.
    row, lane, inside, x, score, divisor = _scores(logits, tokens, experts, stride, ROWS, LANES, SOFTMAX)
    value = x
    if bias is not None:
        value = score / divisor[:, None] + tl.load(bias + lane, mask=lane < experts, other=0.0)[None, :]
    value = tl.where(value == value, value, float("-inf"))

    # 2. Choose one expert after another.
    free = inside
    place = tl.full((ROWS, LANES), -1, tl.int32)
    for turn in range(chosen):
        best = tl.max(tl.where(free, value, float("-inf")), 1)
        equal = free & (value == best[:, None])
        first = tl.min(tl.where(equal, lane[None, :], LANES), 1)
        hit = lane[None, :] == first[:, None]
        place = tl.where(hit, turn, place)
        free = free & (place < 0)

    # 3. Write each weight at the turn of its expert.
    if NORMALIZE:
        divisor = tl.sum(tl.where(place >= 0, score, 0.0), 1)
    target = row[:, None].to(tl.int64) * chosen + place
    mask = inside & (place >= 0)
    value = launch.rounded(score / divisor[:, None], weights.dtype.element_ty)
    tl.store(weights + target, value, mask=mask)
    tl.store(index + target, tl.broadcast_to(lane[None, :].to(tl.int64), (ROWS, LANES)), mask=mask)


@triton.jit(do_not_specialize=["tokens", "experts", "chosen"])
def _topk_gating_backward_kernel(
    dw,  # [T, k], contiguous
    logits,  # [T, E], contiguous rows
    index,  # [T, k], contiguous
    dlogits,  # [T, E], contiguous
    tokens,
    experts,
    chosen,  # k
    stride,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    row, lane, inside, _, score, divisor = _scores(logits, tokens, experts, stride, ROWS, LANES, SOFTMAX)
    own = tl.zeros((ROWS, LANES), tl.float32)
    taken = tl.zeros((ROWS, LANES), tl.int32)
    for turn in range(chosen):
        source = row.to(tl.int64) * chosen + turn
        hit = lane[None, :] == tl.load(index + source, mask=row < tokens, other=-1)[:, None]
        gradient = tl.load(dw + source, mask=row < tokens, other=0.0).to(tl.float32)
        own = tl.where(hit, gradient[:, None], own)
        taken = tl.where(hit, 1, taken)
    if NORMALIZE:
        divisor = tl.sum(tl.where(taken > 0, score, 0.0), 1)
        weight = tl.where(taken > 0, score / divisor[:, None], 0.0)
        own = tl.where(taken > 0, own - tl.sum(own * weight, 1)[:, None], 0.0)
        if SOFTMAX:
            dx = weight * own
        else:
            dx = own / divisor[:, None] * score * (1 - score)
    else:
        score = score / divisor[:, None]
        if SOFTMAX:
            dx = score * (own - tl.sum(own * score, 1)[:, None])
        else:
            dx = own * score * (1 - score)
    target = row[:, None].to(tl.int64) * experts + lane[None, :]
    tl.store(dlogits + target, launch.rounded(dx, dlogits.dtype.element_ty), mask=inside)


@triton.jit
def _scores(logits, tokens, experts, stride, ROWS: tl.constexpr, LANES: tl.constexpr, SOFTMAX: tl.constexpr):
    """Return a program's tokens and experts, which exist, their logits in fp32, the scores and their divisor."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside = (row[:, None] < tokens) & (lane[None, :] < experts)
    x = tl.load(logits + row[:, None].to(tl.int64) * stride + lane[None, :], mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    if SOFTMAX:
        score = tl.where(inside, tl.exp(x - tl.max(x, 1)[:, None]), 0.0)
        divisor = tl.sum(score, 1)
    else:
        score = tl.where(inside, tl.sigmoid(x), 0.0)
        divisor = tl.sum(score, 1) * 0 + 1
    return row, lane, inside, x, score, divisor


def variants(architecture: str) -> None:
    """Call the launchers once for each variant to compile ahead of time, on meta tensors; see `matmul.variants`.

    They serve up to 256 experts, by softmax with and without a norm and by a normalised sigmoid with a bias.
    """
    del architecture
    for dtype in (torch.bfloat16, torch.float32):
        for experts in _LANES[:2]:
            logits = torch.empty(4096, experts, dtype=dtype, device="meta")
            bias = torch.empty(experts, dtype=torch.float32, device="meta")
            for softmax, normalize, added in ((True, False, None), (True, True, None), (False, True, bias)):
                w, index = topk_gating(logits, 8, softmax=softmax, normalize=normalize, bias=added)
                topk_gating_backward(w, logits, index, softmax=softmax, normalize=normalize)
