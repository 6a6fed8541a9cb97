"""all_gather + matmul has the bits of all_gather and then matmul, whatever the order in which rows arrive."""

import random
import threading
import time

import pytest
import torch

from weft.kernels import signal
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.chunks import Rows
from weft.kernels.matmul import Arrivals, matmul
from weft.ops.overlap.peer_copies import start_gathering, window_bytes
from weft.sharding.sizes import split_sizes
from weft.testing import cases
from weft.testing.peers import abandoned, run_as_ranks

pytestmark = pytest.mark.kernel


def operands(batch, m, n, k, dtype, device):
    """The whole x [batch, M, K]; w [N, K]; bias [N]."""
    generator = torch.Generator().manual_seed(m + n + k)
    draws = [torch.randn(*shape, generator=generator) for shape in ((batch, m, k), (n, k), (n,))]
    return [draw.to(device, dtype) for draw in draws]


def gather_twice(peers, batch, m, n, k, dtype):
    x, w, bias = operands(batch, m, n, k, dtype, peers.memory.device)
    sizes = split_sizes(m, peers.world)
    shard, results = x.split(sizes, 1)[peers.rank], []
    for _ in range(2):
        if peers.rank == 0:  # the others would read its window too early, if they did not wait for it
            torch.cuda._sleep(2_000_000) if x.is_cuda else time.sleep(0.05)
        gathering = start_gathering(peers, shard, 1, sizes)
        flat = gathering.whole.view(-1, k)
        y, z = all_gather_matmul(flat, w.t(), gathering.arrivals, bias=bias, activation="gelu", keep_z=True)
        results += [y, z, gathering.finish()]
    return results


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("world", "batch", "m", "n", "k", "dtype"),
    [*((*case, torch.bfloat16) for case in cases.COMMUNICATING), (*cases.COMMUNICATING[0], torch.float16)],
)
def test_the_bits_are_those_of_gathering_first(device, world, batch, m, n, k, dtype):
    x, w, bias = operands(batch, m, n, k, dtype, device)
    sizes = split_sizes(m, world)
    y, z = matmul(x.view(-1, k), w.t(), bias=bias, activation="gelu", keep_z=True)
    bytes = window_bytes(x.split(sizes, 1)[0], 1, sizes)
    for results in run_as_ranks(gather_twice, world, bytes, device, batch, m, n, k, dtype, seed=k):
        for result, expected in zip(results, [y, z, x] * 2, strict=True):
            assert torch.equal(result.cpu(), expected.cpu())


def test_rows_may_arrive_in_any_order(device):
    if device.type == "cuda":
        pytest.skip("the flags are set by a thread, on shared memory")
    x, w, _ = operands(1, 60, 20, 24, torch.bfloat16, device)
    rows = Rows(1, (30, 30), 7)
    peers = abandoned(device, rank=0, timeout_s=20, bytes=signal.DATA_OFFSET)
    chunks = list(enumerate(rows.chunks))
    for seed in range(5):
        random.Random(seed).shuffle(chunks)
        filled, flags = torch.full_like(x[0], torch.nan), torch.zeros(len(chunks), dtype=torch.int32)

        def arrive(filled=filled, flags=flags):
            for number, chunk in chunks:
                time.sleep(0.005)
                filled[chunk.start :][: chunk.rows] = x[0, chunk.start :][: chunk.rows]
                flags[number] = 1

        thread = threading.Thread(target=arrive)
        thread.start()
        y, _ = all_gather_matmul(filled, w.t(), Arrivals(peers, rows, flags))
        thread.join()
        assert torch.equal(y, matmul(x[0], w.t())[0])


def test_rows_that_never_arrive_are_nan(device):
    x, w, _ = operands(1, 64, 20, 24, torch.bfloat16, device)
    rows = Rows(1, (32, 32), 32)
    peers = abandoned(device, rank=0, timeout_s=0.3, bytes=signal.DATA_OFFSET)
    flags = torch.tensor([1, 0], dtype=torch.int32, device=device)
    y, _ = all_gather_matmul(x[0], w.t(), Arrivals(peers, rows, flags))
    assert y[32:].isnan().all()
    assert peers.record[:5].tolist() == [1, 0, signal.ALL_GATHER_MATMUL, signal.ARRIVED, 1]


def test_what_does_not_fit_is_refused_by_name(device):
    rows = Rows(1, (3, 3), 8)
    peers = abandoned(device, rank=0, timeout_s=1, bytes=signal.DATA_OFFSET)
    x, w = (torch.ones(size, 8, device=device, dtype=torch.bfloat16) for size in (6, 4))
    flags = torch.ones(2, dtype=torch.int32, device=device)
    for error, text, arguments in [
        (ValueError, "x has 5 rows; the ranks have .3, 3., 6 in all", (x[:5], w.t(), Arrivals(peers, rows, flags))),
        (ValueError, "flags has shape", (x, w.t(), Arrivals(peers, rows, flags[:1]))),
        (TypeError, "flags is torch.int64", (x, w.t(), Arrivals(peers, rows, flags.long()))),
    ]:
        with pytest.raises(error, match=text):
            all_gather_matmul(*arguments)
    with pytest.raises(ValueError, match=f"the window has {signal.DATA_OFFSET} bytes"):
        start_gathering(peers, x[:3], 0, [3, 3])
