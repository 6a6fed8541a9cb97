"""The kernels of attention's backward; the mathematics and the launchers are in attention.py."""

from weft.kernels import launch
from weft.kernels.attention_scores import (
    NUMBERS,
    capped,
    kept_pairs,
    load_tile,
    own_tile,
    query_tile,
    seed_of,
    seen_tile,
    seen_tiles,
    tiles_of,
    visible_pairs,
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
    o = load_tile(out, batch, head, row, queries, value_dim, (stride_ob, stride_oh, stride_os, stride_od),
                  ROWS, BLOCK_D, True, False)  # fmt: skip
    g = load_tile(dout, batch, head, row, queries, value_dim, (stride_gb, stride_gh, stride_gs, stride_gd),
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
    query_runs = q_start, q_length, q_second_start, q_second_length
    key_runs = k_start, k_length, k_second_start, k_second_length
    tiles = tiles_of(key_runs, BLOCK_N)
    tile = tl.program_id(0) % tiles  # early keys first: with a causal mask the most queries see them
    kv_head = (tl.program_id(0) // tiles) % kv_heads
    batch = tl.program_id(0) // tiles // kv_heads
    group = heads // kv_heads
    wide_kv_head, wide_batch = kv_head.to(tl.int64), batch.to(tl.int64)
    row, end, lowest, highest = own_tile(tile, key_runs, BLOCK_N)
    if query_documents is not None:
        query_documents += wide_batch * stride_query_document_b
        key_documents += wide_batch * stride_key_document_b
    k_rows = (row + tl.arange(0, BLOCK_N))[:, None]
    k_position = (lowest + tl.arange(0, BLOCK_N))[:, None]
    k_tile = load_tile(k, batch, kv_head, row, end, head_dim, (stride_kb, stride_kh, stride_ks, stride_kd),
                       BLOCK_N, BLOCK_D, True, DESCRIPTORS)  # fmt: skip
    v_tile = load_tile(v, batch, kv_head, row, end, value_dim, (stride_vb, stride_vh, stride_vs, stride_vd),
                       BLOCK_N, BLOCK_DV, True, DESCRIPTORS)  # fmt: skip
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # without the scale
    dv_tile = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    # Queries see a key from up to `left` positions ahead of it and `right` behind it.
    bounds, whole, partial = seen_tiles(query_runs, lowest, highest, right, left, query_documents is not None, BLOCK_M)
    for MASKED in tl.static_range(2):  # whole tiles, then partial ones
        # One loop over heads and tiles: two nested loops would spill dk and dv.
        of_head = partial if MASKED else whole
        number, head = 0, kv_head * group
        for _ in range(group * of_head):
            before = (wide_batch * heads + head) * queries  # of earlier heads
            q_row, q_position, q_end, q_stop = seen_tile(number, bounds, query_runs, queries, MASKED, BLOCK_M)
            lse_here, delta_here = lse + before, delta + before
            q_position, numbered_head = q_position[None, :], head_start + head
            q_tile = load_tile(q, batch, head, q_row, q_end, head_dim, (stride_qb, stride_qh, stride_qs, stride_qd),
                               BLOCK_M, BLOCK_D, MASKED, DESCRIPTORS)  # fmt: skip
            dout_tile = load_tile(
                dout, batch, head, q_row, q_end, value_dim, (stride_gb, stride_gh, stride_gs, stride_gd),
                BLOCK_M, BLOCK_DV, MASKED, DESCRIPTORS,
            )  # fmt: skip
            rows = q_row + tl.arange(0, BLOCK_M)
            against = _of_rows(lse_here, rows, q_end) * LOG2E
            delta_row = _of_rows(delta_here, rows, q_end)
            zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            s, factor, slope = capped(launch.dot(k_tile, tl.trans(q_tile), zeros, "ieee"), scale, softcap, SOFTCAP)
            p = tl.exp2(s * factor - against[None, :])
            if MASKED:
                visible = visible_pairs(
                    (k_position, k_rows, end), (q_position, rows[None, :], q_end), right, left, q_stop,
                    (key_documents, stride_key_document), (query_documents, stride_query_document),
                )  # fmt: skip
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
            last = number == of_head - 1
            number, head = tl.where(last, 0, number + 1), tl.where(last, head + 1, head)
    dk += wide_batch * stride_dkb + wide_kv_head * stride_dkh
    dv += wide_batch * stride_dvb + wide_kv_head * stride_dvh
    _add_rows(dk, dk_tile * scale, row, end, 0, head_dim, stride_dks, stride_dkd, BLOCK_N, BLOCK_D, ADD)
    _add_rows(dv, dv_tile, row, end, 0, value_dim, stride_dvs, stride_dvd, BLOCK_N, BLOCK_DV, ADD)


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
    query_runs = q_start, q_length, q_second_start, q_second_length
    key_runs = k_start, k_length, k_second_start, k_second_length
    tile, head, kv_head, batch = query_tile(query_runs, heads, kv_heads, BLOCK_M)
    wide_head, wide_batch = head.to(tl.int64), batch.to(tl.int64)
    row, end, lowest, highest = own_tile(tile, query_runs, BLOCK_M)
    if query_documents is not None:
        query_documents += wide_batch * stride_query_document_b
        key_documents += wide_batch * stride_key_document_b
    q_rows = row + tl.arange(0, BLOCK_M)
    q_position = (lowest + tl.arange(0, BLOCK_M))[:, None]
    q_tile = load_tile(q, batch, head, row, end, head_dim, (stride_qb, stride_qh, stride_qs, stride_qd),
                       BLOCK_M, BLOCK_D, True, DESCRIPTORS)  # fmt: skip
    dout_tile = load_tile(dout, batch, head, row, end, value_dim, (stride_gb, stride_gh, stride_gs, stride_gd),
                          BLOCK_M, BLOCK_DV, True, DESCRIPTORS)  # fmt: skip
    of_head = (wide_batch * heads + wide_head) * queries
    against = _of_rows(lse + of_head, q_rows, end) * LOG2E
    delta_row = _of_rows(delta + of_head, q_rows, end)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # without the scale
    bounds, whole, partial = seen_tiles(key_runs, lowest, highest, left, right, query_documents is not None, BLOCK_N)
    for MASKED in tl.static_range(2):  # whole tiles, then partial ones
        for number in range(partial if MASKED else whole):
            k_row, k_position, k_end, k_stop = seen_tile(number, bounds, key_runs, keys, MASKED, BLOCK_N)
            k_position, held = k_position[None, :], (q_position, q_rows[:, None], end)
            numbered_head = head_start + head
            k_tile = load_tile(k, batch, kv_head, k_row, k_end, head_dim, (stride_kb, stride_kh, stride_ks, stride_kd),
                               BLOCK_N, BLOCK_D, MASKED, DESCRIPTORS)  # fmt: skip
            v_tile = load_tile(v, batch, kv_head, k_row, k_end, value_dim, (stride_vb, stride_vh, stride_vs, stride_vd),
                               BLOCK_N, BLOCK_DV, MASKED, DESCRIPTORS)  # fmt: skip
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            s, factor, slope = capped(launch.dot(q_tile, tl.trans(k_tile), zeros, "ieee"), scale, softcap, SOFTCAP)
            p = tl.exp2(s * factor - against[:, None])
            if MASKED:
                moving = k_position, (k_row + tl.arange(0, BLOCK_N))[None, :], k_end
                visible = visible_pairs(held, moving, left, right, k_stop, (query_documents, stride_query_document),
                                        (key_documents, stride_key_document))  # fmt: skip
                p = tl.where(visible, p, 0.0)
            dp = launch.dot(dout_tile, tl.trans(v_tile), zeros, "ieee")
            if DROPOUT:
                dp *= kept_pairs(q_position, k_position, numbered_head, batch, seed, dropped, dropout)
            ds = p * (dp - delta_row[:, None]) * slope
            dq_tile = launch.dot(launch.rounded(ds, k_tile.dtype), k_tile, dq_tile, "ieee")
    dq += wide_batch * stride_dqb + wide_head * stride_dqh
    _add_rows(dq, dq_tile * scale, row, end, 0, head_dim, stride_dqs, stride_dqd, BLOCK_M, BLOCK_D, ADD)
