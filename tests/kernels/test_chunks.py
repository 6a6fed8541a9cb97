"""The chunks of a product's rows: every row is in one of them, at its place in its rank's rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels.chunks import Rows
from weft.kernels.signal import FLAGS

CPU = torch.device("cpu")
ROWS = st.builds(
    Rows,
    batch=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 20), min_size=2, max_size=5).map(tuple).filter(any),
    most=st.integers(1, 9),
)


@settings(deadline=None)
@given(ROWS)
def test_chunks_are_the_rows_in_order_each_rank_having_its_own(rows):
    whole = torch.arange(rows.total).view(rows.batch, -1)
    shards = [part.reshape(-1) for part in whole.split(rows.sizes, 1)]
    covered = []
    for chunk in rows.chunks:
        there = shards[chunk.rank][chunk.local_start :][: chunk.rows]
        assert 1 <= chunk.rows <= rows.most and there.tolist() == list(range(chunk.start, chunk.start + chunk.rows))
        covered += there.tolist()
    assert covered == list(range(rows.total))
    assert [rows.of_rank(rank) for rank in range(len(rows.sizes))] == [len(shard) for shard in shards]


@settings(deadline=None)
@given(ROWS, st.integers(1, 40), st.integers(0, 4), st.booleans())
def test_every_tile_has_one_turn_and_knows_its_chunks(rows, block_m, rank, own_first):
    rank %= len(rows.sizes)
    order = rows.order(block_m, rank, own_first, CPU).tolist()
    assert sorted(tile for tile, *_ in order) == list(range(-(-rows.total // block_m)))
    tiles = rows.tiles_of_chunk(block_m, CPU).tolist()
    for tile, first, final in order:
        start, end = tile * block_m, min((tile + 1) * block_m, rows.total)
        inside = [n for n, c in enumerate(rows.chunks) if c.start < end and c.start + c.rows > start]
        assert inside == list(range(first, final + 1))
        for number in inside:
            tiles[number] -= 1
    assert not any(tiles)


def test_own_rows_are_taken_first_or_last():
    rows = Rows(1, (64, 64, 64), 32)
    assert [tile for tile, *_ in rows.order(32, 1, True, CPU).tolist()] == [2, 3, 4, 5, 0, 1]
    assert [tile for tile, *_ in rows.order(32, 1, False, CPU).tolist()] == [4, 5, 0, 1, 2, 3]


def test_chunks_grow_until_there_are_flags_for_all():
    rows = Rows.of((4_000_000, 8), 0, [1_000_000] * 4, most=16)
    assert rows.most > 16 and 5 * len(rows.chunks) <= 2 * FLAGS
    assert Rows.of((3, 10, 2, 8), 1, [6, 4]) == Rows(3, (12, 8), 1024)
