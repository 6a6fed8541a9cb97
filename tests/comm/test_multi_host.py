"""Groups that span machines: shared memory inside each, gloo between them. Machines here are names that ranks go by,
and once two network namespaces."""

import ctypes
import os
import signal
import subprocess
import threading
import time
import uuid
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import weft
from weft.comm import multi_host
from weft.comm.inter_host import InterHost
from weft.sharding.sizes import split_sizes
from weft.testing import reference
from weft.testing.ranks import on_machines, run_ranks, try_ranks

NOTICED_WITHIN_S = 4
MEET_WITHIN_S = 10  # of what a test waits for before it begins
LAYOUTS = ["ab", "aab", "aabb", "abab", "aaabb", "abc", "aabbc"]  # the machine of each rank


def spread(function, layout, *args, run=run_ranks, **options):
    return run(function, len(layout), *args, before=on_machines(layout), **options)


def random_part(rank, count, dtype):
    x = torch.randn(count, generator=torch.Generator().manual_seed(1000 * count + rank), dtype=torch.float64) * 4
    return (x > 0) if dtype == torch.bool else x.to(dtype) if dtype.is_floating_point else x.abs().to(dtype)


def by_machine(parts, layout):
    """The sum in the order that spans machines: ranks of each, in fp32, then machines."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    machines = dict.fromkeys(layout)
    sums = [
        reference.reduce([part.to(wide) for part, name in zip(parts, layout, strict=True) if name == machine])
        for machine in machines
    ]
    return reference.reduce(sums)


def check_reductions(rank, layout):
    world = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool):
        for count in (0, 1, 2, 7, 1023, 65_537):
            parts = [random_part(r, count, dtype) for r in range(world)]
            x = parts[rank].clone()
            dist.all_reduce(x)
            assert torch.equal(x, by_machine(parts, layout).to(dtype)), (dtype, count)
            for op, name in ((dist.ReduceOp.MAX, "max"), (dist.ReduceOp.PRODUCT, "product")):
                if name == "product" and dtype.is_floating_point:
                    continue  # its order differs
                x = parts[rank].clone()
                dist.all_reduce(x, op)
                assert torch.equal(x, reference.reduce(parts, name)), (dtype, count, name)
    parts = [random_part(r, 1000, torch.float32) for r in range(world)]
    x = parts[rank].clone()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    numbers = torch.tensor([7, -7]) * (rank + 1)
    dist.all_reduce(numbers, dist.ReduceOp.AVG)
    total = 7 * sum(range(1, dist.get_world_size() + 1))
    assert numbers.tolist() == [total // dist.get_world_size(), -(total // dist.get_world_size())]
    assert torch.equal(x, by_machine(parts, layout) / world)
    x = parts[rank].clone()
    dist.reduce(x, 1, dist.ReduceOp.MIN)
    assert torch.equal(x, reference.reduce(parts, "min") if rank == 1 else parts[rank])
    norm = torch.zeros(1, dtype=torch.float64)
    x = weft.all_reduce(parts[rank].clone(), wire_dtype=torch.bfloat16, scale=0.5, squared_norm=norm)
    expected = (by_machine([part.bfloat16() for part in parts], layout) * 0.5).bfloat16().float()
    assert torch.equal(x, expected) and torch.allclose(norm, expected.double().square().sum())


def check_chunks(rank, layout):
    parts = [random_part(r, 100_003, torch.float32) for r in range(len(layout))]
    whole = by_machine(parts, layout)
    for chunk_bytes in (4 << 20, 1 << 16, 1000):
        multi_host._CHUNK_BYTES = chunk_bytes
        x = parts[rank].clone()
        dist.all_reduce(x)
        assert torch.equal(x, whole), chunk_bytes
        x = parts[rank].bfloat16()
        dist.all_reduce(x)
        assert torch.equal(x, by_machine([part.bfloat16() for part in parts], layout).bfloat16()), chunk_bytes


@pytest.mark.parametrize("layout", ["ab", "aaabb", "abc"])
def test_chunks_do_not_change_bits(layout):
    spread(check_chunks, layout, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_in_the_order_of_ranks_then_of_machines_to_the_bit(layout):
    spread(check_reductions, layout, layout)


def check_moves(rank):
    world = dist.get_world_size()
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.int8):
        for count in (0, 1, 5, 1000, 70_001):
            x = (torch.arange(count) * 7 % 251 + rank).to(dtype)
            each = [(torch.arange(count) * 7 % 251 + r).to(dtype) for r in range(world)]
            parts = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(parts, x)
            assert all(map(torch.equal, parts, each))
            for root in range(world):
                y = x.clone()
                dist.broadcast(y, root)
                assert torch.equal(y, each[root])
    uneven = [torch.full((3 * r, 2), float(r)) for r in range(world)]
    got = [torch.empty_like(part) for part in uneven]
    dist.all_gather(got, uneven[rank])
    assert all(map(torch.equal, got, uneven))
    y = torch.full((5 * rank,), -1.0)
    dist.reduce_scatter(y, [torch.arange(5.0 * r) for r in range(world)])
    assert torch.equal(y, torch.arange(5.0 * rank) * world)
    x = weft.all_gather(torch.full((2, split_sizes(7, world)[rank]), float(rank)), dim=1)
    assert torch.equal(x[0], torch.cat([torch.full((n,), float(r)) for r, n in enumerate(split_sizes(7, world))]))
    objects = [{"from": 0}, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [{"from": 0}, "text"]
    strided = torch.zeros(6, 4).t()
    strided[1] = rank
    dist.all_reduce(strided)
    assert torch.equal(strided[1], torch.full((6,), world * (world - 1) / 2)) and not strided[0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_moved(layout):
    spread(check_moves, layout)


def check_asynchronous(rank):
    tensors = [torch.full((50_000,), float(i + rank)) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    chained = works[-1].get_future().then(lambda future: future.value()[0].sum())
    late = torch.ones(1)
    dist.all_reduce(late)  # behind the others
    assert late.item() == 3 and all(work.is_completed() for work in works)
    for i, (work, x) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() and (x == 3 * i + 3).all()
    assert chained.wait() == tensors[-1].sum()
    dist.barrier()


def test_asynchronous_calls_keep_their_order():
    spread(check_asynchronous, "aba")


def check_patience(rank):
    """A wait for a message may end before the message comes; asking whether it is there receives it."""
    column = torch.zeros(4, 2)[:, 1]
    if rank == 1:
        first, second = dist.irecv(column, 0), dist.irecv(torch.zeros(1), 0, tag=1)
        assert not first.is_completed()
        with pytest.raises(TimeoutError, match="it goes on"):
            first.wait(timedelta(milliseconds=50))
        dist.barrier()
        assert second.wait()
        while not first.is_completed():
            time.sleep(0.01)
        assert column.tolist() == [0, 1, 2, 3]
    else:
        dist.barrier()
        dist.send(torch.arange(4.0), 1)
        dist.send(torch.zeros(1), 1, tag=1)


def test_a_message_can_be_asked_for():
    spread(check_patience, "ab")


def fail_before_machines_meet(rank, how):
    """Rank 1 dies, or cannot connect and lives on until the others know."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:

        def fail(*arguments):
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no descriptor is left")

        InterHost._connect = fail
    try:
        dist.new_group([0, 1, 2])
    finally:
        if rank == 1:
            store.wait(["noticed/0", "noticed/2"], timedelta(seconds=MEET_WITHIN_S))
        else:
            store.set(f"noticed/{rank}", "")


