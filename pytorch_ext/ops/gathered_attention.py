"""Attention over keys and values gathered from all ranks, some heads at a time."""

from dataclasses import replace

import torch

from weft.kernels.attention import Positions
from weft.ops import attention_chunk
from weft.ops.attention_blocks import Chunk
from weft.ops.backward import first_order
from weft.ops.layout import Layout, gather_parts
from weft.ops.ring_attention import Schedule, sinks_gradient

# Gathered keys and values at a time: enough for kernels and copies to run at their rate, little beside a model.
GATHERED_BYTES = 256 << 20


class GatheredAttentionFunction(torch.autograd.Function):
    """out = softmax(scale q k.T, masked) v over all ranks' keys and values, for this rank's queries.

    Per rank, with S_r of S positions:
        q [B, H, S_r, D]        k [B, Hkv, S_r, D]        v [B, Hkv, S_r, Dv]        sinks [H]        out as q, with Dv

    forward   k, v = all_gather of some KV heads, positions in order; out, lse of the query heads that use them
    backward  the same gathering; dk, dv = reduce_scatter of all S positions, in fp32, in the order of ranks
    dsinks    as in RingAttentionFunction

    Saves q, k, v, sinks, out and lse [B, H, S_r] fp32. Gathers again in backward. At most GATHERED_BYTES of k and v are
    whole at a time, or one head's.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, schedule: Schedule, layout: Layout):
        ctx.schedule, ctx.layout = schedule, layout
        outs, lses = [], []
        for queries, keys in head_groups(q, k, v, layout.length):
            whole = [_gather(x[:, keys], schedule, layout) for x in (k, v)]
            state = None
            if sinks is not None:
                state = None, sinks[queries].float().view(1, -1, 1).expand(q.size(0), -1, q.size(2))
            out, lse = attention_chunk.forward(
                q[:, queries], *whole, _chunk(schedule, layout, queries.start), state, last=True
            )
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 1), torch.cat(lses, 1)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        schedule, layout = ctx.schedule, ctx.layout
        ranks = schedule.ranks
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        delta = attention_chunk.row_sums(out, dout)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dks: list[torch.Tensor] = []
        dvs: list[torch.Tensor] = []
        for queries, keys in head_groups(q, k, v, layout.length):
            whole = [_gather(x[:, keys], schedule, layout) for x in (k, v)]
            sums = [torch.zeros_like(x, dtype=torch.float32) for x in whole]
            of_heads = (x[:, queries] for x in (dout, out, lse, delta))
            attention_chunk.backward(
                q[:, queries], *whole, *of_heads, _chunk(schedule, layout, queries.start), dq[:, queries], *sums
            )
            for total, parts in zip(sums, (dks, dvs), strict=True):
                by_rank = torch.cat(layout.cut(total, 2), 2)
                parts.append(ranks.reduce_scatter(by_rank, 2, layout.sizes))
        dsinks = sinks_gradient(sinks, lse, delta, ranks) if ctx.needs_input_grad[3] else None
        dk, dv = torch.cat(dks, 1), torch.cat(dvs, 1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def head_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> list[tuple[slice, slice]]:
    """Slices of query heads and of the KV heads that they use, each of as many as GATHERED_BYTES permit."""
    each = q.size(1) // k.size(1)
    head_bytes = k.size(0) * length * (k.size(3) + v.size(3)) * k.element_size()
    at_once = max(1, GATHERED_BYTES // max(1, head_bytes))
    starts = range(0, k.size(1), at_once)
    slices = [slice(start, min(start + at_once, k.size(1))) for start in starts]
    return [(slice(keys.start * each, keys.stop * each), keys) for keys in slices]


def _gather(x: torch.Tensor, schedule: Schedule, layout: Layout) -> torch.Tensor:
    return gather_parts(x.contiguous(), 2, schedule.ranks, layout)


def _chunk(schedule: Schedule, layout: Layout, first_head: int) -> Chunk:
    """This rank's queries against all keys, for heads from that one on."""
    rank, rules = schedule.ranks.rank, schedule.rules
    documents: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if schedule.query_documents is not None and schedule.key_documents is not None:
        whole = layout.join(schedule.key_documents, 1)
        documents = schedule.query_documents[rank], whole
    rules = replace(rules, head_start=rules.head_start + first_head)
    return Chunk(rules, schedule.query_positions[rank], Positions(0, layout.length), *documents)
