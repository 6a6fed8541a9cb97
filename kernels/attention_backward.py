"""The kernels of attention's backward; the mathematics and the launchers are in attention.py."""

from weft.kernels import launch
from weft.kernels.attention_scores import (
    NUMBERS,
    block_of,
    capped,
    kept_pairs,
    load_tile,
    partial_tile,
    seed_of,
    seen_tiles,
    visible_pairs,
    whole_tile,
)
from weft.kernels.language import tl, triton
from weft.kernels.launch import LOG2E


@triton.jit(do_not_specialize=["heads", "queries", "tiles"])
def delta_kernel(
    out,  # [B, H, Sq, Dv]
    dout,  # [B, H, Sq, Dv]
    delta,  # [B, H, Sq] fp32, contiguous
    heads, queries, value_dim, tiles,
    stride_ob, stride_oh, stride_os, stride_od,
    stride_gb, stride_gh, stride_gs, stride_gd,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) % tiles) * ROWS
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    o = load_tile(out, batch, head, row, queries, value_dim, stride_ob, stride_oh, stride_os, stride_od,
              ROWS, BLOCK_D, True, False)  # fmt: skip
    g = load_tile(dout, batch, head, row, queries, value_dim, stride_gb, stride_gh, stride_gs, stride_gd,
              ROWS, BLOCK_D, True, False)  # fmt: skip
    rows = row + tl.arange(0, ROWS)
    total = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + (batch.to(tl.int64) * heads + head) * queries + rows, total, mask=rows < queries)


@triton.jit
def _of_rows(pointer, rows, end):
    """Load a number for each row, for rows from `end` on the last one's; nothing is made of those."""
    return tl.load(pointer + tl.minimum(rows, end - 1))


