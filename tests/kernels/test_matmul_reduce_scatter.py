"""matmul + reduce_scatter has the bits of matmul and then the reduction contract, whatever the timing."""

from dataclasses import replace

import pytest
import torch

from weft.kernels import launch, signal
from weft.kernels.chunks import Rows
from weft.kernels.matmul import matmul
from weft.kernels.matmul_reduce_scatter import Inbox, matmul_reduce_scatter
from weft.sharding.sizes import split_sizes
from weft.testing import cases, reference
from weft.testing.peers import abandoned, run_as_ranks

pytestmark = pytest.mark.kernel


def operands(world, m, n, k, dtype, device):
    """Each rank's a [M, K_r] and b [K_r, N]; K_r is k, k + 1, ..."""
    generator = torch.Generator().manual_seed(m + n)
    draws = [torch.randn(m + n, k + rank, generator=generator).to(device, dtype) for rank in range(world)]
    return [(draw[:m], draw[m:].t()) for draw in draws]


def scatter_twice(peers, m, n, k, dtype, rows):
    a, b = operands(peers.world, m, n, k, dtype, peers.memory.device)[peers.rank]
    return [matmul_reduce_scatter(a, b, peers, rows) for _ in range(2)]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("world", "batch", "m", "n", "k", "dtype"),
    [*((*case, torch.bfloat16) for case in cases.COMMUNICATING), (*cases.COMMUNICATING[0], torch.float16)],
)
def test_the_bits_are_those_of_a_product_and_a_reduction(device, world, batch, m, n, k, dtype):
    rows = Rows.of((batch, m, n), 1, split_sizes(m, world), most=16)
    partial = [matmul(a, b)[0] for a, b in operands(world, batch * m, n, k, dtype, device)]
    whole = reference.reduce([p.cpu() for p in partial]).view(batch, m, n)
    shards = whole.split(split_sizes(m, world), 1)
    bytes = Inbox(rows, n, dtype).window_bytes(sums=False)
    results = run_as_ranks(scatter_twice, world, bytes, device, batch * m, n, k, dtype, rows, seed=m)
    for shard, twice in zip(shards, results, strict=True):
        for result in twice:
            assert torch.equal(result.cpu().view(shard.shape), shard)


def test_what_never_arrives_makes_the_sum_nan(device):
    rows = Rows(1, (20, 20), 8)
    inbox = Inbox(rows, 24, torch.bfloat16)
    peers = abandoned(device, rank=1, timeout_s=0.3, bytes=inbox.window_bytes(sums=False))
    a, b = operands(2, 40, 24, 16, torch.bfloat16, device)[1]
    result = matmul_reduce_scatter(a, b, peers, rows)
    assert result.isnan().all() and result.shape == (20, 24)
    assert peers.record[:5].tolist() == [1, 1, signal.MATMUL_REDUCE_SCATTER, signal.PARTIAL, 0]


def test_a_rank_that_gave_up_writes_nothing_more_to_the_others(device):
    """Rank 0 gives up in its first call, with a second queued behind it. Rank 1, late, still has what the first wrote."""
    rows = Rows(1, (20, 20), 8)
    bytes = Inbox(rows, 24, torch.bfloat16).window_bytes(sums=False)
    first = abandoned(device, rank=0, timeout_s=0.3, bytes=bytes)
    windows = [first.memory, torch.zeros_like(first.memory)]
    at = tuple(window.data_ptr() for window in windows)
    first, second = (
        replace(
            abandoned(device, rank, 0.3, bytes), memory=windows[rank], at=at, addresses=torch.tensor(at, device=device)
        )
        for rank in range(2)
    )
    b = torch.ones(16, 24, dtype=torch.bfloat16, device=device)
    for number in (1, 100):
        assert matmul_reduce_scatter(torch.full_like(b.t()[:1].expand(40, 16), number), b, first, rows).isnan().all()
    late = matmul_reduce_scatter(torch.full_like(b.t()[:1].expand(40, 16), 1), b, second, rows)
    assert (late == 32).all()


def test_what_the_kernels_do_not_take_is_refused_by_name(device):
    rows = Rows(1, (3, 3), 8)
    bytes = Inbox(rows, 4, torch.bfloat16).window_bytes(sums=False)
    peers = abandoned(device, rank=0, timeout_s=1, bytes=bytes)
    x, w = (torch.ones(size, 8, device=device, dtype=torch.bfloat16) for size in (6, 4))

    def refused(error, text, *arguments, **options):
        with pytest.raises(error, match=text):
            matmul_reduce_scatter(*arguments, **options)

    refused(ValueError, "share 6 rows", x[:5], w.t(), peers, rows)
    refused(ValueError, "rows are shared by 3 ranks, the window by 2", x, w.t(), peers, Rows(1, (2, 2, 2), 8))
    refused(ValueError, f"the window has {bytes} bytes", x, w.repeat(3, 1).t(), peers, rows)
    refused(ValueError, "must be .* and .K, N.", x[:, :7], w.t(), peers, rows)
    refused(TypeError, "must be one of", x, w.t().double(), peers, rows)
    with pytest.raises(ValueError, match=f"there are {signal.FLAGS}"):
        Rows.of((20_000, 2, 8), 1, [1, 1])
    if not launch.INTERPRETED:
        peers = abandoned(device, rank=0, timeout_s=1, bytes=2 * bytes)
        refused(TypeError, "torch.float32; it must be one of", x.float(), w.float().t(), peers, rows)
