"""The chunk primitive of context parallelism: attention of some queries to some keys, continuing a state in fp32.

On a GPU torch's functions run it if it needs no state, and weft's kernel otherwise and where it was measured faster; in
Triton's interpreter the kernel runs on request. `attention_blocks` runs it on the CPU.
"""

from collections.abc import Sequence

import torch

from weft.ops import attention_blocks, kernel_choice, library_attention
from weft.ops.attention_blocks import AttentionChunk
from weft.ops.kernel_choice import Algorithm

_last: Algorithm | None = None


def last_algorithm() -> Algorithm | None:
    """Return what computed the last chunk forward, and why, for `weft.explain`."""
    return _last


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over two sets of keys together, from that over each (Dao et al. 2022, section 3.1).

    Args:
        out_a, out_b: [..., Dv], 0 where no key is seen.
        lse_a, lse_b: [...], natural logarithm, -inf where no key is seen.

    Returns:
        (out, lse), fp32.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 6, 8).unbind()
        >>> def attention(k, v):
        ...     scores = q @ k.mT
        ...     return scores.softmax(-1) @ v, scores.logsumexp(-1)
        >>> out, lse = weft.merge_attention(*attention(k[:, :4], v[:, :4]), *attention(k[:, 4:], v[:, 4:]))
        >>> torch.allclose(out, attention(k, v)[0], atol=1e-6)
        True
    """
    lse_a, lse_b = lse_a.float(), lse_b.float()
    # torch.logaddexp would give bits that depend on a row's place: inside a vector, or behind the last full one.
    lse = torch.stack([lse_a, lse_b]).logsumexp(0)
    nothing = lse == -torch.inf
    lse_safe = lse.masked_fill(nothing, 0)
    share_a, share_b = (torch.exp(part - lse_safe).unsqueeze(-1) for part in (lse_a, lse_b))
    return out_a.float() * share_a + out_b.float() * share_b, lse


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: AttentionChunk, state: tuple | None, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state (out, lse) after these keys.

    Args:
        state: (out, lse) before these keys, which may be overwritten; None before any keys. An out of None stands for
            0.
        last: no keys follow, so out is rounded to q's type.
    """
    global _last
    by_kernel, parts = uses_kernel(q), ()  # type: tuple[bool, tuple]
    reason = "torch's functions continue no state"
    if state is None and last:
        parts, reason = library_attention.choose("forward", q, k, v, chunk)
    _last = Algorithm(by_kernel and not parts, reason)
    if parts:
        return library_attention.forward(q, k, v, chunk, parts)
    if by_kernel:
        from weft.kernels.attention import attention_forward

        q, k, v = readable(q, k, v)
        out_dtype = q.dtype if last else torch.float32
        return attention_forward(q, k, v, chunk.rules, **chunk.arguments(), previous=state, out_dtype=out_dtype)
    out, lse = state if state is not None else (None, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32))
    if out is None:
        out, lse = (
            q.new_zeros((*q.shape[:3], v.size(3)), dtype=torch.float32),
            lse.clone(memory_format=torch.contiguous_format),
        )
    for block in attention_blocks.blocks_of(chunk, q.device):
        rows, keys = block.rows, block.keys
        part = attention_blocks.forward_block(
            q[:, :, rows].float(), k[:, :, keys].float(), v[:, :, keys].float(), chunk, block
        )
        if state is None and block.first and rows == slice(0, q.size(2)):
            out, lse = part
            continue
        if state is not None or not block.first:
            part = merge_attention(out[:, :, rows], lse[:, :, rows], *part)
        out[:, :, rows], lse[:, :, rows] = part
    return (out.to(q.dtype) if last else out), lse


def beginning(q: torch.Tensor, sinks: torch.Tensor | None) -> tuple | None:
    """Return the state before any keys: None without sinks, else the sinks [H] of these heads as lse."""
    if sinks is None:
        return None
    return None, sinks.float().view(1, -1, 1).expand(q.size(0), -1, q.size(2))


def backward(
    of_queries: Sequence[torch.Tensor],
    of_keys: Sequence[torch.Tensor],
    chunk: AttentionChunk,
    gradients: Sequence[torch.Tensor],
    alone: bool = False,
) -> None:
    """Add this chunk's part to the gradients dq, dk and dv, fp32.

    Args:
        of_queries: q, dout, out, lse and delta. The last three are those of the whole attention: out in the type in
            which it was returned, delta [B, H, Sq] = rowsum(out dout) in fp32.
        of_keys: k and v.
        gradients: dq, dk and dv.
        alone: the chunk has all keys of its queries, and no sinks.
    """
    (q, dout, out, lse, delta), (k, v), (dq, dk, dv) = of_queries, of_keys, gradients
    if alone:
        parts, _ = library_attention.choose("backward", q, k, v, chunk)
        if parts:
            library_attention.backward((q, dout, out, lse), of_keys, chunk, parts, gradients)
            return
    if uses_kernel(q):
        from weft.kernels.attention import attention_backward

        q, k, v, dout = readable(q, k, v, dout)
        attention_backward(q, k, v, dout, lse, delta, chunk.rules, **chunk.arguments(), dq=dq, dk=dk, dv=dv)
        return
    for block in attention_blocks.blocks_of(chunk, q.device):
        rows, keys = block.rows, block.keys
        of_rows = [t[:, :, rows].float() for t in of_queries]
        parts = attention_blocks.backward_block(of_rows, [t[:, :, keys].float() for t in of_keys], chunk, block)
        for total, place, part in zip(gradients, (rows, keys, keys), parts, strict=True):
            total[:, :, place] += part


def row_sums(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """Return delta = rowsum(out dout), [B, H, Sq] fp32."""
    if uses_kernel(out):
        from weft.kernels.attention import attention_delta

        return attention_delta(out, dout)
    return (out.float() * dout.float()).sum(-1)


def readable(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the operands; those that the tensor copy engine cannot read are copies in the same order of dimensions.

    It reads no strides of 0 (an expanded tensor, the gradient of a sum) and no address that 16 does not divide. Without
    the engine the kernels need more registers. Rows of another size than a multiple of 16 bytes stay as they are.
    """
    from weft.kernels import launch

    if not launch.has_copy_engine(operands[0].device) or all(map(launch.describable, operands)):
        return operands
    return tuple(
        x
        if launch.describable(x) or x.size(-1) * x.element_size() % 16
        else launch.empty_in_order(x, x.size(-1), x.dtype).copy_(x)
        for x in operands
    )


def uses_kernel(q: torch.Tensor) -> bool:
    """Return True if weft's kernel computes chunks with these queries, False if `attention_blocks` does."""
    if not kernel_choice.on_kernel(q.device):
        return False
    from weft.kernels import launch

    return q.dtype in (launch.DTYPES if launch.INTERPRETED else (torch.bfloat16, torch.float16))