@triton.jit
def _add_rows(target, tile, row, end, first_column, width, stride_row, stride_column, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Write the tile to rows `row` to `end` of [S, width], or add it to them; in strips of 64 columns."""
    if COLUMNS > 64:
        left, right = launch.halves(tile, ROWS, COLUMNS)
        half: tl.constexpr = COLUMNS // 2
        _add_rows(target, left, row, end, first_column, width, stride_row, stride_column, ROWS, half, ADD)
        _add_rows(target, right, row, end, first_column + half, width, stride_row, stride_column, ROWS, half, ADD)
    else:
        r = tl.arange(0, ROWS)
        c = first_column + tl.arange(0, COLUMNS)
        pointers = target + row.to(tl.int64) * stride_row + (r[:, None] * stride_row + c[None, :] * stride_column)
        inside = (row + r < end)[:, None] & (c < width)[None, :]
        if ADD:
            tile += tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, launch.rounded(tile, target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def dkdv_kernel(
    q,  # [B, H, Sq, D]
    k,  # [B, Hkv, Sk, D]
    v,  # [B, Hkv, Sk, Dv]
    dout,  # [B, H, Sq, Dv]
    query_documents,  # [B, Sq] or None
    key_documents,  # [B, Sk] or None
    heads, kv_heads, queries, keys, head_dim, value_dim,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    stride_query_document_b, stride_query_document, stride_key_document_b, stride_key_document,
    q_start, q_length, q_second_start, q_second_length,
    k_start, k_length, k_second_start, k_second_length,
    left, right, scale, softcap, dropout, dropped, seed_low, seed_high, head_start,
    lse,  # [B, H, Sq] fp32, contiguous
    delta,  # [B, H, Sq] fp32, contiguous
    dk,  # [B, Hkv, Sk, D]
    dv,  # [B, Hkv, Sk, Dv]
    stride_dkb, stride_dkh, stride_dks, stride_dkd,
    stride_dvb, stride_dvh, stride_dvs, stride_dvd,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ADD: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv with all tiles transposed, keys by queries.

    So no product takes a transposed operand from registers: Triton from 3.4 on miscompiled dot(trans(ds), q) on Hopper
    (flash-linear-attention issues 826 and 984).
    """
    seed = seed_of(seed_low, seed_high)
    tiles = tl.cdiv(k_length, BLOCK_N) + tl.cdiv(k_second_length, BLOCK_N)
    tile = tl.program_id(0) % tiles  # early keys first: with a causal mask the most queries see them
    kv_head = (tl.program_id(0) // tiles) % kv_heads
    batch = tl.program_id(0) // tiles // kv_heads
    group = heads // kv_heads
    wide_kv_head, wide_batch = kv_head.to(tl.int64), batch.to(tl.int64)
    row, end, second = block_of(tile, k_length, k_second_length, BLOCK_N)
    lowest = row + tl.where(second, k_second_start - k_length, k_start)
    highest = tl.minimum(lowest + BLOCK_N, lowest + end - row) - 1
    if query_documents is not None:
        query_documents += wide_batch * stride_query_document_b
        key_documents += wide_batch * stride_key_document_b
    k_rows = (row + tl.arange(0, BLOCK_N))[:, None]
    k_position = (lowest + tl.arange(0, BLOCK_N))[:, None]
    k_tile = load_tile(k, batch, kv_head, row, end, head_dim, stride_kb, stride_kh, stride_ks, stride_kd,
                   BLOCK_N, BLOCK_D, True, DESCRIPTORS)  # fmt: skip
    v_tile = load_tile(v, batch, kv_head, row, end, value_dim, stride_vb, stride_vh, stride_vs, stride_vd,
                   BLOCK_N, BLOCK_DV, True, DESCRIPTORS)  # fmt: skip
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    # Queries see a key from up to `left` positions ahead of it and `right` behind it.
    a0, b0, c0, d0, a1, b1, c1, whole, partial = seen_tiles(
        q_start, q_length, q_second_start, q_second_length, lowest, highest, right, left,
        query_documents is not None, BLOCK_M,
    )  # fmt: skip
    # One loop over heads and tiles: two nested loops would spill dk and dv.
    number, head = 0, kv_head * group
    for _ in range(group * whole):
        of_head = (wide_batch * heads + head) * queries
        query_tile, in_second = whole_tile(number, b0, c0, b1)
        q_row = query_tile * BLOCK_M + tl.where(in_second, q_length, 0)
        q_position = query_tile * BLOCK_M + tl.where(in_second, q_second_start, q_start) + tl.arange(0, BLOCK_M)
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, k_tile, v_tile, q, dout, head, lse + of_head, delta + of_head, q_row, queries, 0,
            q_position[None, :], k_position, k_rows, end, query_documents, key_documents,
            stride_query_document, stride_key_document, head_dim, value_dim,
            stride_qb, stride_qh, stride_qs, stride_qd, stride_gb, stride_gh, stride_gs, stride_gd,
            left, right, scale, softcap, dropout, dropped, seed, head_start + head, batch,
            SOFTCAP, DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, DESCRIPTORS,
        )  # fmt: skip
        number, head = _next(number, head, whole)
    number, head = 0, kv_head * group
    for _ in range(group * partial):
        of_head = (wide_batch * heads + head) * queries
        query_tile, in_second = partial_tile(number, a0, b0, c0, d0, a1, b1, c1)
        q_row = query_tile * BLOCK_M + tl.where(in_second, q_length, 0)
        q_position = query_tile * BLOCK_M + tl.where(in_second, q_second_start, q_start) + tl.arange(0, BLOCK_M)
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, k_tile, v_tile, q, dout, head, lse + of_head, delta + of_head, q_row,
            tl.where(in_second, queries, q_length),
            tl.where(in_second, q_second_start + q_second_length, q_start + q_length),
            q_position[None, :], k_position, k_rows, end, query_documents, key_documents,
            stride_query_document, stride_key_document, head_dim, value_dim,
            stride_qb, stride_qh, stride_qs, stride_qd, stride_gb, stride_gh, stride_gs, stride_gd,
            left, right, scale, softcap, dropout, dropped, seed, head_start + head, batch,
            SOFTCAP, DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True, DESCRIPTORS,
        )  # fmt: skip
        number, head = _next(number, head, partial)
    dk += wide_batch * stride_dkb + wide_kv_head * stride_dkh
    dv += wide_batch * stride_dvb + wide_kv_head * stride_dvh
    _add_rows(dk, dk_tile * scale, row, end, 0, head_dim, stride_dks, stride_dkd, BLOCK_N, BLOCK_D, ADD)
    _add_rows(dv, dv_tile, row, end, 0, value_dim, stride_dvs, stride_dvd, BLOCK_N, BLOCK_DV, ADD)


@triton.jit
def _next(number, head, tiles):
    """Return the next of a head's tiles, or the first of the next head."""
    last = number == tiles - 1
    return tl.where(last, 0, number + 1), tl.where(last, head + 1, head)


