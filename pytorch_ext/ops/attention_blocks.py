"""An attention chunk on the CPU: blocks of queries' positions against keys', in fp32.

Runs of positions are cut where queries begin and end, so that a block is hidden, seen by all, causal along its
diagonal, or something else. The second and third are ATen's flash attention, which gives its lse and takes a global one
for backward; the last is done here, scores and all, some rows at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from weft.kernels.attention_rules import Positions, Rules
from weft.ops.dropout import dropout_mask

_ROWS = 256  # of queries whose scores stand in memory at a time
_aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionChunk:
    """Which queries meet which keys. documents: [B, Sq] and [B, Sk] integers, or None."""

    rules: Rules
    query_positions: Positions
    key_positions: Positions
    query_documents: torch.Tensor | None = None
    key_documents: torch.Tensor | None = None

    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "rules"}


@dataclass(frozen=True)
class ScoreBlock:
    """Consecutive positions of queries against consecutive positions of keys; at most some of them hidden."""

    rows: slice
    keys: slice
    query_start: int
    key_start: int
    kind: str  # "full", "causal" or "masked"


def blocks_of(chunk: AttentionChunk) -> Iterator[ScoreBlock]:
    """The blocks of a chunk in the order of keys' and then queries' positions; hidden ones are left out."""
    rules = chunk.rules
    plain = chunk.query_documents is None and rules.softcap is None and not rules.dropout
    for key_start, key_count, first_key in _runs(chunk.key_positions):
        for query_start, query_count, first_row in _runs(chunk.query_positions):
            # Cut keys where the queries begin and end: what is before can be full, what is beside causal.
            edges = sorted({key_start, key_start + key_count, *(
                edge for edge in (query_start, query_start + query_count) if key_start < edge < key_start + key_count
            )})  # fmt: skip
            for start, end in pairwise(edges):
                nearest, farthest = start - (query_start + query_count - 1), end - 1 - query_start  # key less query
                if (rules.right is not None and nearest > rules.right) or (
                    rules.left is not None and farthest < -rules.left
                ):
                    continue
                full = (rules.right is None or farthest <= rules.right) and (
                    rules.left is None or nearest >= -rules.left
                )
                along = rules.right == 0 and start == query_start and end == query_start + query_count
                causal = along and (rules.left is None or rules.left >= query_count - 1)
                kind = "masked" if not plain else "full" if full else "causal" if causal else "masked"
                keys = slice(first_key + start - key_start, first_key + end - key_start)
                if kind != "masked":
                    yield ScoreBlock(slice(first_row, first_row + query_count), keys, query_start, start, kind)
                    continue
                for row in range(0, query_count, _ROWS):
                    rows = slice(first_row + row, first_row + min(row + _ROWS, query_count))
                    yield ScoreBlock(rows, keys, query_start + row, start, kind)


def _runs(positions: Positions) -> list[tuple[int, int, int]]:
    """(first position, count, first row) of each run that is not empty."""
    start, count, second_start, second_count = positions
    return [run for run in ((start, count, 0), (second_start, second_count, count)) if run[1]]


def forward_block(q, k, v, chunk: AttentionChunk, block: ScoreBlock):
    if block.kind == "masked":
        scores, weights, lse = _scores(q, k, chunk, block)
        weights = weights * _kept(scores, q, chunk, block)
        return _by_kv_head(torch.matmul, weights, v), lse
    outs, lses, width = [], [], v.size(-1)
    q_wide, k, v = _as_wide(q, k, v)
    for part in _grouped(q_wide, k):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            part, k, v, 0.0, block.kind == "causal", scale=_scale(q, chunk)
        )
        outs.append(out)
        lses.append(lse)
    return _ungrouped(outs)[..., :width], _ungrouped(lses)


def backward_block(
    of_rows: Sequence[torch.Tensor], of_keys: Sequence[torch.Tensor], chunk: AttentionChunk, block: ScoreBlock
):
    """dq, dk and dv of one block, from its q, dout, out, lse and delta, and its k and v."""
    (q, dout, out, lse, delta), (k, v) = of_rows, of_keys
    if block.kind == "masked":
        scores, weights, _ = _scores(q, k, chunk, block, lse)
        kept = _kept(scores, q, chunk, block)
        dv = _over_group(torch.matmul((weights * kept).transpose(-1, -2), dout), v)
        dweights = _by_kv_head(torch.matmul, dout, v.transpose(-1, -2)) * kept
        dscores = weights * (dweights - delta.unsqueeze(-1))
        if chunk.rules.softcap is not None:
            dscores = dscores * (1 - (scores / chunk.rules.softcap) ** 2).nan_to_num(0.0, neginf=0.0)
        dscores = dscores * _scale(q, chunk)
        dq = _by_kv_head(torch.matmul, dscores, k)
        return dq, _over_group(torch.matmul(dscores.transpose(-1, -2), q), k), dv
    widths = q.size(-1), v.size(-1)
    q_wide, k, v, dout, out = _as_wide(q, k, v, dout, out)
    dqs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    parts = zip(*(_grouped(t, k) for t in (q_wide, dout, out, lse)), strict=True)
    for part, dout_part, out_part, lse_part in parts:
        dq, *more = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout_part, part, k, v, out_part, lse_part, 0.0, block.kind == "causal", scale=_scale(q, chunk)
        )
        dqs.append(dq)
        sums = [a.add_(b) for a, b in zip(sums, more, strict=True)] if sums else more
    return _ungrouped(dqs)[..., : widths[0]], sums[0][..., : widths[0]], sums[1][..., : widths[1]]


def _as_wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All with the largest of their head dimensions, zeros added: ATen's flash attention wants one for all."""
    width = max(t.size(-1) for t in tensors)
    return [torch.nn.functional.pad(t, (0, width - t.size(-1))) if t.size(-1) < width else t for t in tensors]