@pytest.mark.parametrize("how", ["dies", "lives"])
def test_a_rank_that_fails_before_machines_have_met_is_noticed(how):
    outcomes = spread(fail_before_machines_meet, "aab", how, run=try_ranks, timeout_s=30)
    message = "rank 1 was lost" if how == "dies" else "rank 1 could not reach the other machines"
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.CommError) and message in str(survivor.error), outcomes


def interrupt_a_receive(rank):
    """What rank 0 waits for is sent when its wait has ended, and not before."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"], timedelta(seconds=MEET_WITHIN_S))
        dist.send(torch.ones(3), 0)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.recv(torch.empty(3), 1)
        store.set("interrupted", "")
    dist.barrier()


def test_ctrl_c_ends_a_wait_for_a_message():
    spread(interrupt_a_receive, "ab")


def check_mismatch(rank):
    x = torch.zeros(10)
    with pytest.raises(weft.CollectiveMismatchError, match=r"ranks 0, 2 called all_reduce.*rank 1 called broadcast"):
        dist.broadcast(x, 0) if rank == 1 else dist.all_reduce(x)
    with pytest.raises(weft.CollectiveMismatchError, match=r"10 elements, sum.*12 elements, sum"):
        dist.all_reduce(torch.zeros(12 if rank == 2 else 10))
    with pytest.raises(weft.CollectiveMismatchError, match="rank 0 sends 2 elements to rank 0, which expects 1"):
        sent = torch.zeros(4 if rank == 0 else 3)
        dist.all_to_all_single(torch.zeros(3), sent, [1, 1, 1], [2, 1, 1] if rank == 0 else [1, 1, 1])
    with pytest.raises(ValueError, match='"avg" of bool'):
        dist.all_reduce(x.bool(), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="rank 3 is not a rank of a group of 3"):
        dist.group.WORLD.engine.broadcast(x, 3)
    with pytest.raises(ValueError, match="one machine"):
        weft.empty_symmetric(4)
    for call in (dist.all_reduce, partial(dist.recv, src=(rank + 1) % 3)):
        with pytest.raises(ValueError, match="more than one element"):
            call(torch.zeros(3).expand(2, 3))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (x == 3).all(), "the group stays usable"


def test_ranks_that_disagree_across_machines_are_named():
    spread(check_mismatch, "aba")


def die(rank, victims):
    x = torch.ones(100_000)
    dist.all_reduce(x)
    if rank in victims:
        os.kill(os.getpid(), 9)
    for _ in range(1000):
        dist.all_reduce(x)


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_dead_rank_is_named_on_every_machine(victim):
    outcomes = spread(die, "aabb", {victim}, run=try_ranks)
    for survivor in outcomes[:victim] + outcomes[victim + 1 :]:
        assert isinstance(survivor.error, weft.RankLostError), survivor
        assert f"rank {victim} (pid" in str(survivor.error) and survivor.seconds < NOTICED_WITHIN_S, survivor


def test_a_dead_machine_is_noticed():
    outcomes = spread(die, "aabb", {2, 3}, run=try_ranks)
    for survivor in outcomes[:2]:
        assert isinstance(survivor.error, weft.RankLostError), survivor
        assert "[2, 3], on other machines" in str(survivor.error) and survivor.seconds < NOTICED_WITHIN_S, survivor


def be_silent(rank):
    """Rank 3 lives and says nothing until the others have given up; then it must not believe that all is well."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.group.WORLD.engine.set_timeout(timedelta(seconds=2))
    if rank == 3:
        store.wait([f"gave up/{other}" for other in range(3)], timedelta(seconds=20))
    try:
        dist.barrier()
    except weft.CommError:
        store.set(f"gave up/{rank}", "")
        raise