@triton.jit
def _add_queries(
    dk_tile, dv_tile, k_tile, v_tile, q, dout, head, lse, delta, q_row, q_end, q_stop, q_position, k_position,
    k_rows, k_end,
    query_documents, key_documents, stride_query_document, stride_key_document, head_dim, value_dim,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_gb, stride_gh, stride_gs, stride_gd,
    left, right, scale, softcap, dropout, dropped, seed, numbered_head, batch,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk / scale and dv."""
    q_tile = load_tile(q, batch, head, q_row, q_end, head_dim, stride_qb, stride_qh, stride_qs, stride_qd,
                   BLOCK_M, BLOCK_D, MASKED, DESCRIPTORS)  # fmt: skip
    dout_tile = load_tile(dout, batch, head, q_row, q_end, value_dim, stride_gb, stride_gh, stride_gs, stride_gd,
                      BLOCK_M, BLOCK_DV, MASKED, DESCRIPTORS)  # fmt: skip
    rows = q_row + tl.arange(0, BLOCK_M)
    against = _of_rows(lse, rows, q_end) * LOG2E
    delta_row = _of_rows(delta, rows, q_end)
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    s, factor, slope = capped(launch.dot(k_tile, tl.trans(q_tile), zeros, "ieee"), scale, softcap, SOFTCAP)
    p = tl.exp2(s * factor - against[None, :])
    if MASKED:
        visible = visible_pairs(k_position, q_position, right, left, q_stop, key_documents, query_documents,
                           stride_key_document, stride_query_document, k_rows, k_end, rows[None, :], q_end)  # fmt: skip
        p = tl.where(visible, p, 0.0)  # also in a row that sees no key: its lse is -inf, and p was inf
    dp = launch.dot(v_tile, tl.trans(dout_tile), zeros, "ieee")
    kept = p
    if DROPOUT:
        factor = kept_pairs(q_position, k_position, numbered_head, batch, seed, dropped, dropout)
        kept = p * factor
        dp *= factor
    dv_tile = launch.dot(launch.rounded(kept, dout_tile.dtype), dout_tile, dv_tile, "ieee")
    ds = p * (dp - delta_row[None, :]) * slope
    dk_tile = launch.dot(launch.rounded(ds, q_tile.dtype), q_tile, dk_tile, "ieee")
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=NUMBERS)
def dq_kernel(
    q,  # [B, H, Sq, D]
    k,  # [B, Hkv, Sk, D]
    v,  # [B, Hkv, Sk, Dv]
    dout,  # [B, H, Sq, Dv]
    query_documents,  # [B, Sq] or None
    key_documents,  # [B, Sk] or None
    heads, kv_heads, queries, keys, head_dim, value_dim,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    stride_query_document_b, stride_query_document, stride_key_document_b, stride_key_document,
    q_start, q_length, q_second_start, q_second_length,
    k_start, k_length, k_second_start, k_second_length,
    left, right, scale, softcap, dropout, dropped, seed_low, seed_high, head_start,
    lse,  # [B, H, Sq] fp32, contiguous
    delta,  # [B, H, Sq] fp32, contiguous
    dq,  # [B, H, Sq, D]
    stride_dqb, stride_dqh, stride_dqs, stride_dqd,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ADD: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    seed = seed_of(seed_low, seed_high)
    tiles = tl.cdiv(q_length, BLOCK_M) + tl.cdiv(q_second_length, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles) % heads
    batch = tl.program_id(0) // tiles // heads
    kv_head = head // (heads // kv_heads)
    wide_head, wide_batch = head.to(tl.int64), batch.to(tl.int64)
    row, end, second = block_of(tile, q_length, q_second_length, BLOCK_M)
    lowest = row + tl.where(second, q_second_start - q_length, q_start)
    highest = tl.minimum(lowest + BLOCK_M, lowest + end - row) - 1
    if query_documents is not None:
        query_documents += wide_batch * stride_query_document_b
        key_documents += wide_batch * stride_key_document_b
    q_rows = row + tl.arange(0, BLOCK_M)
    q_position = (lowest + tl.arange(0, BLOCK_M))[:, None]
    q_tile = load_tile(q, batch, head, row, end, head_dim, stride_qb, stride_qh, stride_qs, stride_qd,
                   BLOCK_M, BLOCK_D, True, DESCRIPTORS)  # fmt: skip
    dout_tile = load_tile(dout, batch, head, row, end, value_dim, stride_gb, stride_gh, stride_gs, stride_gd,
                      BLOCK_M, BLOCK_DV, True, DESCRIPTORS)  # fmt: skip
    of_head = (wide_batch * heads + wide_head) * queries
    against = _of_rows(lse + of_head, q_rows, end) * LOG2E
    delta_row = _of_rows(delta + of_head, q_rows, end)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    a0, b0, c0, d0, a1, b1, c1, whole, partial = seen_tiles(
        k_start, k_length, k_second_start, k_second_length, lowest, highest, left, right,
        query_documents is not None, BLOCK_N,
    )  # fmt: skip
    for number in range(whole):
        key_tile, in_second = whole_tile(number, b0, c0, b1)
        k_row = key_tile * BLOCK_N + tl.where(in_second, k_length, 0)
        k_position = key_tile * BLOCK_N + tl.where(in_second, k_second_start, k_start) + tl.arange(0, BLOCK_N)
        dq_tile = _add_keys(
            dq_tile, q_tile, dout_tile, k, v, kv_head, against, delta_row, k_row, keys, 0, q_position,
            k_position[None, :], q_rows[:, None], end, query_documents, key_documents,
            stride_query_document, stride_key_document, head_dim, value_dim,
            stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
            left, right, scale, softcap, dropout, dropped, seed, head_start + head, batch,
            SOFTCAP, DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, DESCRIPTORS,
        )  # fmt: skip
    for number in range(partial):
        key_tile, in_second = partial_tile(number, a0, b0, c0, d0, a1, b1, c1)
        k_row = key_tile * BLOCK_N + tl.where(in_second, k_length, 0)
        k_position = key_tile * BLOCK_N + tl.where(in_second, k_second_start, k_start) + tl.arange(0, BLOCK_N)
        dq_tile = _add_keys(
            dq_tile, q_tile, dout_tile, k, v, kv_head, against, delta_row, k_row, tl.where(in_second, keys, k_length),
            tl.where(in_second, k_second_start + k_second_length, k_start + k_length), q_position, k_position[None, :],
            q_rows[:, None], end, query_documents, key_documents, stride_query_document, stride_key_document,
            head_dim, value_dim, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
            left, right, scale, softcap, dropout, dropped, seed, head_start + head, batch,
            SOFTCAP, DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True, DESCRIPTORS,
        )  # fmt: skip
    dq += wide_batch * stride_dqb + wide_head * stride_dqh
    _add_rows(dq, dq_tile * scale, row, end, 0, head_dim, stride_dqs, stride_dqd, BLOCK_M, BLOCK_D, ADD)


@triton.jit
def _add_keys(
    dq_tile, q_tile, dout_tile, k, v, kv_head, against, delta_row, k_row, k_end, k_stop, q_position,
    k_position, q_rows, q_end,
    query_documents, key_documents, stride_query_document, stride_key_document, head_dim, value_dim,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    left, right, scale, softcap, dropout, dropped, seed, head, batch,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq / scale."""
    k_tile = load_tile(k, batch, kv_head, k_row, k_end, head_dim, stride_kb, stride_kh, stride_ks, stride_kd,
                   BLOCK_N, BLOCK_D, MASKED, DESCRIPTORS)  # fmt: skip
    v_tile = load_tile(v, batch, kv_head, k_row, k_end, value_dim, stride_vb, stride_vh, stride_vs, stride_vd,
                   BLOCK_N, BLOCK_DV, MASKED, DESCRIPTORS)  # fmt: skip
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    s, factor, slope = capped(launch.dot(q_tile, tl.trans(k_tile), zeros, "ieee"), scale, softcap, SOFTCAP)
    p = tl.exp2(s * factor - against[:, None])
    if MASKED:
        k_rows = (k_row + tl.arange(0, BLOCK_N))[None, :]
        visible = visible_pairs(q_position, k_position, left, right, k_stop, query_documents, key_documents,
                           stride_query_document, stride_key_document, q_rows, q_end, k_rows, k_end)  # fmt: skip
        p = tl.where(visible, p, 0.0)
    dp = launch.dot(dout_tile, tl.trans(v_tile), zeros, "ieee")
    if DROPOUT:
        dp *= kept_pairs(q_position, k_position, head, batch, seed, dropped, dropout)
    ds = p * (dp - delta_row[:, None]) * slope
    return launch.dot(launch.rounded(ds, k_tile.dtype), k_tile, dq_tile, "ieee")