def _scale(q, chunk: AttentionChunk) -> float:
    return q.size(-1) ** -0.5 if chunk.rules.scale is None else chunk.rules.scale


def _grouped(x: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    """The heads in as many parts as there are query heads to a KV head: part g has the g-th of each."""
    heads = k.size(1)
    return list(x.unflatten(1, (heads, x.size(1) // heads)).unbind(2))


def _ungrouped(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts, 2).flatten(1, 2)


def _by_kv_head(function, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """function(x, y) with each KV head's y for all the query heads that use it."""
    heads = y.size(1)
    return function(x.unflatten(1, (heads, x.size(1) // heads)), y.unsqueeze(2)).flatten(1, 2)


def _over_group(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum over the query heads of each KV head."""
    return x.unflatten(1, (like.size(1), x.size(1) // like.size(1))).sum(2)


def _scores(q, k, chunk: AttentionChunk, block: ScoreBlock, lse=None):
    """Scores (-inf where hidden), exp(scores - lse), lse; of the block alone where none is given."""
    rules = chunk.rules
    scores = _by_kv_head(torch.matmul, q, k.transpose(-1, -2)) * _scale(q, chunk)
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    query, key = _positions(q, k, block)
    ahead = key[None, :] - query[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if rules.left is not None:
        hidden |= ahead < -rules.left
    if rules.right is not None:
        hidden |= ahead > rules.right
    if chunk.query_documents is not None and chunk.key_documents is not None:
        theirs = chunk.key_documents[:, None, None, block.keys]
        hidden = hidden | (chunk.query_documents[:, None, block.rows, None] != theirs)
    scores = scores.masked_fill(hidden, -torch.inf)
    if lse is None:
        lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    return scores, weights, lse


def _positions(q, k, block: ScoreBlock) -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.arange(block.query_start, block.query_start + q.size(2), device=q.device)
    return query, torch.arange(block.key_start, block.key_start + k.size(2), device=k.device)


def _kept(scores, q, chunk: AttentionChunk, block: ScoreBlock) -> torch.Tensor | float:
    """What each probability is multiplied with: 0, or 1 / (1 - dropout)."""
    if not chunk.rules.dropout:
        return 1.0
    query = torch.arange(block.query_start, block.query_start + q.size(2))
    key = torch.arange(block.key_start, block.key_start + scores.size(-1))
    kept = dropout_mask(chunk.rules, q.size(0), q.size(1), query, key)
    return kept.to(scores.dtype) / (1 - chunk.rules.dropout)
