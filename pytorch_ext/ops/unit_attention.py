"""Attention of a unit of queries to all keys, for attention with `invariant`: its bits do not depend on other units."""

from dataclasses import replace

import torch

from weft.kernels.attention_rules import Positions, Rules
from weft.ops.invariant import in_own_memory
from weft.ops.ring_attention import RingAttentionFunction, RingSchedule


class NoRing:
    """Stand-in for a ring's communicator where each rank has the whole sequence."""

    rank, world_size = 0, 1

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        return x


def unit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rules: Rules,
    start: int,
    sinks: torch.Tensor | None = None,
    documents: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k.T, masked) v for queries from position `start` on; differentiable.

    One KV head at a time: ATen's gradients of keys and values have other bits for one head than for two.

    Args:
        q: [batch, heads, unit, head_dim].
        k: [batch, kv_heads, sequence, head_dim].
        v: as k, with a head_dim of its own.
        sinks: [heads].
        documents: those of the queries, [batch, unit], and of the keys, [batch, sequence].
    """
    queries, keys = Positions(start, q.size(2)), Positions(0, k.size(2))
    of_queries, of_keys = ((documents[0],), (documents[1],)) if documents else (None, None)
    group = q.size(1) // k.size(1)
    outs = []
    for head in range(k.size(1)):
        heads = slice(head * group, (head + 1) * group)
        parts = (q[:, heads], k[:, head : head + 1], v[:, head : head + 1])
        own = replace(rules, head_start=rules.head_start + heads.start)
        schedule = RingSchedule(NoRing(), own, (queries,), (keys,), of_queries, of_keys, ((True,),))  # type: ignore[arg-type]
        of_heads = None if sinks is None else sinks[heads]
        outs.append(RingAttentionFunction.apply(*map(in_own_memory, parts), of_heads, schedule))
    return torch.cat(outs, 1)
