"""Attention on one device by weft's kernel: `attention`, its autograd function and the operators for torch.compile."""

import torch

from weft.ops.attention_chunk import beginning, readable, uses_kernel
from weft.ops.autocast import cast_operands, without_autocast
from weft.ops.backward import first_order
from weft.ops.library import register


def takes_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if weft's kernel computes attention on this device and takes these tensors [..., heads, T, D]."""
    if not uses_kernel(q) or not q.dtype == k.dtype == v.dtype or not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return False
    from weft.kernels.attention import LARGEST_HEAD_DIM

    return min(q.numel(), k.numel(), v.numel()) >= 1 and max(q.size(-1), v.size(-1)) <= LARGEST_HEAD_DIM


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> torch.Tensor:
    """Return softmax(scale q k.T, masked) v, computed by weft's kernel; differentiable and deterministic.

    Under torch.autocast, q, k and v are cast as for torch's scaled_dot_product_attention.

    Args:
        q: [batch, heads, sequence, head_dim], bf16 or fp16.
        k: [batch, kv_heads, sequence_k, head_dim]; heads is a multiple of kv_heads.
        v: as k, with a head_dim of its own.
        causal: a query sees keys up to its own position.
        window: a query sees the last `window` positions including its own; without causal, as many after it too.
        scale: 1 / sqrt(head_dim) by default.
        softcap: scores become softcap tanh(scores / softcap).
        sinks: [heads] fp32, learned logits that add to the sum of exponentials and have no value.
        document_ids: [batch, sequence] integers; a query sees keys of its own document. Needs sequence == sequence_k.
        dropout: probability of dropping an attention weight; the mask depends on seed and positions only.
        seed: seed of the dropout mask.

    Returns:
        [batch, heads, sequence, head_dim of v], in q's type and its order of dimensions in memory. Rows that see no
        key are 0.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any launch.
    """
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window} must be at least 1; a window of 1 is the query's own position")
    left = window - 1 if window is not None else None
    right = 0 if causal else left
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    q, k, v = cast_operands(q, k, v)  # type: ignore[assignment]
    with without_autocast(q.device.type):
        return AttentionFunction.apply(q, k, v, sinks, document_ids, left, right, scale, softcap, dropout, seed)


class AttentionFunction(torch.autograd.Function):
    """out = softmax(scale q k.T, masked) v, and lse, the logarithm of the sum of exponentials including the sinks.

    q [B, H, Sq, D]        k [B, Hkv, Sk, D]        v [B, Hkv, Sk, Dv]        sinks [H]        out [B, H, Sq, Dv]

    forward   out, lse = attention_forward(q, k, v)        it starts from the state (0, sinks)
    backward  delta = rowsum(out dout)
              dq, dk, dv = attention_backward(q, k, v, dout, lse, delta)
              dsinks = -sum over rows of exp(sinks - lse) delta, since a sink's value is 0

    Saves q, k, v, sinks, the documents, out and lse [B, H, Sq] fp32; no probabilities.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, documents, left, right, scale, softcap, dropout, seed):
        out, lse = _forward(q, k, v, sinks, documents, left, right, scale, softcap, dropout, seed)
        ctx.rules = left, right, scale, softcap, dropout, seed
        ctx.save_for_backward(q, k, v, sinks, documents, out, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        q, k, v, sinks, documents, out, lse = ctx.saved_tensors
        dq, dk, dv, delta = _backward(dout, q, k, v, documents, out, lse, *ctx.rules)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            weights = torch.exp(sinks.float().view(1, -1, 1) - lse)
            dsinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsinks, *(None,) * 7


def _forward_operator(q, k, v, sinks, documents, *rules):
    from weft.kernels.attention import attention_forward
    from weft.kernels.attention_rules import Rules

    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"attention: sinks has shape {tuple(sinks.shape)}; it must be [heads], [{q.size(1)}]")
    previous = beginning(q, sinks)
    q, k, v = readable(q, k, v)
    return attention_forward(
        q, k, v, Rules(*rules), query_documents=documents, key_documents=documents, previous=previous
    )


def _backward_operator(dout, q, k, v, documents, out, lse, *rules):
    from weft.kernels.attention import attention_backward, attention_delta
    from weft.kernels.attention_rules import Rules

    dout, q, k, v = readable(dout, q, k, v)
    delta = attention_delta(out, dout)
    documents_of = {"query_documents": documents, "key_documents": documents}
    return *attention_backward(q, k, v, dout, lse, delta, Rules(*rules), **documents_of), delta


def _in_order(like: torch.Tensor, width: int) -> torch.Tensor:
    from weft.kernels.launch import empty_in_order

    return empty_in_order(like, width, like.dtype)


_RULES = "int? left, int? right, float scale, float? softcap, float dropout, int seed"
_forward = register(
    f"attention_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? documents, {_RULES}) -> (Tensor, Tensor)",
    _forward_operator,
    lambda q, k, v, *_: (
        _in_order(q, v.size(3)),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    ),
)
_backward = register(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor out, Tensor lse, "
    f"{_RULES}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_operator,
    lambda dout, q, k, v, *_: (
        *(_in_order(t, t.size(3)) for t in (q, k, v)),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    ),
)
