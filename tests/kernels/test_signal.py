"""Flags between ranks: nobody leaves a meeting before all have come, and every wait ends."""

import time

import pytest
import torch
import triton
import triton.language as tl

from weft.kernels import interpreted, launch, signal
from weft.testing.peers import abandoned, run_as_ranks

pytestmark = pytest.mark.kernel

BYTES = signal.DATA_OFFSET + 64
OPERATION, PHASE = signal.MATMUL_REDUCE_SCATTER, signal.DONE


@triton.jit
def read_peers(addresses, out, offset, world):
    for peer in range(world):
        tl.store(out + peer, tl.load(signal.at(addresses, peer, offset).to(tl.pointer_type(tl.int32))))


def meet_often(peers):
    """What each rank read of each after each meeting."""
    mine = peers.memory[signal.DATA_OFFSET :].view(torch.int32)
    seen = torch.zeros(20, peers.world, dtype=torch.int32, device=mine.device)
    for number in range(20):
        mine[0] = number
        signal.meet(peers, signal.signature("before", number), OPERATION, PHASE)
        launch.launch(read_peers, (1,), peers.addresses, seen[number], signal.DATA_OFFSET, peers.world)
        signal.meet(peers, signal.signature("after", number), OPERATION, PHASE)
    return seen


@pytest.mark.sanitize
@pytest.mark.parametrize("world", [2, 3, *(pytest.param(x, marks=pytest.mark.slow("kernels")) for x in (4, 5))])
def test_nobody_leaves_before_all_have_come(device, world):
    for seen in run_as_ranks(meet_often, world, BYTES, device, seed=world):
        assert torch.equal(seen.cpu(), torch.arange(20, dtype=torch.int32)[:, None].expand(20, world))


def meet_differently(peers):
    signal.meet(peers, signal.signature("call", peers.rank), OPERATION, PHASE)
    return peers.record.clone(), peers.memory[: signal.DATA_OFFSET].zero_()


def test_ranks_that_call_different_things_raise(device):
    with pytest.raises(AssertionError, match="CollectiveMismatchError" if device.type == "cpu" else "left"):
        run_as_ranks(meet_differently, 2, BYTES, device)


def test_a_wait_for_a_rank_that_never_comes_ends_and_leaves_a_record(device):
    peers = abandoned(device, rank=1, timeout_s=0.3, bytes=BYTES)
    agreed = signal.signature("lonely")
    start = time.monotonic()
    signal.meet(peers, agreed, OPERATION, PHASE)
    torch.cuda.synchronize() if device.type == "cuda" else None
    assert 0.25 < time.monotonic() - start < 5
    assert peers.record[:8].tolist() == [1, 1, OPERATION, PHASE, 0, 0, 0, agreed]
    assert peers.spoiled.item() == 1


def test_once_a_wait_gave_up_no_other_waits(device):
    peers = abandoned(device, rank=0, timeout_s=60, bytes=BYTES)
    peers.record[0] = 3  # the host's word
    start = time.monotonic()
    for _ in range(5):
        signal.meet(peers, 7, OPERATION, PHASE)
    torch.cuda.synchronize() if device.type == "cuda" else None
    assert time.monotonic() - start < 10
    assert peers.spoiled.item() == 1 and peers.record[0] == 3


@pytest.mark.skipif(not launch.INTERPRETED, reason="of the waits in the interpreter")
@pytest.mark.parametrize("comes", [True, False])
def test_who_comes_between_two_looks_and_leaves_has_come(monkeypatch, comes):
    looks, record = [], [0]

    def looked() -> bool:
        looks.append(record[0])
        record[0] = 3  # after this look the other comes, goes, and is missed by the host
        return comes and len(looks) == 2

    monkeypatch.setattr(interpreted.tl, "load", lambda record: record[0])
    assert interpreted._until(looked, record, timeout_us=60_000_000) == (not comes)


def test_what_is_spoiled_is_nan(device):
    peers = abandoned(device, rank=0, timeout_s=1, bytes=BYTES)
    for dtype in launch.DTYPES:
        x = torch.ones(3, 1700, dtype=dtype, device=device)
        peers.spoiled.zero_()
        signal.spoil(peers, x)
        assert (x == 1).all()
        peers.spoiled.fill_(1)
        signal.spoil(peers, x)
        assert x.isnan().all()


def test_a_signature_is_a_positive_int32_of_its_parts():
    signatures = {signal.signature("x", m, torch.bfloat16) for m in range(1000)}
    assert len(signatures) == 1000 and all(0 < s < 2**31 for s in signatures)
    assert signal.signature(1, (2, 3)) == signal.signature(1, (2, 3))