def test_a_silent_rank_is_a_timeout():
    outcomes = spread(be_silent, "aabb", run=try_ranks)
    for outcome in outcomes:
        assert isinstance(outcome.error, weft.CollectiveTimeoutError), outcome
        assert outcome.seconds < 2 + NOTICED_WITHIN_S, outcome


def abort(rank):
    if rank == 1:
        time.sleep(0.3)
        dist.group.WORLD.abort()
        return
    dist.barrier()


def test_an_aborted_group_ends_the_calls_of_all():
    outcomes = spread(abort, "aab", run=try_ranks)
    for waiting in (outcomes[0], outcomes[2]):
        assert isinstance(waiting.error, weft.CommError) and "rank 1 aborted" in str(waiting.error), waiting
        assert waiting.seconds < NOTICED_WITHIN_S


def fork(rank):
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
        except weft.CommError as error:
            if "a forked child cannot" in str(error):
                dist.destroy_process_group()
                os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (x == 3).all()


def test_a_forked_child_is_no_rank():
    spread(fork, "aab")


def in_namespace(names, interfaces, rank):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{names[rank // 2]}") as namespace:
        if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["WEFT_HOST"] = names[rank // 2]
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank // 2]


@pytest.fixture
def two_namespaces():
    mark = uuid.uuid4().hex[:6]
    names = [f"weft-{mark}-a", f"weft-{mark}-b"]
    interfaces = [f"w{mark}a", f"w{mark}b"]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", interfaces[0], "netns", names[0], "type", "veth", "peer", interfaces[1], "netns", names[1])
        for number, (name, interface) in enumerate(zip(names, interfaces, strict=True)):
            ip("-n", name, "address", "add", f"10.231.0.{number + 1}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets no test make network namespaces: {error} {getattr(error, 'stderr', '')}")
    try:
        yield names, interfaces
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def check_everything(rank):
    check_reductions(rank, "aabb")
    check_moves(rank)


def test_two_network_namespaces_with_two_ranks_each(two_namespaces):
    run_ranks(check_everything, 4, before=partial(in_namespace, *two_namespaces), timeout_s=120)
    outcomes = try_ranks(die, 4, {2}, before=partial(in_namespace, *two_namespaces))
    assert all("rank 2 (pid" in str(outcomes[rank].error) for rank in (0, 1, 3))
