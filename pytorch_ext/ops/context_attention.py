"""context_attention: attention over a sequence split over the ranks, with the result of the unsplit attention.

    ring          keys and values travel, queries stay                      ops/ring_attention.py
    all_gather    keys and values are gathered, some heads at a time        ops/gathered_attention.py
    ulysses       every rank takes some heads of the whole sequence         ops/head_exchange.py
    a mesh        ulysses along its last dimension, the ring along the first

All are schedules of one chunk primitive (ops/attention_chunk.py), with the state in fp32 and one rounding.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.arguments import check_choice
from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.kernels.attention_rules import Rules
from weft.ops.autocast import autocasts, cast_operands, without_autocast
from weft.ops.gathered_attention import GatheredAttentionFunction
from weft.ops.head_exchange import to_heads, to_sequence
from weft.ops.invariant import Units, used_by_units
from weft.ops.mappings import gather, split
from weft.ops.ring_attention import RingAttentionFunction, RingSchedule, last_step
from weft.ops.sequence_layout import LAYOUTS, SequenceLayout
from weft.ops.unit_attention import NoRing, unit_attention
from weft.rng import next_seed
from weft.sharding.sizes import Heads

METHODS = ("ring", "all_gather", "ulysses", "auto")


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    document_ids: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    method: str = "auto",
    layout: str = "zigzag",
    deterministic: bool = True,
    invariant: int | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k.T, masked) v over a sequence that is split over the ranks; differentiable.

    Parts of the sequence are those of `weft.shard_sequence`. Queries and keys may be sequences of different lengths;
    both start at position 0. Under torch.autocast, q, k and v are cast as for torch's scaled_dot_product_attention.

    Args:
        q: [batch, heads, S_r, head_dim], this rank's queries, in bf16, fp16 or fp32.
        k: [batch, kv_heads, Sk_r, head_dim], this rank's keys; heads is a multiple of kv_heads.
        v: as k, with a head_dim of its own.
        group: the ranks that share the sequence: a ProcessGroup, or a DeviceMesh of one or two dimensions. On a mesh of
            two dimensions, heads are shared along the last and the sequence goes round the ring along the first.
        causal: a query sees keys up to its own position.
        scale: 1 / sqrt(head_dim) by default.
        window: a query sees only the last `window` of these keys, including its own position. Needs causal.
        softcap: scores become softcap tanh(scores / softcap).
        document_ids: [batch, S_r] or [S_r] integers, not decreasing along the sequence; a query sees keys of its own
            document.
        sinks: [heads], learned logits that add to the sum of exponentials and have no value. They and their gradient
            are the same on every rank.
        dropout: probability of dropping an attention weight. The mask depends on the seed and the positions, not on
            the split.
        seed: seed of the dropout mask, the same on every rank. If None, the first rank draws it from torch's generator.
        method: "ring", "all_gather", "ulysses" or "auto". "auto" takes the method that moves the fewest bytes; `choose`
            in this file gives the reason. A mesh of two dimensions takes "auto" only.
        layout: "zigzag" or "contiguous", as the sequence was sharded.
        deterministic: every run gives the same bits. If False, torch's faster functions may run on a GPU: cuDNN
            forward, and a backward that adds in any order.
        invariant: a number of units of positions that the ranks divide: the result and all gradients have the same
            bits on every such number of ranks, one included (docs/invariance.md). Keys and values are gathered. Needs
            layout="contiguous", and a length for which each rank's part is whole units: a multiple of `invariant` is.

    Returns:
        [batch, heads, S_r, head_dim of v], of q's type. Rows that see no key are 0.

    Raises:
        ValueError, TypeError: an invalid call; the error names it on every rank. Raised before any data moves, except
            the descriptions of their parts that the ranks exchange.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()  # 16 positions in all, 8 on each rank
        >>> weft.context_attention(q, k, v, causal=True).shape
        torch.Size([1, 4, 8, 16])
    """
    q, k, v = cast_operands(q, k, v)  # type: ignore[assignment]
    outer, inner = _groups(group)
    _check(q, k, v, causal, window, softcap, document_ids, sinks, dropout, method, layout, inner)
    if invariant is not None:
        _check_units(invariant, outer, inner, method, layout)
    options = (causal, scale, window, softcap, float(dropout), method, layout, document_ids is not None, invariant)
    call = _agree(q, k, v, outer, inner, options, seed if dropout else None)
    rules = Rules(
        left=window - 1 if window is not None else None,
        right=0 if causal else None,
        scale=scale,
        softcap=softcap,
        dropout=float(dropout),
        seed=call.seed,
    )
    documents = _gather_documents(document_ids, q, call, outer, inner)
    with without_autocast(q.device.type):
        if invariant is not None:
            return _in_units(q, k, v, sinks, call, rules, outer, documents, Units(invariant))
        return _attention_for(call, rules, outer, inner, documents, method, deterministic)(q, k, v, sinks)


