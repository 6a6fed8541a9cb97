"""An attention chunk without a kernel, in fp32, as blocks of query positions against key positions.

Keys are cut where a run of queries begins and ends, so that each block is hidden, full, causal along its diagonal, or
masked in another way. On the CPU full and causal blocks run in ATen's flash attention, which returns its lse and takes
a global lse in backward. Other blocks are computed here from their scores, some rows at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from weft.kernels.attention_rules import Positions, Rules
from weft.ops.dropout import dropout_mask

_ROWS = 256  # rows of queries with their scores in memory at a time
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class AttentionChunk:
    """Positions and documents of the queries and keys of one chunk.

    Attributes:
        query_documents, key_documents: [B, Sq] and [B, Sk] integers, or None.
        library: which of torch's functions may compute it on a GPU: "" for none, "deterministic" for those with the
            same bits in every run, or "any".
    """

    rules: Rules
    query_positions: Positions
    key_positions: Positions
    query_documents: torch.Tensor | None = None
    key_documents: torch.Tensor | None = None
    library: str = ""

    def arguments(self) -> dict:
        """Return the arguments of the kernels beside the rules."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("rules", "library")}


@dataclass(frozen=True)
class ScoreBlock:
    """Consecutive positions of queries against consecutive positions of keys, not all of them hidden."""

    rows: slice
    keys: slice
    query_start: int
    key_start: int
    kind: str  # "full", "causal" or "masked"
    first: bool = False  # no earlier block of the chunk has one of these rows


def blocks_of(chunk: AttentionChunk, device: torch.device) -> list[ScoreBlock]:
    """Return the blocks of a chunk that are not hidden, ordered by the keys' runs and then by the queries'."""
    known = vars(chunk).setdefault("_blocks", {})  # the same in each forward and backward of a schedule
    if device.type not in known:
        blocks: list[ScoreBlock] = []
        for block in _blocks(chunk, device):
            seen = any(block.rows.start < b.rows.stop and b.rows.start < block.rows.stop for b in blocks)
            blocks.append(replace(block, first=not seen))
        known[device.type] = blocks
    return known[device.type]


def _blocks(chunk: AttentionChunk, device: torch.device) -> Iterator[ScoreBlock]:
    rules = chunk.rules
    plain = chunk.query_documents is None and rules.softcap is None and not rules.dropout and device.type == "cpu"
    if plain and rules.right == 0 and rules.left is None and chunk.query_positions == chunk.key_positions:
        # Rows lie in the order of positions, so a query sees exactly the keys up to its own row.
        whole = slice(0, chunk.query_positions.length + chunk.query_positions.second_length)
        yield ScoreBlock(whole, whole, 0, 0, "causal")
        return
    for key_start, key_count, first_key in runs(chunk.key_positions):
        for query_start, query_count, first_row in runs(chunk.query_positions):
            # Cut keys where the queries begin and end: blocks before can be full, the block beside can be causal.
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


def runs(positions: Positions) -> list[tuple[int, int, int]]:
    """Return (first position, count, first row) of each run that is not empty."""
    start, count, second_start, second_count = positions
    return [run for run in ((start, count, 0), (second_start, second_count, count)) if run[1]]


def forward_block(q, k, v, chunk: AttentionChunk, block: ScoreBlock):
    if block.kind == "masked":
        _, weights, lse = _scores(q, k, chunk, block)
        weights = weights * _kept(q, k, chunk, block)
        return _by_kv_head(torch.matmul, weights, v), lse
    scale, causal, width = _scale(q, chunk), block.kind == "causal", v.size(-1)
    q, k, v = _as_wide(q, k, v)
    results = [_flash(part, k, v, 0.0, causal, scale=scale) for part in _grouped(q, k)]
    outs, lses = zip(*results, strict=True)
    return _ungrouped(outs)[..., :width], _ungrouped(lses)


