"""The collectives of the shared-memory engine, through torch.distributed: right, and the same bits everywhere."""

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing import reference
from weft.testing.cases import COUNTS
from weft.testing.ranks import run_ranks

WORLDS = [1, 2, 3, 5]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool]


def shard_of_rank(rank, count, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, generator=generator, dtype=torch.float64) * 4
    return (x > 0) if dtype == torch.bool else x.to(dtype) if dtype.is_floating_point else x.abs().to(dtype)


def delay_wherever_ranks_meet(rank):
    dist.group.WORLD.engine.inject_faults(seed=rank + 1, longest_delay_us=300)


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
    for name, op in {"and": dist.ReduceOp.BAND, "or": dist.ReduceOp.BOR, "xor": dist.ReduceOp.BXOR}.items():
        parts = [shard_of_rank(r, 1000, torch.int32) for r in range(world)]
        x = parts[rank].clone()
        dist.all_reduce(x, op)
        assert torch.equal(x, reference.reduce(parts, f"bitwise_{name}")), name
    x = torch.view_as_complex(torch.full((3, 2), float(rank + 1)))
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((3,), complex(world * (world + 1) / 2, world * (world + 1) / 2)))


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
    for staging_kib in ("4", "256"):
        monkeypatch.setenv("WEFT_STAGING_KIB", staging_kib)
        results += run_ranks(reduce_whole_and_in_pieces, world, dtype)
    assert all(torch.equal(result, results[0]) for result in results)


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
def test_all_gather_and_broadcast_move_every_byte(world):
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
def test_uneven_reduce_scatter_and_all_gather(world):
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


def test_subgroups_meshes_and_objects():
    run_ranks(subgroups, 4)


def asynchronous(rank):
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() and work.is_completed()
    future = work.get_future().then(lambda done: done.value()[0].sum())
    assert future.wait().item() == 1000 * dist.get_world_size()


def test_a_work_can_be_waited_for_and_chained():
    run_ranks(asynchronous, 2)


def missing(rank):
    x = torch.ones(2)
    for name, call in {
        "send": lambda: dist.send(x, 1 - rank),
        "reduce": lambda: dist.reduce(x, 0),
        "gather": lambda: dist.gather(x, [x, x] if rank == 0 else None),
        "all_to_all_single|alltoall": lambda: dist.all_to_all_single(torch.empty(2), x),
    }.items():
        with pytest.raises(NotImplementedError, match=f"weft backend has no ({name})"):
            call()
    with pytest.raises(ValueError, match="does not reduce by"):
        dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))


def test_what_is_not_there_yet_says_so_by_name():
    run_ranks(missing, 2)


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


def test_ddp_runs_on_it_unchanged():
    run_ranks(train_with_ddp, 3)


def functional(rank):
    import torch.distributed._functional_collectives as functional

    x = torch.ones(4) * (rank + 1)
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    assert (total + 0 == 3).all()
    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    assert (gathered + 0).tolist() == [1.0] * 4 + [2.0] * 4
    mine = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, dist.group.WORLD)
    assert (mine + 0).tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]


def test_functional_collectives_find_the_group():
    run_ranks(functional, 2)