def planned_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    ranks: Communicator,
    queries: SequenceLayout,
    keys: SequenceLayout,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    method: str = "auto",
    deterministic: bool = True,
) -> torch.Tensor:
    """As `context_attention`, for sequences whose layouts all ranks know.

    Only the first call of a kind is compared over the ranks. Later ones send nothing but keys and values.
    """
    q, k, v = cast_operands(q, k, v)  # type: ignore[assignment]
    options = causal, scale, window, softcap, method, deterministic
    tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, None if sinks is None else sinks.shape
    key = *tensors, queries.length, keys.length, queries.kind, options
    attention = ranks.known_attention.get(key)
    if attention is None:
        _check(q, k, v, causal, window, softcap, None, sinks, 0.0, method, queries.kind, None)
        call = _agree(q, k, v, ranks, None, (*options[:4], 0.0, method, queries.kind, False, None), None)
        rules = Rules(None if window is None else window - 1, 0 if causal else None, scale=scale, softcap=softcap)
        if len(ranks.known_attention) >= _MOST_KNOWN:
            ranks.known_attention.clear()
        attention = ranks.known_attention[key] = _attention_for(call, rules, ranks, None, None, method, deterministic)
    if not autocasts(q.device.type):  # `without_autocast` is four Python calls more
        return attention(q, k, v, sinks)
    with torch.autocast(q.device.type, enabled=False):
        return attention(q, k, v, sinks)


_MOST_KNOWN = 256  # kinds of calls by a group: a sequence that grows has new ones all the time


