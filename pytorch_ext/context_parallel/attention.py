"""Attention over a shared sequence, in place of torch's own."""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from weft.context_parallel.function_rules import draws_of, plain, used
from weft.context_parallel.learning import state
from weft.context_parallel.notes import note
from weft.context_parallel.shared_sequence import (
    SequenceCut,
    SharedSequence,
    Sharing,
    note_gathering,
    rule_for,
    rule_for_all_units,
    shared_in,
    wholes,
)
from weft.context_parallel.units import Unit
from weft.forward.running import running
from weft.kernels.attention_rules import Rules
from weft.ops.attention_chunk import last_algorithm
from weft.ops.autocast import cast_operands, without_autocast
from weft.ops.context_attention import AttentionCall, choose, context_attention, planned_attention
from weft.ops.sequence_layout import SequenceLayout
from weft.ops.unit_attention import unit_attention

_IN_UNITS = "unit by unit, over gathered keys and values"


@rule_for(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: attn_mask and is_causal=True exclude each other")
    if plain(query):
        return NotImplemented
    attn_mask, is_causal = recognized(attn_mask, query, key, is_causal)
    why = _why_not(query, key, value, attn_mask, enable_gqa)
    by_torch = isinstance(query.cut.sharing.ranks, Unit) and (dropout_p > 0 or query.device.type == "cpu")
    if why is None and not by_torch:
        return attend(query, key, value, causal=is_causal, scale=scale, dropout=dropout_p)
    if query.ndim < 3 or query.back != -2 or query.cut.blocks > 1:
        return NotImplemented
    ranks = query.cut.sharing.ranks
    if why is None:
        note("attention", _IN_UNITS)
    elif shared := shared_in((key, value, attn_mask)):
        note_gathering(why, *shared)
    key, value = (used(wholes(x), ranks) for x in (key, value))
    if is_causal:
        positions = query.cut.pick(torch.arange(query.size(-2), device=query.device), 0)
        if isinstance(ranks, Unit):  # one after another: no query sees the keys after the unit
            stop = min(key.size(-2), sum(query.cut.sizes[: ranks.rank + 1]))
            key, value = key.narrow(-2, 0, stop), value.narrow(-2, 0, stop)
        attn_mask = positions.unsqueeze(1) >= torch.arange(key.size(-2), device=query.device)
    elif attn_mask is not None:
        attn_mask = wholes(attn_mask)
        by_row = attn_mask.size(-2) > 1
        attn_mask = query.cut.pick(attn_mask, attn_mask.ndim - 2) if by_row else used(attn_mask, ranks)
    with draws_of(query) if dropout_p else nullcontext():
        out = func(query.local, key, value, attn_mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
    if query.cut.mine == 0:  # torch returns at once; this keeps the rank's part in the sums of backward
        out = out + 0 * sum(x.sum() for x in (query.local, key, value, attn_mask) if x is not None)
    return query.like(out)


def recognized(mask: torch.Tensor | None, query, key, is_causal: bool) -> tuple[torch.Tensor | None, bool]:
    """Return (mask, is_causal), with None for a mask that hides nothing or is the causal one."""
    if mask is None or mask.requires_grad or not plain(mask):
        return mask, is_causal
    if state.masks is None or mask.is_inference():
        found = _recognized(mask, query, key, is_causal)
    else:  # layers pass the same mask, or views of it
        rows, columns, place = query.size(-2), key.size(-2), (mask.data_ptr(), mask.storage_offset(), mask._version)
        known = (*place, mask.shape, mask.stride(), mask.dtype, rows, columns, is_causal)
        if known not in state.masks:
            state.masks[known] = mask, _recognized(mask, query, key, is_causal)
        found = state.masks[known][1]
    return (None, found[1]) if found[0] is None else (mask, found[1])


def _recognized(mask: torch.Tensor, query, key, is_causal: bool) -> tuple[torch.Tensor | None, bool]:
    seen = mask if mask.dtype == torch.bool else mask == 0
    if seen.all():
        return None, is_causal
    rows, columns = query.size(-2), key.size(-2)
    if mask.ndim < 2 or mask.numel() != rows * columns or mask.shape[-2:] != (rows, columns):
        return mask, is_causal
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    above = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).triu(1)
    if torch.equal(hidden.view(rows, columns), above) and torch.equal(seen.view(rows, columns), ~above):
        return None, True
    return mask, is_causal


def _why_not(query, key, value, mask, enable_gqa: bool) -> str | None:
    """Return the reason why context_attention cannot compute this call, or None."""
    if mask is not None:
        return "scaled_dot_product_attention has a mask that is not the causal one"
    shared = [x for x in (query, key, value) if isinstance(x, SharedSequence)]
    if query.ndim != 4 or key.ndim != 4 or any(x.axis != 2 or x.cut.blocks > 1 or x.cut.region for x in shared):
        return "the sequence is not the third of four dimensions of an attention's arguments"
    if query.size(0) != key.size(0) or (query.size(1) != key.size(1) and not enable_gqa):
        return "scaled_dot_product_attention broadcasts keys"
    dtype = cast_operands(query.local)[0].dtype  # type: ignore[union-attr]
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weft.context_attention does not take {dtype}"
    return None


def attend(query: SharedSequence, key, value, *, dropout: float = 0.0, **mask) -> SharedSequence:
    """Call weft.context_attention; plain keys and values are shared first."""
    cut = query.cut
    sharing = cut.sharing
    if isinstance(sharing.ranks, Unit):
        if dropout:
            raise ValueError(
                "invariant: an attention with a window, softcap or sinks does not drop weights over units of the "
                "sequence: set its dropout to 0"
            )
        return _attend_in_unit(query, key, value, sharing.ranks, **mask)
    key_layout = SequenceLayout(key.size(2), sharing.ranks.world_size, sharing.layout)
    parts = [
        x.local if isinstance(x, SharedSequence) else SequenceCut(sharing, key_layout).pick(x, 2)
        for x in (query, key, value)
    ]
    options: dict[str, Any] = {"method": sharing.method, "deterministic": sharing.deterministic, **mask}
    if dropout:
        out = context_attention(*parts, group=sharing.ranks, dropout=dropout, layout=sharing.layout, **options)
    else:
        out = planned_attention(*parts, ranks=sharing.ranks, queries=cut.layout, keys=key_layout, **options)
    if running() is not None:
        _note_method(parts, cut.layout, key_layout, sharing, mask)
    return query.like(out)


def _note_method(parts, queries: SequenceLayout, keys: SequenceLayout, sharing: Sharing, mask) -> None:
    q, k, v = cast_operands(*parts)
    assert q is not None and k is not None and v is not None
    sizes = (q.size(0), q.size(1), k.size(1), q.size(3), v.size(3), q.element_size())
    call = AttentionCall(queries, keys, *sizes, sharing.ranks.world_size, 1)
    window = mask.get("window")
    rules = Rules(left=None if window is None else window - 1, right=0 if mask.get("causal") else None)
    note("attention", f"{sharing.layout}, {choose(call, rules, False, sharing.method)}; {last_algorithm()}")


def _attend_in_unit(
    query: SharedSequence,
    key,
    value,
    unit: Unit,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    sinks=None,
) -> SharedSequence:
    note("attention", _IN_UNITS)
    q, k, v = cast_operands(query.local, *(unit.used(wholes(x)) for x in (key, value)))
    assert q is not None and k is not None and v is not None
    rules = Rules(
        left=None if window is None else window - 1, right=0 if causal else None, scale=scale, softcap=softcap
    )
    start = sum(query.cut.sizes[: unit.rank])
    with without_autocast(q.device.type):
        return query.like(unit_attention(q, k, v, rules, start, None if sinks is None else unit.used(sinks)))


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@rule_for_all_units(F.multi_head_attention_forward)
def multi_head_attention_forward(func, *args, **kwargs):
    """Compute nn.MultiheadAttention on [L, N, E]: projections by position, then attention as above."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    a = call.arguments
    query, key, value, heads = a["query"], a["key"], a["value"], a["num_heads"]
    odd = ("bias_k", "bias_v", "static_k", "static_v")
    if query.ndim != 3 or a["need_weights"] or a["add_zero_attn"] or any(a[name] is not None for name in odd):
        return NotImplemented
    mask, is_causal = a["attn_mask"], a["is_causal"]
    if is_causal and mask is None:
        raise ValueError("MultiheadAttention: is_causal=True is a hint about attn_mask; pass that too")
    if is_causal and a["key_padding_mask"] is None:
        mask = None
    else:
        is_causal, mask = False, _joined(mask, a["key_padding_mask"], query, key, heads)
    if a["use_separate_proj_weight"]:
        weights = [a[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = a["in_proj_weight"].chunk(3)
    biases = [None] * 3 if a["in_proj_bias"] is None else a["in_proj_bias"].chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # [N, H, L, D]
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    dropout = a["dropout_p"] if a["training"] else 0.0
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), a["out_proj_weight"], a["out_proj_bias"]), None


def _joined(mask, padding, query, key, heads: int):
    """Join MultiheadAttention's two masks (True hides) to the one of scaled_dot_product_attention (True shows)."""
    if mask is not None and mask.ndim == 3:
        mask = mask.view(query.size(1), heads, query.size(0), key.size(0))
    if padding is not None:
        padding = wholes(padding).view(-1, 1, 1, key.size(0))
    masks = [x for x in (mask, padding) if x is not None]
    if all(x.dtype == torch.bool for x in masks):
        masks = [~x for x in masks]
        return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
    added = [
        torch.zeros_like(x, dtype=query.dtype).masked_fill(x, -torch.inf) if x.dtype == torch.bool else x for x in masks
    ]
    return sum(added[1:], added[0])
