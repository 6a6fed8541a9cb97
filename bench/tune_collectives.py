"""weft tune collectives: measure each algorithm on this machine's GPUs, and write at which sizes they take turns."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.bench.environment import environment
from weft.bench.measure import ROUNDS, slowest_rank
from weft.bench.several_gpus_rank import device_us
from weft.comm import crossovers as tables
from weft.comm.communicator import Communicator
from weft.comm.crossovers import NEVER, Crossovers
from weft.comm.registry import communicator
from weft.testing.ranks import run_ranks

SIZES = [1024 << shift for shift in range(17)]  # 1 KiB to 64 MiB
_REPEATS = 10
_TIMEOUT_S = 1800.0
_DTYPE = torch.bfloat16

# Crossovers with which a call takes the algorithm at any size. low_latency also has a limit of its own.
ALL_REDUCE = {
    "low_latency": Crossovers(NEVER, 0, NEVER, NEVER),
    "one_shot": Crossovers(0, NEVER, NEVER, NEVER),
    "two_shot": Crossovers(0, 0, NEVER, NEVER),
    "nccl": Crossovers(0, 0, 0, NEVER),
}
ALL_GATHER = {"gather": Crossovers(0, 0, NEVER, NEVER), "gather by nccl": Crossovers(0, 0, 0, NEVER)}
IN_PLACE = {"in place": Crossovers(0, 0, NEVER, NEVER), "copies": Crossovers(0, 0, NEVER, 0)}

Times = Mapping[int, Mapping[str, float]]  # microseconds by size in bytes and algorithm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", help="where the table goes; by default into the installed package")


def run(op: str, options) -> int:
    """Write <architecture>.json and return the exit code; raise SystemExit with fewer than two GPUs."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise SystemExit(f"weft tune {op}: needs several GPUs, and there are {gpus}; only measurements go into a table")
    worlds = sorted({world for world in (2, 4, 8) if world < gpus} | {gpus})
    settings: dict[str, Any] = {"timeout_s": _TIMEOUT_S, "group_timeout_s": _TIMEOUT_S, "start": "spawn"}
    times = {world: _of_ranks(run_ranks(measure, world, backend="cpu:weft,cuda:nccl", **settings)) for world in worlds}
    folder = Path(options.out) if options.out else Path(tables.__file__).parent / "crossovers"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tables.architecture_of(torch.device('cuda'))}.json"
    measured_on = {"device": torch.cuda.get_device_name(), **environment(), "microseconds": times}
    found = {world: crossovers(of_world) for world, of_world in times.items()}
    path.write_text(tables.table_text(found, measured_on))
    print(json.dumps({world: vars(row) for world, row in found.items()}), path)
    return 0


def crossovers(times: Times) -> Crossovers:
    """Return the sizes from which on the later algorithm is never the slower one."""

    def first(earlier: tuple[str, ...], later: tuple[str, ...]) -> int:
        def best(size: int, names: tuple[str, ...]) -> float:
            return min(times[size].get(name, float("inf")) for name in names)

        found = NEVER
        for size in sorted(times, reverse=True):
            if best(size, later) > best(size, earlier):
                break
            found = size
        return found if found > min(times) else 0

    ours = "low_latency", "one_shot", "two_shot"
    nccl = max(first(ours, ("nccl",)), first(("gather",), ("gather by nccl",)))
    return Crossovers(
        one_shot=first(ours[:1], ours[1:]),
        two_shot=first(ours[1:2], ours[2:]),
        nccl=nccl,
        copies=first(("in place",), ("copies",)),
    )


def measure(rank: int) -> dict[int, dict[str, list[float]]]:
    """Return this rank's microseconds in each round, by size and algorithm, on the GPU of the rank's number."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = communicator(None)
    weft.all_reduce(torch.zeros(1, device=device))
    ordinary = torch.zeros(SIZES[-1] // _DTYPE.itemsize, dtype=_DTYPE, device=device)
    symmetric = weft.empty_symmetric(len(ordinary), dtype=_DTYPE, device=device).zero_()
    return {size: device_us(calls(ranks, size, ordinary, symmetric), ROUNDS, _REPEATS) for size in SIZES}


def calls(ranks: Communicator, size: int, ordinary: torch.Tensor, symmetric: torch.Tensor) -> dict[str, Callable]:
    """Return `_REPEATS` calls on `size` bytes by each algorithm that takes them, by name."""
    count = size // ordinary.element_size() // ranks.world_size * ranks.world_size
    whole, shared = ordinary[:count], symmetric[:count]
    parts, slots = list(whole.chunk(ranks.world_size)), list(shared.chunk(ranks.world_size))
    gathered: Any = ranks
    found: dict[str, Callable] = {}

    def add(name: str, forced: Crossovers, call: Callable[[], object]) -> None:
        def several() -> None:
            gathered.crossovers = forced
            for _ in range(_REPEATS):
                call()

        found[name] = several

    for name, forced in ALL_REDUCE.items():
        if name != "low_latency" or size <= gathered.low_latency_bytes:
            add(name, forced, lambda: ranks.all_reduce_(whole, dist.ReduceOp.SUM, deterministic=False))
    for name, forced in ALL_GATHER.items():
        add(name, forced, lambda: ranks.all_gather_into(parts[ranks.rank], parts))
    for name, forced in IN_PLACE.items():
        add(name, forced, lambda: ranks.all_gather_into(slots[ranks.rank], slots))
    return found


def _of_ranks(per_rank: list[dict[int, dict[str, list[float]]]]) -> dict[int, dict[str, float]]:
    """Return the medians over rounds of the slowest rank's times."""
    return {
        size: {name: times.p50_us for name, times in slowest_rank([found[size] for found in per_rank]).items()}
        for size in per_rank[0]
    }