def _attention_for(
    call: "AttentionCall", rules: Rules, outer, inner, documents, method: str, deterministic: bool
) -> Callable:
    """Return attention(q, k, v, sinks) for a call that the ranks agreed on."""
    decision = choose(call, rules, documents is not None, method)
    library = "deterministic" if deterministic else "any"
    if decision.method == "ulysses" or inner is not None:
        return partial(_by_heads, call, rules, outer, inner, documents, library)
    schedule = _schedule(call, rules, outer, documents, library)
    if decision.method == "all_gather":
        return lambda q, k, v, sinks: GatheredAttentionFunction.apply(q, k, v, sinks, schedule, call.keys)
    return lambda q, k, v, sinks: RingAttentionFunction.apply(q, k, v, sinks, schedule)


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call that all ranks agreed on.

    Attributes:
        queries, keys: layouts of the two sequences over all ranks.
        outer, inner: number of ranks along the ring, and number of ranks that share heads.
    """

    queries: SequenceLayout
    keys: SequenceLayout
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    outer: int
    inner: int
    seed: int = 0


@dataclass(frozen=True)
class Method:
    """The method that runs, and the reason."""

    method: str
    reason: str

    def __str__(self) -> str:
        return f"{self.method}: {self.reason}"


def choose(call: AttentionCall, rules: Rules, packed: bool, method: str = "auto") -> Method:
    """Choose the method that moves the fewest bytes in forward, per rank on average.

    Where the ring moves as many bytes as all_gather the ring runs, since it computes at the same time. Packed documents
    exclude the ring: in every step it would wait for the rank with the longest document.
    """
    if call.inner > 1:
        return Method(
            "ring", "the mesh has two dimensions: heads are shared along the last, the ring goes along the first"
        )
    if method != "auto":
        return Method(method, f'method="{method}"')
    world = call.queries.world_size
    if world == 1:
        return Method("ring", "there is one rank")
    key_bytes = call.batch * call.kv_heads * (call.head_dim + call.value_dim) * call.itemsize
    sees = sees_of(_parts(call.queries, 1), _parts(call.keys, 1), rules, None)
    ring = sum(last_step(sees, s) * key_bytes * call.keys.sizes[s] for s in range(world)) / world
    gathered = key_bytes * call.keys.length * (world - 1) / world
    used = sum(map(len, Heads.over(call.heads, call.kv_heads, world).keys))  # replicated ones too
    query_bytes = call.batch * call.heads * (call.head_dim + call.value_dim) * call.itemsize
    there_and_back = query_bytes * call.queries.length + key_bytes * used / call.kv_heads * call.keys.length
    moved = {"all_gather": gathered, "ulysses": there_and_back * (world - 1) / world**2}
    if not packed:
        moved = {"ring": ring, **moved}
    if call.heads < world:
        del moved["ulysses"]  # some ranks would be idle
    best = min(moved, key=lambda name: moved[name])
    text = ", ".join(f"{name} {bytes / 2**20:.1f}" for name, bytes in moved.items())
    return Method(best, f"MiB that a rank sends forward: {text}" + (" (packed documents: no ring)" if packed else ""))


def _by_heads(call: AttentionCall, rules: Rules, outer, inner, documents, library, q, k, v, sinks) -> torch.Tensor:
    """Run Ulysses, alone or inside a ring."""
    sharing, ring = (inner, outer) if inner is not None else (outer, None)
    heads = Heads.over(call.heads, call.kv_heads, sharing.world_size)
    group = outer.rank if inner is not None else 0
    query_layout, key_layout = (
        _parts(x, call.inner if inner else x.world_size)[group] for x in (call.queries, call.keys)
    )
    ranges = [range(first, first + count) for first, count in heads.queries]
    q_heads = to_heads(q, ranges, sharing, query_layout)
    k_heads, v_heads = (to_heads(x, heads.keys, sharing, key_layout) for x in (k, v))
    first, count = heads.queries[sharing.rank]
    if sinks is not None:
        sinks = split(sinks, 0, sharing, [count for _, count in heads.queries])
    rules = replace(rules, head_start=first)
    if ring is None:
        ring = NoRing()
    if count:
        schedule = _schedule(call, rules, ring, documents, library)
        out = RingAttentionFunction.apply(q_heads, k_heads, v_heads, sinks, schedule)
    else:  # a rank without heads still takes part in every exchange of backward
        used = (x for x in (q_heads, k_heads, v_heads, sinks) if x is not None)
        out = q_heads.new_zeros((*q_heads.shape[:3], v.size(3))) + 0 * sum(x.sum() for x in used)
    return to_sequence(out, heads.queries, sharing, query_layout)


def _check_units(units: int, ranks: Communicator, inner: Communicator | None, method: str, layout: str) -> None:
    if units < 1 or units % ranks.world_size or inner is not None:
        over = "a mesh of two dimensions, which is not supported with it" if inner else f"{ranks.world_size} ranks"
        raise ValueError(f"context_attention: invariant={units} must be a multiple of the number of ranks, got {over}")
    if method not in ("auto", "all_gather") or layout != "contiguous":
        raise ValueError(
            f'context_attention: invariant={units} needs layout="contiguous" and method "all_gather" or "auto", got '
            f"{layout!r} and {method!r}"
        )


def _in_units(q, k, v, sinks, call: AttentionCall, rules: Rules, ranks, documents, units: Units) -> torch.Tensor:
    """Run each of this rank's units of queries against all keys."""
    layout = SequenceLayout(call.queries.length, units.total, "contiguous")
    here = units.here(ranks)
    if layout.length < units.total or layout.among(here).runs != call.queries.among([ranks.rank]).runs:
        raise ValueError(
            f"context_attention: {layout.length} positions are {layout.sizes} in {units.total} units, and the ranks "
            f"have {call.queries.sizes}, which are no whole units; a multiple of {units.total} positions always is"
        )
    k_units, v_units = (used_by_units(ranks, units, gather(x, 2, ranks, call.keys.sizes)) for x in (k, v))
    sinks_units = [None] * len(here) if sinks is None else used_by_units(ranks, units, sinks)
    whole = None if documents is None else call.queries.join(documents, 1)
    q_units = q.split([layout.sizes[number] for number in here], 2)
    outs = []
    for number, q_unit, k_unit, v_unit, own_sinks in zip(here, q_units, k_units, v_units, sinks_units, strict=True):
        start = sum(layout.sizes[:number])
        of_documents = None if whole is None else (whole[:, start : start + layout.sizes[number]], whole)
        outs.append(unit_attention(q_unit, k_unit, v_unit, rules, start, own_sinks, of_documents))
    return torch.cat(outs, 2)


