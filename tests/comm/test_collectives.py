"""The collectives of the shared-memory engine, through torch.distributed: right, and the same bits everywhere."""

import contextlib
import math
import os
import random
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import weft
from weft.comm import rendezvous
from weft.comm.backend import _Work
from weft.comm.engine import Engine
from weft.comm.purpose import calls_for
from weft.testing import reference
from weft.testing.cases import COUNTS
from weft.testing.ranks import on_machines, run_ranks, try_ranks

WORLDS = [1, 2, 3, pytest.param(5, marks=pytest.mark.slow("csrc/shm", "pytorch_ext/comm"))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool]


@pytest.fixture(params=["single copy", "staged"])
def copies(request, monkeypatch):
    """Large ordinary tensors move in both ways."""
    monkeypatch.setenv("WEFT_SINGLE_COPY", "0" if request.param == "staged" else "1")


def shard_of_rank(rank, count, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, generator=generator, dtype=torch.float64) * 4
    return (x > 0) if dtype == torch.bool else x.to(dtype) if dtype.is_floating_point else x.abs().to(dtype)


def delay_wherever_ranks_meet(rank):
    engine = dist.group.WORLD.engine
    getattr(engine, "local", engine).group.inject_faults(seed=rank + 1, longest_delay_us=300)


def all_reduce_everything(rank):
    world = dist.get_world_size()
    delay_wherever_ranks_meet(rank)
    for dtype in DTYPES:
        for count in COUNTS:
            parts = [shard_of_rank(r, count, dtype, count) for r in range(world)]
            x = parts[rank].clone()
            dist.all_reduce(x)
            assert torch.equal(x, reference.reduce(parts)), (dtype, count)


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_is_the_sum_in_rank_order_to_the_bit(world):
    run_ranks(all_reduce_everything, world)


def every_operator(rank):
    world = dist.get_world_size()
    ops = {
        "avg": dist.ReduceOp.AVG,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "product": dist.ReduceOp.PRODUCT,
    }
    for name, op in ops.items():
        parts = [shard_of_rank(r, 1000, torch.float32) for r in range(world)]
        x = parts[rank].clone()
        dist.all_reduce(x, op)
        assert torch.equal(x, reference.reduce(parts, name)), name
        if name in ("min", "max"):
            assert torch.equal(weft.all_reduce(parts[rank].clone(), op=name), reference.reduce(parts, name)), name
    for name, op in {"and": dist.ReduceOp.BAND, "or": dist.ReduceOp.BOR, "xor": dist.ReduceOp.BXOR}.items():
        parts = [shard_of_rank(r, 1000, torch.int32) for r in range(world)]
        x = parts[rank].clone()
        dist.all_reduce(x, op)
        assert torch.equal(x, reference.reduce(parts, f"bitwise_{name}")), name
    x = torch.view_as_complex(torch.full((3, 2), float(rank + 1)))
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((3,), complex(world * (world + 1) / 2, world * (world + 1) / 2)))


def sparse_tensors(rank):
    """What a dense sum gives, whatever each rank has, coalesced or not."""
    world = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for dense in ((), (3,)):
            torch.manual_seed(3)
            parts = []
            for r in range(world):
                indices = torch.randint(0, 6, (2, 5 * r))  # rank 0 has nothing
                parts.append(
                    torch.sparse_coo_tensor(indices, torch.randint(-9, 9, (5 * r, *dense)).to(dtype), (6, 6, *dense))
                )
            for op, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "avg")):
                x = parts[rank].clone()
                dist.all_reduce(x, op)
                assert x.is_coalesced() and torch.equal(
                    x.to_dense(), reference.reduce([p.to_dense() for p in parts], name)
                )
    with pytest.raises(ValueError, match="not reduced by 'max'"):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    if world > 1:
        with pytest.raises(ValueError, match="ranks have other shapes: .*6, 6.*6, 5"):
            dist.all_reduce(torch.sparse_coo_tensor(size=(6, 6 - min(rank, 1))))
    torch.manual_seed(0)
    words = torch.nn.Embedding(10, 4, sparse=True)
    model = torch.nn.parallel.DistributedDataParallel(words)
    model(torch.tensor([rank, 9])).sum().backward()
    expected = torch.zeros(10)
    expected[:world], expected[9] = 1 / world, 1
    assert torch.allclose(words.weight.grad.to_dense(), expected[:, None].expand(10, 4))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sparse_tensors_are_summed(world):
    run_ranks(sparse_tensors, world)


