"""Attention over keys and values gathered from all ranks, some heads at a time."""

import torch

from weft.kernels.attention_rules import Positions
from weft.ops import attention_chunk
from weft.ops.attention_blocks import AttentionChunk
from weft.ops.backward import RankFunction, first_order
from weft.ops.head_groups import head_groups, joined
from weft.ops.ring_attention import RingSchedule, sinks_gradient
from weft.ops.sequence_layout import SequenceLayout, gather_parts


class GatheredAttentionFunction(RankFunction):
    """out = softmax(scale q k.T, masked) v over all ranks' keys and values, for this rank's queries.

    Per rank, with S_r of S positions:
        q [B, H, S_r, D]        k [B, Hkv, S_r, D]        v [B, Hkv, S_r, Dv]        sinks [H]        out as q, with Dv

    forward   k, v = all_gather of some KV heads, positions in order; then out, lse of the query heads that use them
    backward  the same all_gather; dk, dv = reduce_scatter of all S positions, in fp32, in rank order; where torch's
              functions compute a rank's, these are rounded to q's type before
    dsinks    as in RingAttentionFunction

    Saves q, k, v, sinks, out and lse [B, H, S_r] fp32. Backward gathers again. Only some heads of k and v are whole in
    memory at a time.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, schedule: RingSchedule, layout: SequenceLayout):
        outs, lses = [], []
        for queries, keys in head_groups(q, k, v, layout.length):
            k_whole, v_whole = (_gather(x[:, keys], schedule, layout) for x in (k, v))
            state = attention_chunk.beginning(q, None if sinks is None else sinks[queries])
            chunk = _chunk(schedule.from_head(queries.start), layout)
            out, lse = attention_chunk.forward(q[:, queries], k_whole, v_whole, chunk, state, last=True)
            outs.append(out)
            lses.append(lse)
        out, lse = joined(outs), joined(lses)
        ctx.schedule, ctx.layout = schedule, layout
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
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for queries, keys in head_groups(q, k, v, layout.length):
            k_whole, v_whole = (_gather(x[:, keys], schedule, layout) for x in (k, v))
            sums = [torch.zeros_like(x, dtype=torch.float32) for x in (k_whole, v_whole)]
            q_part, *of_rows = (x[:, queries] for x in (q, dout, out, lse, delta))
            rows = torch.zeros(q_part.shape, dtype=torch.float32, device=q.device)
            chunk = _chunk(schedule.from_head(queries.start), layout)
            gradients = [rows, *sums]
            attention_chunk.backward([q_part, *of_rows], [k_whole, v_whole], chunk, gradients, alone=sinks is None)
            dq[:, queries] = rows
            del k_whole, v_whole
            for gradient in (dk, dv):
                by_rank = torch.cat(layout.cut(sums.pop(0), 2), 2)
                gradient[:, keys] = ranks.reduce_scatter(by_rank, 2, layout.sizes)
        dsinks = sinks_gradient(sinks, lse, delta, ranks) if ctx.needs_input_grad[3] else None
        return dq, dk, dv, dsinks, None, None


def _gather(x: torch.Tensor, schedule: RingSchedule, layout: SequenceLayout) -> torch.Tensor:
    return gather_parts(x.contiguous(), 2, schedule.ranks, layout)


def _chunk(schedule: RingSchedule, layout: SequenceLayout) -> AttentionChunk:
    """Return the chunk of this rank's queries against all keys."""
    rank = schedule.ranks.rank
    documents: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if schedule.query_documents is not None and schedule.key_documents is not None:
        documents = schedule.query_documents[rank], layout.join(schedule.key_documents, 1)
    positions = schedule.query_positions[rank], Positions(0, layout.length)
    return AttentionChunk(schedule.rules, *positions, *documents, library=schedule.library)
