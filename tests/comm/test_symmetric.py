"""Symmetric memory: zero copy where every rank's tensor is at the same place, the same bits everywhere."""

import gc

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing import reference
from weft.testing.ranks import run_ranks, try_ranks


def check_bits(rank):
    world = dist.get_world_size()
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=200)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
        for count in (1, 1000, 16_384, 100_003, 1_000_001):
            torch.manual_seed(count)
            parts = [(torch.randn(count, dtype=torch.float64) * 9).to(dtype) for _ in range(world)]
            x = weft.empty_symmetric(count, dtype=dtype)
            assert x.shape == (count,) and x.dtype == dtype
            x.copy_(parts[rank])
            assert weft.all_reduce(x) is x
            assert torch.equal(x, reference.reduce(parts)), (dtype, count)
            ordinary = parts[rank].clone()
            dist.all_reduce(ordinary)
            assert torch.equal(ordinary, x), "copied or not, the bits are the same"
            offset = count // 3
            x.copy_(parts[rank])
            weft.all_reduce(x[offset:])
            assert torch.equal(x[offset:], reference.reduce([part[offset:] for part in parts]))
            assert torch.equal(x[:offset], parts[rank][:offset])


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow("csrc/shm", "pytorch_ext/comm"))])
def test_zero_copy_has_the_bits_of_a_copy(world):
    run_ranks(check_bits, world)


def check_mixed(rank):
    """One rank's tensor is ordinary, or at another place: the ranks agree to copy."""
    count = 50_000
    shared = weft.empty_symmetric(2, count)
    other = weft.empty_symmetric(count)
    for x in (shared[0] if rank else torch.empty(count), shared[rank % 2], other if rank == 1 else shared[0]):
        x.fill_(rank + 1)
        dist.all_reduce(x)
        assert (x == 6).all()
    del shared, x
    gc.collect()
    plain = torch.full((count,), 1.0)  # its address may be the freed one's
    dist.all_reduce(plain)
    assert (plain == 3).all()
    other.fill_(1)
    dist.all_reduce(other, op=dist.ReduceOp.MAX)
    assert (other == 1).all()
    assert weft.empty_symmetric(0).numel() == 0 and weft.empty_symmetric((2, 3)).shape == (2, 3)


def test_ranks_agree_when_one_tensor_is_elsewhere():
    run_ranks(check_mixed, 3)


def behind_the_queue(rank):
    """Memory asked for while calls are under way comes after them, on every rank."""
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=500)
    tensors = [torch.full((200_000,), float(i)) for i in range(6)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    shared = weft.empty_symmetric(100_000).fill_(rank)
    dist.all_reduce(shared)
    assert (shared == 3).all()
    for i, (work, x) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert (x == 3 * i).all()


def test_memory_is_asked_for_in_the_order_of_calls():
    run_ranks(behind_the_queue, 3)


def ask_differently(rank):
    with pytest.raises(weft.CollectiveMismatchError, match="rank 0 asks for 400 bytes, rank 1 for 404"):
        weft.empty_symmetric(100 + rank)
    with pytest.raises(ValueError, match="needs a group that has a backend for cuda, as .cpu:weft,cuda:nccl."):
        weft.empty_symmetric(4, device="cuda")
    with pytest.raises(ValueError, match="on cpu and cuda devices, not on meta"):
        weft.empty_symmetric(4, device="meta")
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    with pytest.raises(OSError, match="rank 0 could not get .* bytes of symmetric memory"):
        weft.empty_symmetric(100_000)
    with pytest.raises(OSError, match="no machine has"):  # together 8192 bytes, in 64 bits
        weft.empty_symmetric(2**63 + 4096, dtype=torch.uint8)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert weft.all_reduce(weft.empty_symmetric(30_000).fill_(1))[0] == 2


def test_what_cannot_be_had_is_said_on_every_rank():
    run_ranks(ask_differently, 2)


def die_in_zero_copy(rank):
    x = weft.empty_symmetric(500_000).fill_(1)
    if rank == 1:
        dist.group.WORLD.engine.group.inject_faults(die_at_point=2)
    weft.all_reduce(x)


def test_a_rank_that_dies_in_a_zero_copy_call_is_named():
    outcomes = try_ranks(die_in_zero_copy, 3)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError) and "rank 1" in str(survivor.error)