def what_torch_asks(rank):
    group = dist.group.WORLD
    assert group._device_types == [torch.device("cpu")]
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert group._get_sequence_number_for_group() == before + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.distributed.distributed_c10d._set_pg_timeout` is deprecated")
        distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    begin, store = time.monotonic(), distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(weft.CollectiveTimeoutError):
            dist.barrier()
        assert 0.5 < time.monotonic() - begin < 10
        store.set("waited in vain", "")
    else:
        store.wait(["waited in vain"], timedelta(seconds=20))


def test_the_timeout_of_a_group_can_be_set():
    run_ranks(what_torch_asks, 2)


def monitored(rank):
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    store = distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(weft.CollectiveTimeoutError, match="rank 1"):
            group.monitored_barrier(timedelta(seconds=1))
        store.set("waited in vain", "")
    else:
        store.wait(["waited in vain"], timedelta(seconds=20))


def test_a_monitored_barrier_has_a_timeout_of_its_own():
    run_ranks(monitored, 2)


def test_every_operator_and_complex_numbers():
    run_ranks(every_operator, 3)


def reduce_whole_and_in_pieces(rank, dtype):
    x = shard_of_rank(rank, 100_003, dtype)
    whole, pieces = x.clone(), x.clone()
    dist.all_reduce(whole)
    for piece in pieces.split(7919):
        dist.all_reduce(piece)
    assert torch.equal(whole, pieces)
    scattered = torch.empty(100_003 // dist.get_world_size() + 1, dtype=dtype)
    padded = torch.cat([x, x.new_zeros(len(scattered) * dist.get_world_size() - len(x))])
    dist.reduce_scatter_tensor(scattered, padded)
    begin = rank * len(scattered)
    assert torch.equal(scattered[: len(whole) - begin], whole[begin : begin + len(scattered)])
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_layout_does_not_change_bits(world, dtype, monkeypatch):
    """Whole, in pieces, scattered; on every rank, in every run, with small staging buffers and large ones."""
    results = []
    for staging_kib, single_copy in (("4", "0"), ("4", "1"), ("256", "0"), ("256", "1")):
        monkeypatch.setenv("WEFT_STAGING_KIB", staging_kib)
        monkeypatch.setenv("WEFT_SINGLE_COPY", single_copy)
        results += run_ranks(reduce_whole_and_in_pieces, world, dtype)
    assert all(torch.equal(result, results[0]) for result in results)


def digests_of_everything(rank):
    """Sizes that threads share unevenly, in ordinary and in symmetric memory."""
    world, found = dist.get_world_size(), []
    for dtype in (torch.float32, torch.bfloat16):
        count = 70_001 * world
        parts = [shard_of_rank(r, count, dtype) for r in range(world)]
        shared = weft.empty_symmetric(count, dtype=dtype)
        for x in (parts[rank].clone(), shared.copy_(parts[rank])):
            shard, gathered = torch.empty(70_001, dtype=dtype), torch.empty(world * count, dtype=dtype)
            moved = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(shard, x)
            dist.all_gather_into_tensor(gathered, x)
            dist.all_to_all_single(moved, x)
            found += [shard, gathered, moved]
            dist.all_reduce(x)
            found.append(x.clone())
            norm = torch.zeros(1, dtype=torch.float64)
            weft.all_reduce(x, squared_norm=norm, scale=0.1)
            found += [x.clone(), norm]
    narrow = parts[rank].float()
    weft.all_reduce(narrow, wire_dtype=torch.bfloat16, scale=0.3)
    threads = len(os.listdir("/proc/self/task"))
    return [*found, narrow], threads


@pytest.mark.parametrize("world", [2, 3])
def test_threads_do_not_change_bits(world, copies, monkeypatch):
    monkeypatch.setattr(rendezvous, "_oversubscribed", lambda *_: False)
    outcomes = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(rendezvous, "_threads", lambda *_, threads=threads: threads)
        outcomes.append(run_ranks(digests_of_everything, world))
    for rank in range(world):
        (one, started), *others = (outcome[rank] for outcome in outcomes)
        for more, (found, running) in enumerate(others, 1):
            assert running == started + more
            assert all(map(torch.equal, found, one))


def gather_and_scatter(rank):
    world = dist.get_world_size()
    delay_wherever_ranks_meet(rank)
    for dtype in [*DTYPES, torch.complex64]:
        for count in COUNTS[:-1]:
            real = torch.float32 if dtype.is_complex else dtype
            parts = [shard_of_rank(r, count, real).to(dtype) for r in range(world)]
            gathered = [torch.empty_like(parts[0]) for _ in range(world)]
            dist.all_gather(gathered, parts[rank])
            assert all(map(torch.equal, gathered, parts)), (dtype, count)
            flat = torch.empty(world * count, dtype=dtype)
            dist.all_gather_into_tensor(flat, parts[rank])
            assert torch.equal(flat, torch.cat(parts))
            x = parts[rank].clone()
            dist.broadcast(x, src=world - 1)
            assert torch.equal(x, parts[world - 1])


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_and_broadcast_move_every_byte(world, copies):
    run_ranks(gather_and_scatter, world)


def scatter_uneven(rank):
    world = dist.get_world_size()
    delay_wherever_ranks_meet(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for total in (world, 17, 100_003):
            sizes = weft.split_sizes(total, world)
            whole = [shard_of_rank(r, total, dtype) for r in range(world)]
            out = torch.empty(sizes[rank], dtype=dtype)
            dist.reduce_scatter(out, list(whole[rank].split(sizes)))
            assert torch.equal(out, reference.reduce(whole).split(sizes)[rank])
            parts = [torch.empty(size, dtype=dtype) for size in sizes]
            dist.all_gather(parts, out)
            assert torch.equal(torch.cat(parts), reference.reduce(whole))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_uneven_reduce_scatter_and_all_gather(world, copies):
    run_ranks(scatter_uneven, world)


def strided(rank):
    world = dist.get_world_size()
    base = torch.arange(24.0).view(4, 6) + rank
    x = base.t().clone(memory_format=torch.preserve_format)
    assert not x.is_contiguous()
    dist.all_reduce(x)
    assert torch.equal(x, sum(base.t() + other - rank for other in range(world)))
    outputs = [torch.empty(6, 4).t() for _ in range(world)]
    dist.all_gather(outputs, base)
    assert all(torch.equal(out, base - rank + r) for r, out in enumerate(outputs))
    column = torch.full((5, 2), float(rank))[:, 1]
    dist.broadcast(column, src=1)
    assert (column == 1).all()


def test_strided_tensors_are_taken_as_they_are():
    run_ranks(strided, 3)


def subgroups(rank):
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = evens if rank % 2 == 0 else odds
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    assert x.item() == (2 if rank % 2 == 0 else 4)
    assert dist.get_backend(mine) == "weft"
    mesh = weft.init_mesh(dp=2, tp=2, device_type="cpu")
    for name, expected in (("tp", {0: 1, 1: 1, 2: 5, 3: 5}), ("dp", {0: 2, 1: 4, 2: 2, 3: 4})):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh[name].get_group())
        assert x.item() == expected[rank]
    objects = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(4)]
    handed = [("from", rank)]
    dist.broadcast_object_list(handed, src=2)
    assert handed == [("from", 2)]
    dist.barrier()


@pytest.mark.parametrize("machines", ["aaaa", "aabb", "abac"])
def test_subgroups_meshes_and_objects(machines):
    run_ranks(subgroups, len(machines), before=on_machines(machines))


def asynchronous(rank):
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() and work.is_completed()
    future = work.get_future().then(lambda done: done.value()[0].sum())
    assert future.wait().item() == 1000 * dist.get_world_size()


def test_a_work_can_be_waited_for_and_chained():
    run_ranks(asynchronous, 2)


def overlapping(rank):
    """An expanded input of a megabyte, an input that is another rank's output, a parameter in strange strides."""
    world = dist.get_world_size()
    many = torch.full((1,), float(rank)).expand(500_000)
    parts = [torch.empty(500_000) for _ in range(world)]
    dist.all_gather(parts, many)
    assert all((part == r).all() for r, part in enumerate(parts))
    slots = [torch.full((100_000,), float(10 * rank + r)) for r in range(world)]
    dist.all_gather(slots, slots[0])
    assert [slot[0].item() for slot in slots] == [10.0 * r for r in range(world)]
    strange = torch.nn.Parameter(torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last))
    dist.broadcast(strange, 1)
    assert (strange == 1).all() and strange.grad_fn is None


def test_expanded_overlapping_and_strided_tensors(copies):
    run_ranks(overlapping, 3)


def refusals(rank):
    x = torch.ones(2)
    calls = dist.group.WORLD.engine.group.calls
    for error, words, call in (
        (ValueError, "does not reduce by", lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))),
        (
            TypeError,
            "tensors of torch.float32 and of torch.float64",
            lambda: dist.group.WORLD.allgather([[x if r == rank else x.double() for r in (0, 1)]], [x]),
        ),
        (ValueError, "rows do not divide by 2 ranks", lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3))),
        (
            ValueError,
            "must be 2 sizes that add up to 3",
            lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 1], [1, 2]),
        ),
        (ValueError, "the output has 3 elements; 2 ranks", lambda: dist.all_gather_into_tensor(torch.empty(3), x)),
        (ValueError, "the input has 3 elements", lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(3))),
        (TypeError, "takes dense tensors", lambda: dist.group.WORLD.broadcast([x.to_sparse()])),
    ):
        with pytest.raises(error, match=words):
            call()
    assert dist.group.WORLD.engine.group.calls == calls, "nothing was communicated"


def test_bad_input_is_refused_before_anything_is_communicated():
    run_ranks(refusals, 2)


def random_messages(rank, seed):
    """Messages of random sizes and tags between random pairs, posted and waited for in random orders."""
    world = dist.get_world_size()
    common, own = random.Random(seed), random.Random(100 * seed + rank)
    planned = []  # source, destination, tag, count, value
    for number in range(60):
        source, destination = common.sample(range(world), 2)
        planned.append((source, destination, common.randrange(4), common.choice([0, 1, 100, 5000, 120_000]), number))
    sends = [message for message in planned if message[0] == rank]
    receives: dict[tuple, list] = {}  # by source and tag, within which they come in order
    for message in planned:
        if message[1] == rank:
            receives.setdefault((message[0], message[2]), []).append(message)
    works, received = [], []
    while sends or receives:
        if sends and (not receives or own.random() < 0.5):
            _, destination, tag, count, value = sends.pop(0)
            works.append(dist.isend(torch.full((count,), float(value)), destination, tag=tag))
            continue
        key = own.choice(list(receives))
        source, _, tag, count, value = receives[key].pop(0)
        if not receives[key]:
            del receives[key]
        received.append((torch.empty(count), value))
        works.append(dist.irecv(received[-1][0], source, tag=tag))
    own.shuffle(works)
    for work in works:
        work.wait()
    assert all((y == value).all() for y, value in received)


@pytest.mark.parametrize("seed", range(8))
def test_messages_of_one_tag_between_two_ranks_keep_their_order(seed):
    run_ranks(random_messages, 2 + seed % 3, seed)


def test_the_time_to_post_a_message_does_not_grow_with_those_under_way():
    class Unfinished:
        looked_at = 0

        def done(self):
            self.looked_at += 1
            return False

    engine, works = Engine(SimpleNamespace(rank=0, world=1)), [Unfinished() for _ in range(1000)]
    for work in works:
        engine._pending(work, None)
    assert sum(work.looked_at for work in works) < 100 * len(works)


def coalesced(rank):
    """Several tensors in one call, in the three ways that torch has."""
    world = dist.get_world_size()
    inputs = [torch.full((3 + i,), 10.0 * rank + i) for i in range(world)]
    outputs = [[torch.empty(3 + i) for i in range(world)] for _ in range(world)]
    dist.group.WORLD.allgather_coalesced(outputs, inputs).wait()
    assert all((outputs[r][i] == 10.0 * r + i).all() for r in range(world) for i in range(world))
    tensors = [torch.ones(4), torch.ones(5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x)
    manager.wait()
    assert all((x == world).all() for x in tensors)
    outputs = [torch.empty(2 * world), torch.empty(3 * world)]
    with dist._coalescing_manager():
        for output, size in zip(outputs, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, torch.full((size,), float(rank)))
    assert [output[-1].item() for output in outputs] == [world - 1.0] * 2


@pytest.mark.parametrize("machines", ["aaa", "aab"])
def test_coalesced_calls(machines):
    run_ranks(coalesced, len(machines), before=on_machines(machines))


def test_a_work_is_done_when_each_of_its_calls_is():
    done, waited = [True, False], []
    calls = [SimpleNamespace(done=lambda n=n: done[n], wait=lambda _, n=n: waited.append(n) or True) for n in (0, 1)]
    work = _Work.all_of([_Work([call], None) for call in calls], None)
    assert not work.is_completed()
    assert work.wait() and waited == [0, 1]
    done[1] = True
    assert work.is_completed()


def on_threads(rank):
    """Each thread has a group of its own; all go on at once."""
    import threading

    groups = [dist.new_group() for _ in range(3)]
    results = [None] * 3

    def work(number):
        x = torch.full((1000,), float(number))
        for _ in range(50):
            dist.all_reduce(x, dist.ReduceOp.AVG, group=groups[number])
        results[number] = x[0].item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0.0, 1.0, 2.0]


def test_several_threads_and_groups_at_once():
    run_ranks(on_threads, 2)


SPAWNED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing, weft

def main(rank, path):
    dist.init_process_group("weft", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    x = torch.ones(5)
    dist.all_reduce(x)
    assert (x == 2).all()
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)  # nobody waits for it, and nobody says good-bye

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=2)
    print("done")
"""


def test_spawned_ranks_that_just_end(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    command = [sys.executable, script, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def rooted(rank):
    world = dist.get_world_size()
    delay_wherever_ranks_meet(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for count in (0, 5, 70_001):
            real = torch.float32 if dtype.is_complex else dtype
            parts = [shard_of_rank(r, count, real).to(dtype) for r in range(world)]
            for root in (0, world - 1):
                if not dtype.is_complex:
                    x = parts[rank].clone()
                    dist.reduce(x, root)
                    assert torch.equal(x, reference.reduce(parts) if rank == root else parts[rank])
                gathered = [torch.empty(count, dtype=dtype) for _ in range(world)] if rank == root else None
                dist.gather(parts[rank], gathered, dst=root)
                assert rank != root or all(map(torch.equal, gathered, parts))
                out = torch.empty(count, dtype=dtype)
                dist.scatter(out, parts if rank == root else None, src=root)
                assert torch.equal(out, parts[rank])
    objects = [None] * world if rank == 1 else None
    dist.gather_object({"rank": rank}, objects, dst=1)
    assert rank != 1 or objects == [{"rank": r} for r in range(world)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


@pytest.mark.parametrize("machines", ["aa", "aaa", "aaaaa", "ab", "aab", "abc"])
def test_reduce_gather_scatter_and_their_objects(machines, copies):
    run_ranks(rooted, len(machines), before=on_machines(machines))


def everyone_to_everyone(rank):
    world = dist.get_world_size()
    delay_wherever_ranks_meet(rank)
    for scale in (1, 9001):
        sizes = [[scale * (1 + 2 * r + to) % 70_000 for to in range(world)] for r in range(world)]
        sent = [torch.full((size,), 100.0 * rank + to) for to, size in enumerate(sizes[rank])]
        rows = [sizes[r][rank] for r in range(world)]
        received = [torch.empty(size) for size in rows]
        dist.all_to_all(received, sent)
        assert all((part == 100.0 * r + rank).all() for r, part in enumerate(received))
        out = torch.empty(sum(rows), 2)
        dist.all_to_all_single(out, torch.cat(sent)[:, None].expand(-1, 2), rows, sizes[rank])
        assert all((part == 100.0 * r + rank).all() for r, part in enumerate(out.split(rows)))
    even = torch.arange(2.0 * world) + 10 * rank
    out = torch.empty_like(even)
    dist.all_to_all_single(out, even)
    assert out.tolist() == [10.0 * r + 2 * rank + i for r in range(world) for i in range(2)]
    if world == 3:
        with pytest.raises(weft.CollectiveMismatchError, match="rank 0 sends 2 elements to rank 1, which expects 3"):
            dist.all_to_all([torch.empty(3 if rank == 1 else 2) for _ in range(3)], [torch.empty(2)] * 3)


@pytest.mark.parametrize("machines", ["a", "aa", "aaa", "aaaaa", "ab", "aab", "aabbc"])
def test_all_to_all_of_any_sizes(machines, copies):
    run_ranks(everyone_to_everyone, len(machines), before=on_machines(machines))


def many_at_once(rank):
    """Asynchronous calls on two groups keep their order, and go on while this thread computes."""
    other = dist.new_group([0, 1, 2])
    delay_wherever_ranks_meet(rank)
    tensors = [torch.full((1000 * (i + 1),), float(i + rank)) for i in range(20)]
    works = [dist.all_reduce(x, group=other if i % 2 else None, async_op=True) for i, x in enumerate(tensors)]
    dist.all_reduce(torch.ones(3))  # waits behind what was submitted before it
    for i, (work, x) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() and (x == 3 * i + 3).all()
    for _ in range(5):  # a waiting rank finds a strided result complete, though a future completes it too
        large = torch.ones(1000, 1000).t()
        work = dist.all_reduce(large, async_op=True)
        future = work.get_future()
        work.wait()
        assert (large == 3).all()
        future.wait()
    strided = torch.ones(6, 4).t()
    future = dist.all_reduce(strided, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0].sum().item()).wait() == 72
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:  # comes when rank 1 has looked
        store.wait(["looked"], timedelta(seconds=20))
    slow = dist.barrier(async_op=True)
    if rank == 1:
        assert not slow.is_completed()
        store.set("looked", "")
    slow.wait()


def test_asynchronous_calls_keep_their_order_and_run_by_themselves():
    run_ranks(many_at_once, 3)


def messages(rank):
    world = dist.get_world_size()
    following, before = (rank + 1) % world, (rank - 1) % world
    for count in (0, 1, 1000, 300_000):  # more than a ring holds
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            x, expected = ((torch.arange(count) % 251 + sender).to(dtype) for sender in (rank, before))
            y = torch.empty(count, dtype=dtype)
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, y, before)])
            for work in works:
                work.wait()
            assert torch.equal(y, expected)
    # By tags, out of order, of a size that fills the ring in between.
    if rank == 0:
        works = [dist.isend(torch.full((50_000,), float(tag)), 1, tag=tag) for tag in (3, 1, 2)]
        if not hasattr(dist.group.WORLD.engine, "local"):  # over gloo a send is not done before it is received
            for work in works:
                work.wait()
    if rank == 1:
        for tag in (1, 2, 3):
            y = torch.empty(50_000)
            dist.recv(y, 0, tag=tag)
            assert (y == tag).all()
    # From anyone.
    if rank == 0:
        heard = set()
        for _ in range(world - 1):
            y = torch.empty(10)
            source = dist.recv(y)
            assert (y == source).all()
            heard.add(source)
        assert heard == set(range(1, world))
    else:
        dist.send(torch.full((10,), float(rank)), 0)
    column = torch.zeros(5, 2)[:, 1]
    if rank == 0:
        dist.send(torch.arange(10.0).view(5, 2)[:, 0], 1)
    elif rank == 1:
        dist.recv(column, 0)
        assert column.tolist() == [0, 2, 4, 6, 8]
    dist.barrier()


@pytest.mark.parametrize("machines", ["aa", "aaa", "aaaaa", "ab", "aab", "aabbc"])
def test_messages_by_rank_tag_and_from_anyone(machines):
    run_ranks(messages, len(machines), before=on_machines(machines))


def train_with_ddp(rank):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 4)).double()
    batch = torch.randn(2 * dist.get_world_size(), 9, dtype=torch.float64)
    model = DistributedDataParallel(whole, bucket_cap_mb=0.001)
    model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in whole.parameters()]
    whole.zero_grad()
    whole(batch).square().mean().backward()
    for got, parameter in zip(gradients, whole.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("machines", ["aaa", "aab"])
def test_ddp_runs_on_it_unchanged(machines):
    run_ranks(train_with_ddp, len(machines), before=on_machines(machines))


def functional(rank):
    import torch.distributed._functional_collectives as functional

    x = torch.ones(4) * (rank + 1)
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    assert (total + 0 == 3).all()
    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    assert (gathered + 0).tolist() == [1.0] * 4 + [2.0] * 4
    mine = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, dist.group.WORLD)
    assert (mine + 0).tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]


@pytest.mark.parametrize("machines", ["aa", "ab"])
def test_functional_collectives_find_the_group(machines):
    run_ranks(functional, len(machines), before=on_machines(machines))


class Marked(torch.Tensor):
    """A tensor that may mean more than its numbers."""


def usual_calls(rank):
    """The usual call runs none of the backend's Python, any other does, and both are right."""
    world, entered = dist.get_world_size(), []
    x, whole, parts = torch.ones(4), torch.ones(4 * world), [torch.ones(4) for _ in range(world)]
    calls = {
        "all_reduce": lambda x, **options: dist.all_reduce(x, **options),
        "reduce": lambda x, **options: dist.reduce(x, 0, **options),
        "broadcast": lambda x, **options: dist.broadcast(x, 0, **options),
        "all_gather": lambda x, **options: dist.all_gather(parts, x, **options),
        "all_gather_single": lambda x, **options: dist.all_gather_into_tensor(whole, x, **options),
        "reduce_scatter": lambda x, **options: dist.reduce_scatter(x, parts, **options),
        "reduce_scatter_single": lambda x, **options: dist.reduce_scatter_tensor(x, whole, **options),
        "all_to_all": lambda x, **options: dist.all_to_all([torch.empty(4) for _ in parts], [x] * world, **options),
        "all_to_all_single": lambda x, **options: dist.all_to_all_single(torch.empty(4), x, **options),
        "barrier": lambda x, **options: dist.barrier(**options),
    }

    def watch(frame, event, _):
        if event == "call" and "weft" in frame.f_globals.get("__name__", ""):
            entered.append(frame.f_code.co_name)

    def entries(call, *arguments, **options):
        entered.clear()
        sys.setprofile(watch)
        try:
            work = call(*arguments, **options)
        finally:
            sys.setprofile(None)
        if work is not None:
            work.wait()
        return list(entered)

    for name, call in calls.items():
        assert set(entries(call, x)) <= {"<lambda>", "<listcomp>", "wait"}, name
        assert len(entries(call, x, async_op=True)) > 1, name
        if name != "barrier":
            strided, marked = torch.ones(4, 2)[:, 0], torch.ones(4).as_subclass(Marked)
            for unusual in (strided, marked):
                assert len(entries(call, unusual)) > 1, name


def test_the_usual_call_runs_no_python():
    run_ranks(usual_calls, 2)


def test_the_numbers_of_torchs_reductions_are_those_known():
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    for number, name in enumerate(names):
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, name)
        assert hash(options.reduceOp) == number, name


def negative_views(rank):
    x = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    assert x.is_neg() and x.is_contiguous() is False
    view = torch._neg_view(torch.ones(3))
    for call in (lambda: dist.all_reduce(view), lambda: weft.all_reduce(view)):
        with pytest.raises(TypeError, match="no conjugate or negative views"):
            call()


def test_a_negative_view_is_refused():
    run_ranks(negative_views, 2)


class Valueless(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(torch.empty(x.shape) if isinstance(x, cls) else x for x in args), **(kwargs or {}))


def tensors_without_values(rank):
    x = torch.Tensor._make_wrapper_subclass(Valueless, (3,))
    calls = dist.all_reduce, weft.all_reduce, lambda x: dist.broadcast(x, 0), lambda x: dist.send(x, 1 - rank)
    for call in (*calls, lambda x: dist.all_gather([torch.ones(3)] * 2, x)):
        with pytest.raises(TypeError, match="values in memory, got Valueless without"):
            call(x)
    dist.all_reduce(torch.empty(0))  # has none, and needs none


def test_a_tensor_without_values_is_refused():
    run_ranks(tensors_without_values, 2)


def overlap_in_one_tensor(rank):
    """Outputs that overlap inputs which other ranks read."""
    world, rows = dist.get_world_size(), 10_000
    whole = [torch.arange(world * rows, dtype=torch.float32) + 1000 * r for r in range(world)]
    x = whole[rank].clone()
    dist.reduce_scatter_tensor(x[:rows], x)
    assert torch.equal(x[:rows], reference.reduce([w.view(world, rows)[rank] for w in whole]))
    x = whole[rank].clone()
    dist.all_to_all_single(x, x)
    assert torch.equal(x, torch.cat([w.view(world, rows)[rank] for w in whole]))


def test_outputs_may_overlap_inputs(copies):
    run_ranks(overlap_in_one_tensor, 3)


def symmetric_inputs(rank):
    """Each collective reads inputs in symmetric memory where they lie, with the bits of ordinary ones."""
    world, count = dist.get_world_size(), 30_000
    shared = weft.empty_symmetric(world * count)
    parts = [shard_of_rank(r, world * count, torch.float32) for r in range(world)]
    shared.copy_(parts[rank])
    flat = torch.empty(world * world * count)
    dist.all_gather_into_tensor(flat, shared)
    assert torch.equal(flat, torch.cat(parts))
    shard = torch.empty(count)
    dist.reduce_scatter_tensor(shard, shared)
    assert torch.equal(shard, reference.reduce(parts)[rank * count :][:count])
    moved = torch.empty(world * count)
    dist.all_to_all_single(moved, shared)
    assert torch.equal(moved, torch.cat([part[rank * count :][:count] for part in parts]))
    dist.broadcast(shared, world - 1)
    assert torch.equal(shared, parts[-1])


@pytest.mark.parametrize("world", [2, 3])
def test_symmetric_inputs(world, copies):
    run_ranks(symmetric_inputs, world)


@pytest.mark.parametrize(
    ("masks", "on_machine", "quota", "expected"),
    [
        ([[0, 1], [0, 1]], 2, math.inf, False),
        ([[0, 1], [0, 1]], 3, math.inf, True),  # a third rank is in another group
        ([[0], [1]], 8, math.inf, False),  # each has a core of its own
        ([[0], [0]], 2, math.inf, True),
        ([[4 * rank + core for core in range(4)] for rank in range(16)], 16, math.inf, False),
        ([[0, 1, 2, 3]] * 4, 4, 2.0, True),  # a container of two cores
        ([[0, 1, 2, 3]] * 4, 4, 4.0, False),
    ],
)
def test_ranks_share_cores_if_there_are_fewer(masks, on_machine, quota, expected):
    ranks = [{"cores": mask, "cpu_quota": quota, "cgroup": "/"} for mask in masks]
    assert rendezvous._oversubscribed(ranks, on_machine) is expected


@pytest.mark.parametrize(
    ("masks", "on_machine", "quota", "expected"),
    [
        ([range(8)] * 2, 2, math.inf, 4),
        ([range(8)] * 2, 4, math.inf, 2),  # two more ranks in another group
        ([range(4), range(4, 8)], 2, math.inf, 4),  # each has cores of its own
        ([range(8)] * 2, 2, 3.0, 1),  # a container of three cores for both
        ([range(64)], 1, math.inf, 6),  # torch's threads
        ([range(2)] * 3, 3, math.inf, 1),
    ],
)
def test_a_rank_takes_torchs_threads_if_there_are_cores(masks, on_machine, quota, expected, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    ranks = [{"cores": list(mask), "cpu_quota": quota, "cgroup": "/"} for mask in masks]
    assert rendezvous._threads(ranks, 0, on_machine) == expected


def many_groups(rank):
    groups = [dist.new_group([0, 1, 2]) for _ in range(4)]
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own, which is closed again
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    for group in groups:
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert (x == 3).all()
    return sum("pidfd" in link for link in links)


def test_all_groups_watch_a_process_by_one_descriptor():
    assert run_ranks(many_groups, 3) == [3, 3, 3]  # of each rank, its own process among them


def for_other_things(rank, asynchronous):
    x = torch.ones(3)
    with calls_for("a norm"):
        dist.all_reduce(x)
        with calls_for("something inside of it"):
            dist.all_reduce(x, async_op=True).wait()
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    with calls_for("a norm") if rank else contextlib.nullcontext():
        again = dist.all_reduce(x, async_op=asynchronous)
        if asynchronous:
            again.wait()
    work.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_for_different_things_are_a_mismatch(asynchronous):
    for outcome in try_ranks(for_other_things, 2, asynchronous):
        text = "rank 0 called all_reduce(float32, 3 elements, sum), rank 1 called all_reduce(float32, 3 elements, sum) for a norm."
        assert text in str(outcome.error), outcome
