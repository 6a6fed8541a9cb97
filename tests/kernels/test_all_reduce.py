"""matmul + all_reduce has the bits of matmul and then the reduction contract, on every rank, whatever the timing."""

import pytest
import torch

from weft.kernels import signal
from weft.kernels.all_reduce import matmul_all_reduce
from weft.kernels.chunks import Rows
from weft.kernels.matmul import matmul
from weft.kernels.matmul_reduce_scatter import Inbox
from weft.testing import cases, reference
from weft.testing.peers import abandoned, run_as_ranks

pytestmark = pytest.mark.kernel


def operands(world, m, n, k, dtype, device):
    generator = torch.Generator().manual_seed(m * n)
    draws = [torch.randn(m + n, k + rank, generator=generator).to(device, dtype) for rank in range(world)]
    return [(draw[:m], draw[m:].t()) for draw in draws]


def reduce_twice(peers, m, n, k, dtype, rows):
    a, b = operands(peers.world, m, n, k, dtype, peers.memory.device)[peers.rank]
    return [matmul_all_reduce(a, b, peers, rows) for _ in range(2)]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("world", "batch", "m", "n", "k", "dtype"),
    [
        *((*case, torch.bfloat16) for case in [*cases.COMMUNICATING, (5, 1, 3, 9, 4)]),
        (*cases.COMMUNICATING[0], torch.float16),
    ],
)
def test_the_bits_are_those_of_a_product_and_a_reduction(device, world, batch, m, n, k, dtype):
    m *= batch
    rows = Rows.of((m, n), 0, [m // world + (rank < m % world) for rank in range(world)], most=16)
    whole = reference.reduce([matmul(a, b)[0].cpu() for a, b in operands(world, m, n, k, dtype, device)])
    bytes = Inbox(rows, n, dtype).window_bytes(sums=True)
    for twice in run_as_ranks(reduce_twice, world, bytes, device, m, n, k, dtype, rows, seed=m):
        for result in twice:
            assert torch.equal(result.cpu(), whole)


def test_what_never_arrives_makes_the_result_nan(device):
    rows = Rows(1, (20, 20), 8)
    bytes = Inbox(rows, 24, torch.bfloat16).window_bytes(sums=True)
    peers = abandoned(device, rank=0, timeout_s=0.3, bytes=bytes)
    a, b = operands(2, 40, 24, 16, torch.bfloat16, device)[0]
    assert matmul_all_reduce(a, b, peers, rows).isnan().all()
    assert peers.record[:5].tolist() == [1, 0, signal.MATMUL_ALL_REDUCE, signal.PARTIAL, 1]


def test_a_window_without_room_for_the_sums_is_refused(device):
    rows = Rows(1, (3, 3), 8)
    inbox = Inbox(rows, 8, torch.bfloat16)
    peers = abandoned(device, rank=0, timeout_s=1, bytes=inbox.window_bytes(sums=False))
    x, w = (torch.ones(size, 8, device=device, dtype=torch.bfloat16) for size in (6, 8))
    with pytest.raises(ValueError, match=f"{inbox.window_bytes(sums=True)} are needed"):
        matmul_all_reduce(x, w.t(), peers, rows)