def backward_block(
    of_rows: Sequence[torch.Tensor], of_keys: Sequence[torch.Tensor], chunk: AttentionChunk, block: ScoreBlock
):
    """Return dq, dk and dv of one block.

    Args:
        of_rows: q, dout, out, lse and delta of the block.
        of_keys: k and v of the block.
    """
    (q, dout, out, lse, delta), (k, v) = of_rows, of_keys
    if block.kind == "masked":
        scores, weights, _ = _scores(q, k, chunk, block, lse)
        kept = _kept(q, k, chunk, block)
        dv = _over_group(torch.matmul((weights * kept).transpose(-1, -2), dout), v)
        dweights = _by_kv_head(torch.matmul, dout, v.transpose(-1, -2)) * kept
        dscores = weights * (dweights - delta.unsqueeze(-1))
        if chunk.rules.softcap is not None:
            dscores = dscores * (1 - (scores / chunk.rules.softcap) ** 2).nan_to_num(0.0, neginf=0.0)
        dscores = dscores * _scale(q, chunk)
        dq = _by_kv_head(torch.matmul, dscores, k)
        return dq, _over_group(torch.matmul(dscores.transpose(-1, -2), q), k), dv
    widths, scale, causal = (q.size(-1), v.size(-1)), _scale(q, chunk), block.kind == "causal"
    q, k, v, dout, out = _as_wide(q, k, v, dout, out)
    dqs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    parts = zip(*[_grouped(t, k) for t in (q, dout, out, lse)], strict=True)
    for part, dout_part, out_part, lse_part in parts:
        dq, *more = _flash_backward(dout_part, part, k, v, out_part, lse_part, 0.0, causal, scale=scale)
        dqs.append(dq)
        sums = [a.add_(b) for a, b in zip(sums, more, strict=True)] if sums else more
    return _ungrouped(dqs)[..., : widths[0]], sums[0][..., : widths[0]], sums[1][..., : widths[1]]


def _as_wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad all tensors with zeros to their largest head dimension: ATen's flash attention needs the same for all."""
    width = max([t.size(-1) for t in tensors])
    return [torch.nn.functional.pad(t, (0, width - t.size(-1))) if t.size(-1) < width else t for t in tensors]


def _scale(q, chunk: AttentionChunk) -> float:
    return q.size(-1) ** -0.5 if chunk.rules.scale is None else chunk.rules.scale


def _grouped(x: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    """Return one part for each query head of a KV head: part g has the g-th query head of every KV head."""
    heads = k.size(1)
    return [x] if heads == x.size(1) else list(x.unflatten(1, (heads, x.size(1) // heads)).unbind(2))


def _ungrouped(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts), 2).flatten(1, 2)


def _by_kv_head(function, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return function(x, y), with each KV head's y for all query heads that use it."""
    heads = y.size(1)
    return function(x.unflatten(1, (heads, x.size(1) // heads)), y.unsqueeze(2)).flatten(1, 2)


def _over_group(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the sum over the query heads of each KV head."""
    return x.unflatten(1, (like.size(1), x.size(1) // like.size(1))).sum(2)


def _scores(q, k, chunk: AttentionChunk, block: ScoreBlock, lse=None):
    """Return scores (-inf where hidden), exp(scores - lse) and lse; without an lse, that of the block alone."""
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
        key_documents = chunk.key_documents[:, None, None, block.keys]
        hidden = hidden | (chunk.query_documents[:, None, block.rows, None] != key_documents)
    scores = scores.masked_fill(hidden, -torch.inf)
    if lse is None:
        lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    return scores, weights, lse


def _positions(q, k, block: ScoreBlock) -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.arange(block.query_start, block.query_start + q.size(2), device=q.device)
    return query, torch.arange(block.key_start, block.key_start + k.size(2), device=k.device)


def _kept(q, k, chunk: AttentionChunk, block: ScoreBlock) -> torch.Tensor | float:
    """Return the factor of each probability: 0, or 1 / (1 - dropout)."""
    if not chunk.rules.dropout:
        return 1.0
    kept = dropout_mask(chunk.rules, q.size(0), q.size(1), *_positions(q, k, block))
    return kept.to(q.dtype) / (1 - chunk.rules.dropout)