def _parts(layout: SequenceLayout, inner: int) -> list[SequenceLayout]:
    """Return the layout of each group of `inner` consecutive ranks."""
    return [layout.among(range(first, first + inner)) for first in range(0, layout.world_size, inner)]


def _schedule(call: AttentionCall, rules: Rules, ring, documents, library: str) -> RingSchedule:
    """Return the schedule over the ranks of the ring, each with the joined parts of its inner group."""
    inner = call.queries.world_size // ring.world_size
    queries, keys = _parts(call.queries, inner), _parts(call.keys, inner)
    of_groups = None
    if documents is not None:
        of_groups = tuple(group.join([documents[rank] for rank in group.ranks], 1) for group in queries)
    sees = sees_of(queries, keys, rules, of_groups)
    of_queries, of_keys = (tuple(part.positions for part in parts) for parts in (queries, keys))
    return RingSchedule(ring, rules, of_queries, of_keys, of_groups, of_groups, sees, library)


def _groups(group) -> tuple[Communicator, Communicator | None]:
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        first, last = (communicator(group.get_group(dim)) for dim in range(2))
        return (first, last) if last.world_size > 1 else (first, None)
    return communicator(group), None


def _check(q, k, v, causal, window, softcap, document_ids, sinks, dropout, method, layout, inner) -> None:
    """Check the arguments as far as this rank can without the others."""
    op = "context_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; it must be [batch, heads, sequence, head_dim]")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(f"{op}: q is {q.dtype} on {q.device}, {name} is {x.dtype} on {x.device}; make them alike")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{op}: {q.dtype} is not one of torch.float32, torch.bfloat16, torch.float16")
    if q.size(0) != k.size(0) or q.size(3) != k.size(3) or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{op}: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not go together")
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(f"{op}: {q.size(1)} query heads are not a multiple of {k.size(1)} KV heads")
    check_choice(f"{op}: method", method, METHODS)
    check_choice(f"{op}: layout", layout, LAYOUTS)
    if inner is not None and method != "auto":
        raise ValueError(f'{op}: method={method!r} with a mesh of two dimensions, which fixes it; pass "auto"')
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"{op}: window={window} counts back from the query: at least 1, and with causal=True")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap={softcap} must be positive, or None")
    if not 0 <= dropout < 1:
        raise ValueError(f"{op}: dropout={dropout} must be at least 0 and less than 1")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"{op}: sinks has shape {tuple(sinks.shape)}; it must be [heads], [{q.size(1)}]")
    if document_ids is not None:
        if document_ids.shape not in (q.shape[2:3], (q.size(0), q.size(2))) or document_ids.is_floating_point():
            raise ValueError(
                f"{op}: document_ids {document_ids.dtype} {tuple(document_ids.shape)} must be integers [batch, S_r] or "
                f"[S_r], [{q.size(0)}, {q.size(2)}]"
            )
        if k.size(2) != q.size(2):
            raise ValueError(
                f"{op}: document_ids need queries and keys of one sequence, got {q.size(2)} and {k.size(2)}"
            )


_AGREED = ["queries", "keys", "batch", "heads", "KV heads", "head_dim", "head_dim of v", "type and options"]


