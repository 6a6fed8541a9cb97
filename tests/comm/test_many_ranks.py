"""Groups of 16 and 64 ranks: every collective at odd sizes, the memory that a group holds, and a rank that dies."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.slow("pytorch_ext/comm", "csrc/shm")

MOST_BYTES = 200 << 20  # of all ranks together


def held_bytes():
    """This process's share of the pages of groups' segments."""
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if ":" not in line.split()[0]:  # the next mapping
                inside = "memfd:weft" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def every_collective(rank):
    world = dist.get_world_size()
    numbers = torch.arange(world, dtype=torch.float32)
    started = torch.tensor([held_bytes()])
    dist.all_reduce(started)
    for count in (1, 17, 1001, 33_333):
        mine = torch.full((count,), float(rank))
        of_all = numbers.repeat_interleave(count)
        total = mine.clone()
        dist.all_reduce(total)
        assert (total == numbers.sum()).all()
        gathered = torch.empty(world * count)
        dist.all_gather_into_tensor(gathered, mine)
        assert torch.equal(gathered, of_all)
        part = torch.empty(count)
        dist.reduce_scatter_tensor(part, of_all)
        assert (part == rank * world).all()
        swapped = torch.empty(world * count)
        dist.all_to_all_single(swapped, mine.repeat(world))
        assert torch.equal(swapped, of_all)
        dist.broadcast(mine, world // 3)
        assert (mine == world // 3).all()
        dist.reduce(mine, 1)
        assert rank != 1 or (mine == world // 3 * world).all()
    following = torch.empty(3)
    request = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world)
    dist.recv(following, (rank - 1) % world)
    request.wait()
    assert (following == (rank - 1) % world).all()
    weft.barrier()
    held = torch.tensor([held_bytes()])
    dist.all_reduce(held)
    return started.item(), held.item()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("world", [16, 64])
def test_every_collective_is_right_and_a_group_is_small(world):
    started, held = run_ranks(every_collective, world, timeout_s=300)[0]
    assert 0 < started < held < MOST_BYTES


def one_dies(rank):
    x = torch.ones(5000)
    dist.all_reduce(x)
    if rank == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(weft.RankLostError, match=r"rank 5 \(pid"):
        for _ in range(3):
            dist.all_reduce(x)


@pytest.mark.parametrize("world", [16, 64])
def test_a_rank_that_is_killed_is_named_on_every_other(world):
    outcomes = try_ranks(one_dies, world, timeout_s=300)
    assert outcomes[5].exit_code == -signal.SIGKILL
    assert all(outcome.error is None for outcome in outcomes), outcomes
