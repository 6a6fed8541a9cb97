"""Parts that the attention kernels share: the tiles that are seen, loads of a tile, and the treatment of scores.

The mathematics is in attention.py.
"""

from weft.kernels.language import tl, triton
from weft.kernels.launch import LOG2E

_ROUNDS: tl.constexpr = tl.constexpr(7)
# Arguments of the kernels that no memory access depends on: one variant serves all their values.
NUMBERS = (
    *("heads", "kv_heads", "queries", "keys", "dropped", "seed_low", "seed_high", "head_start", "left", "right"),
    *("stride_query_document_b", "stride_query_document", "stride_key_document_b", "stride_key_document"),
    *("q_start", "q_length", "q_second_start", "q_second_length"),
    *("k_start", "k_length", "k_second_start", "k_second_length"),
)


@triton.jit
def own_tile(unit, runs, BLOCK: tl.constexpr):
    """Return the unit-th tile of two runs of rows that do not overlap.

    Args:
        runs: the first position of a run and its length, then those of the second run.

    Returns:
        The tile's first row, the end row of its run, and the positions of its first and last row.
    """
    start, length, second_start, second_length = runs
    tiles = tl.cdiv(length, BLOCK)
    second = unit >= tiles
    row = tl.where(second, length + (unit - tiles) * BLOCK, unit * BLOCK)
    end = tl.where(second, length + second_length, length)
    lowest = row + tl.where(second, second_start - length, start)
    highest = tl.minimum(lowest + BLOCK, lowest + end - row) - 1
    return row, end, lowest, highest


@triton.jit
def tiles_of(runs, BLOCK: tl.constexpr):
    """Return the number of tiles of two runs of rows."""
    _, length, _, second_length = runs
    return tl.cdiv(length, BLOCK) + tl.cdiv(second_length, BLOCK)


@triton.jit
def query_tile(runs, heads, kv_heads, BLOCK: tl.constexpr):
    """Return the tile of queries of this program, its head, its KV head and its batch.

    Later tiles run first: with a causal mask they are the longest.
    """
    tiles = tiles_of(runs, BLOCK)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles) % heads
    batch = tl.program_id(0) // tiles // heads
    kv_head = head // (heads // kv_heads)
    return tile, head, kv_head, batch