def _agree(q, k, v, outer: Communicator, inner: Communicator | None, options: tuple, seed: int | None) -> AttentionCall:
    """Compare the ranks' arguments on every rank and return the agreed call."""
    mark = zlib.crc32(repr((q.dtype, q.device.type, options, seed)).encode())
    drawn = next_seed() if seed is None and options[4] else seed or 0
    local = [q.size(2), k.size(2), q.size(0), q.size(1), k.size(1), q.size(3), v.size(3), mark, drawn]
    rows = _gather_rows(local, outer, inner, q.device)
    for column, name in list(enumerate(_AGREED))[2:]:
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            difference = "do not agree in" if column == 7 else f"bring {values} as"
            raise ValueError(f"context_attention: the ranks {difference} {name}; every rank must pass the same")
    layouts = []
    for column in range(2):
        sizes = [row[column] for row in rows]
        layout = SequenceLayout(sum(sizes), len(sizes), options[6])
        if layout.sizes != sizes:
            raise ValueError(
                f"context_attention: the ranks bring {sizes} {_AGREED[column]}; {layout.kind} shards of "
                f"{layout.length} are {layout.sizes}: cut the sequence with weft.shard_sequence"
            )
        layouts.append(layout)
    worlds = outer.world_size, inner.world_size if inner is not None else 1
    batch, heads, kv_heads, head_dim, value_dim = rows[0][2:7]
    queries, keys = layouts
    return AttentionCall(
        queries, keys, batch, heads, kv_heads, head_dim, value_dim, q.element_size(), *worlds, seed=rows[0][8]
    )


def _gather_rows(local: list[int], outer: Communicator, inner: Communicator | None, device) -> list[list[int]]:
    """Return every rank's numbers, in rank order."""
    table = torch.tensor([local], device=outer.device_of_numbers(device))
    for ranks in (inner, outer):
        if ranks is not None and ranks.world_size > 1:
            table = ranks.all_gather(table, 0, [table.size(0)] * ranks.world_size)
    return table.tolist()


def _gather_documents(ids, q, call: AttentionCall, outer: Communicator, inner: Communicator | None):
    """Return the documents of each rank, [B, positions]; raise ValueError on every rank where they decrease."""
    if ids is None:
        return None
    parts, layout = ids.expand(q.size(0), -1).contiguous(), call.queries
    groups = _parts(layout, call.inner)
    if inner is not None:
        parts = inner.all_gather(parts, 1, groups[outer.rank].sizes)
    parts = outer.all_gather(parts, 1, [sum(group.sizes) for group in groups])
    of_ranks = parts.split(layout.sizes, 1)
    whole = layout.join(of_ranks, 1)
    if (whole.diff(dim=1) < 0).any():
        raise ValueError("context_attention: document_ids decrease along the sequence; number documents as they come")
    return of_ranks


def sees_of(
    queries: list[SequenceLayout], keys: list[SequenceLayout], rules: Rules, documents
) -> tuple[tuple[bool, ...], ...]:
    """Return sees, where sees[r][s] is True if some query of rank r may see some key of rank s."""
    spans: list | None = None
    if documents is not None:
        spans = [(ids.amin(1), ids.amax(1)) if ids.size(1) else None for ids in documents]

    def positions_meet(query_part: SequenceLayout, key_part: SequenceLayout) -> bool:
        for start, length in query_part.runs:
            for key_start, key_length in key_part.runs:
                ahead = rules.right is not None and key_start > start + length - 1 + rules.right
                behind = rules.left is not None and key_start + key_length - 1 < start - rules.left
                if not ahead and not behind:
                    return True
        return False

    def documents_meet(r: int, s: int) -> bool:
        if spans is None:
            return True
        if spans[r] is None or spans[s] is None:
            return False
        (low, high), (key_low, key_high) = spans[r], spans[s]
        return bool(((low <= key_high) & (key_low <= high)).any())

    return tuple(
        tuple(positions_meet(query_part, key_part) and documents_meet(r, s) for s, key_part in enumerate(keys))
        for r, query_part in enumerate(queries)
    )
