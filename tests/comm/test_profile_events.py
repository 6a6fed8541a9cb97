"""What torch.profiler sees of a process group: one event for each call, with the shapes of its inputs."""

import pytest
import torch
import torch.distributed as dist

from weft.testing.ranks import run_ranks


def calls(rank, world):
    x, whole = torch.ones(2, 3), torch.empty(2 * world, 3)
    dist.all_reduce(x)  # no profiler: no event
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
        dist.all_reduce(x)
        work = dist.broadcast(x, 0, async_op=True)
        work.wait()
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(x, whole)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x)
        with pytest.raises(ValueError):
            dist.all_gather([x], x)  # an event of a call that failed ends too
    events = [event for event in found.events() if event.name.startswith("weft:")]
    names = [event.name.partition(":")[2] for event in events]
    messages = {0: ["send"], 1: ["recvAnySource"]}.get(rank, [])
    first = ["all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"]
    assert names == [*first, *messages, "all_gather"], names
    shapes = [event.input_shapes for event in events]
    assert shapes[:4] == [[[2, 3]], [[2, 3]], [[2, 3]], [[2 * world, 3]]], shapes
    assert all(event.time_range.elapsed_us() >= 0 for event in events)


def test_a_profile_has_each_call_once():
    run_ranks(calls, 3, 3)
