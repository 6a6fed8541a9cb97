"""Random calls on random sizes with random delays and deaths, from a seed: no hang, no wrong sum.

`make test` runs a few rounds, `make soak` a thousand (WEFT_SOAK_ROUNDS). A round that fails names its seed;
`WEFT_SOAK_SEED=n WEFT_SOAK_ROUNDS=1` runs it alone.
"""

import os
import random
import signal

import torch
import torch.distributed as dist

import weft
from weft.testing import reference
from weft.testing.ranks import try_ranks

ROUNDS = int(os.environ.get("WEFT_SOAK_ROUNDS", "15"))
FIRST_SEED = int(os.environ.get("WEFT_SOAK_SEED", "1"))
NOTICED_WITHIN_S = 2


def all_reduce(rank, parts, chosen):
    x = parts[rank].clone()
    work = dist.all_reduce(x, async_op=chosen.random() < 0.5)
    if work is not None:
        work.wait()
    assert torch.equal(x, reference.reduce(parts))


def all_reduce_in_place(rank, parts, chosen):
    x = weft.empty_symmetric(len(parts[0]), dtype=parts[0].dtype)
    x.copy_(parts[rank])
    assert torch.equal(weft.all_reduce(x), reference.reduce(parts))


def all_gather(rank, parts, chosen):
    out = [torch.empty_like(part) for part in parts]
    dist.all_gather(out, parts[rank])
    assert all(map(torch.equal, out, parts))


def reduce_scatter(rank, parts, chosen):
    sizes = [len(shard) for shard in parts[0].tensor_split(len(parts))]
    out = parts[0].new_empty(sizes[rank])
    dist.reduce_scatter(out, list(parts[rank].split(sizes)))
    assert torch.equal(out, reference.reduce(parts).split(sizes)[rank])


def broadcast(rank, parts, chosen):
    root = chosen.randrange(len(parts))
    x = parts[rank].clone()
    dist.broadcast(x, root)
    assert torch.equal(x, parts[root])


def all_to_all(rank, parts, chosen):
    sent = [parts[rank][: len(parts[rank]) // (r + 1)].contiguous() for r in range(len(parts))]
    received = [part.new_empty(len(part) // (rank + 1)) for part in parts]
    dist.all_to_all(received, sent)
    assert all(torch.equal(got, part[: len(got)]) for got, part in zip(received, parts, strict=True))


def messages_round_the_ring(rank, parts, chosen):
    world = len(parts)
    before = (rank - 1) % world
    y = torch.empty_like(parts[before])
    operations = [dist.P2POp(dist.isend, parts[rank], (rank + 1) % world), dist.P2POp(dist.irecv, y, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(y, parts[before])


CALLS = [all_reduce, all_reduce_in_place, all_gather, reduce_scatter, broadcast, all_to_all, messages_round_the_ring]


def live(rank, seed, calls, victim, point):
    world = dist.get_world_size()
    engine = dist.group.WORLD.engine.group
    engine.inject_faults(
        seed=seed * 10 + rank,
        longest_delay_us=random.Random(seed).choice([0, 30, 300]),
        die_at_point=point if rank == victim else 0,
    )
    chosen = random.Random(seed)
    for number in range(calls):
        call = chosen.choice(CALLS)
        dtype = chosen.choice([torch.float32, torch.bfloat16, torch.int64, torch.float64])
        count = chosen.choice([1, 7, 100, 5_000, 40_000, 150_000])
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        parts = [(torch.randn(count, generator=generator) * 50).to(dtype) for _ in range(world)]
        call(rank, parts, chosen)


def one_round(seed):
    """What went wrong in the round of that seed, if anything."""
    chosen = random.Random(seed)
    world = chosen.choice([2, 2, 3, 4, 5])
    victim = chosen.randrange(world) if chosen.random() < 0.5 else None
    point = chosen.randrange(1, 60)
    outcomes = try_ranks(live, world, seed, 12, victim, point, timeout_s=60)
    died = victim is not None and outcomes[victim].exit_code == -signal.SIGKILL
    for outcome in outcomes:
        if died and outcome.rank == victim:
            continue
        error = outcome.error
        if outcome.exit_code not in (0, 1):
            return f"rank {outcome.rank} ended with {outcome.exit_code}: {outcome.traceback}"
        if died and isinstance(error, weft.RankLostError):
            if f"rank {victim}" not in str(error):
                return f"rank {outcome.rank} names another: {error}"
        elif error is not None:
            return f"rank {outcome.rank}: {error!r}\n{outcome.traceback}"
    if died:
        ends = [outcome.seconds for outcome in outcomes if outcome.rank != victim]
        if max(ends) - min(ends) > NOTICED_WITHIN_S:
            return f"noticed at {ends} s"
    return None


def test_random_calls_delays_and_deaths():
    for seed in range(FIRST_SEED, FIRST_SEED + ROUNDS):
        fault = one_round(seed)
        assert fault is None, f"seed {seed}: {fault}"