@triton.jit
def _reach(start, length, lowest, highest, behind, ahead, ALL_PARTIAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bounds of a run's tiles that the positions lowest to highest see.

    Each position sees `behind` back and `ahead` on. Some of the positions see the tiles first to last; all of them see
    the tiles whole_first to whole_last.
    """
    some = tl.maximum(lowest - behind - start, 0)
    end = tl.minimum(highest + ahead + 1 - start, length)
    first = some // BLOCK
    last = tl.where(end > some, tl.cdiv(tl.maximum(end, 0), BLOCK), first)
    whole_first = tl.cdiv(tl.maximum(highest - behind - start, 0), BLOCK)
    whole_last = tl.maximum(tl.minimum(lowest + ahead + 1 - start, length), 0) // BLOCK
    whole_first = tl.minimum(tl.maximum(whole_first, first), last)
    whole_last = tl.minimum(tl.maximum(whole_last, whole_first), last)
    if ALL_PARTIAL:
        whole_last = whole_first
    return first, whole_first, whole_last, last


@triton.jit
def seen_tiles(runs, lowest, highest, behind, ahead, ALL_PARTIAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the seen tiles of both runs as two lists, whole and partial ones.

    The result has the bounds that `seen_tile` takes, then the lengths of the two lists.
    """
    start, length, second_start, second_length = runs
    a0, b0, c0, d0 = _reach(start, length, lowest, highest, behind, ahead, ALL_PARTIAL, BLOCK)
    a1, b1, c1, d1 = _reach(second_start, second_length, lowest, highest, behind, ahead, ALL_PARTIAL, BLOCK)
    whole = c0 - b0 + c1 - b1
    partial = b0 - a0 + d0 - c0 + b1 - a1 + d1 - c1
    return (a0, b0, c0, d0, a1, b1, c1), whole, partial


@triton.jit
def seen_tile(number, bounds, runs, rows, PARTIAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile of the list of partial ones or of that of whole ones.

    Returns:
        Its first row and its rows' positions. Of a partial tile also the end row of its run and the position behind
        the run; of a whole one `rows`, the number of rows in both runs, and 0.
    """
    a0, b0, c0, d0, a1, b1, c1 = bounds
    start, length, second_start, second_length = runs
    if PARTIAL:
        before, after, second_before = b0 - a0, d0 - c0, b1 - a1
        in_first = tl.where(number < before, a0 + number, c0 + number - before)
        rest = number - before - after
        in_second = tl.where(rest < second_before, a1 + rest, c1 + rest - second_before)
        second = rest >= 0
        tile = tl.where(second, in_second, in_first)
    else:
        second = number >= c0 - b0
        tile = tl.where(second, number - (c0 - b0) + b1, number + b0)
    row = tile * BLOCK + tl.where(second, length, 0)
    position = tile * BLOCK + tl.where(second, second_start, start) + tl.arange(0, BLOCK)
    end, stop = rows, 0
    if PARTIAL:
        end = tl.where(second, rows, length)
        stop = tl.where(second, second_start + second_length, start + length)
    return row, position, end, stop


@triton.jit
def load_tile(source, batch, head, row, end, width, strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              MASKED: tl.constexpr, DESCRIPTOR: tl.constexpr):  # fmt: skip
    """Load rows from `row` on of [B, H, S, width]: zeros from column `width` on and, if MASKED, from row `end` on.

    A descriptor gives zeros from S on only. The caller hides the rows between `end` and S, or does not write them.
    """
    if DESCRIPTOR:
        tile = source.load([batch, head, row, 0]).reshape(ROWS, COLUMNS)
    else:
        stride_batch, stride_head, stride_row, stride_column = strides
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLUMNS)
        first = source + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
        first += row.to(tl.int64) * stride_row
        inside = (c < width)[None, :]
        if MASKED:
            inside = inside & (row + r < end)[:, None]
        tile = tl.load(first + (r[:, None] * stride_row + c[None, :] * stride_column), mask=inside, other=0.0)
    return tile


@triton.jit
def _tanh(x):
    """Return tanh(x) to fp32's rounding, by the series where 1 - 2 / (e + 1) would cancel."""
    e = tl.exp2(tl.minimum(x * (2 * 1.4426950408889634), 126.0))
    s = x * x
    series = x * (1 + s * (-0.33333333 + s * (0.13333334 + s * (-0.053968254 + s * 0.021869488))))
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (e + 1))


@triton.jit
def capped(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Return the scores, the factor that makes them exponents of 2, and the derivative of the cap.

    The factor holds the scale, so that an exponent less a maximum takes one multiply-add for each score.
    """
    factor = scale * LOG2E
    slope = 1.0
    if SOFTCAP:
        t = _tanh(s * (scale / softcap))
        s = softcap * t
        factor = LOG2E + 0 * scale
        slope = 1 - t * t
    return s, factor, slope


@triton.jit
def visible_pairs(held, moving, before, after, stop, held_documents, moving_documents):
    """Return the mask of pairs that see each other: rows that a program holds, and rows of the tile that it is at.

    Each position that it holds sees `before` back and `after` on, up to `stop`. A pair takes one subtraction and one
    comparison without signs: 0 <= moving - first <= count.

    Args:
        held, moving: positions, rows, and the end of the rows that exist.
        held_documents, moving_documents: a pointer to the documents of all rows, or None, and their stride.
    """
    held_position, held_row, held_end = held
    moving_position, moving_row, moving_end = moving
    first = held_position - before
    count = tl.minimum(before + after, stop - 1 - first)
    sees_none = (count < 0) | (held_row >= held_end)
    first = tl.where(sees_none, -1, first)  # where no row is
    count = tl.where(sees_none, 0, count)
    visible = (moving_position - first).to(tl.uint32, bitcast=True) <= count.to(tl.uint32, bitcast=True)
    held_document, stride_held = held_documents
    moving_document, stride_moving = moving_documents
    if held_document is not None:
        held_document += held_row * stride_held
        moving_document += moving_row * stride_moving
        of_held = tl.load(held_document, mask=held_row < held_end, other=0)
        of_moving = tl.load(moving_document, mask=moving_row < moving_end, other=0)
        visible = visible & (of_held == of_moving)
    return visible


@triton.jit
def seed_of(low, high):
    """Return the 64 bits of a seed from two signed 32-bit numbers; `low` counts from -2^31 on."""
    return high.to(tl.int64) * 4294967296 + low.to(tl.int64) + 2147483648


@triton.jit
def kept_pairs(query, key, head, batch, seed, dropped, dropout):
    """Return 1 / (1 - dropout) for kept probabilities, and 0 where the 32 random bits are below `dropped` + 2^31."""
    zero = (query + key) * 0
    bits, _, _, _ = tl.philox(
        seed,
        (zero + key).to(tl.uint32),
        (zero + query).to(tl.uint32),
        (zero + head).to(tl.uint32),
        (zero + batch).to(tl.uint32),
        _ROUNDS,
    )
    return tl.where(bits.to(tl.int64) - 2147483648 >= dropped, 1 / (1 - dropout), 0.0)
