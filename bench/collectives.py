"""weft bench collectives: every collective with nccl-tests' flags and columns, against gloo and the machine's limit.

For W ranks and N bytes in place, an all_reduce reads at least W N bytes and writes as many. W ranks that each copy N
bytes at the same time do the same: their time is the limit.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft.bench import mpi
from weft.bench.data_parallel import linear_layers, measure_ddp
from weft.bench.measure import alternate, slowest_rank
from weft.bench.suites import RefusedError, positive
from weft.bench.table import Row
from weft.testing.ranks import on_machines, run_ranks

DDP_STEP = "ddp_step"  # forward, backward and reduction of gradients; its bytes are the gradients'
OPERATIONS = {  # name: share of the bytes that cross a rank's link, for W ranks (nccl-tests' bus bandwidth)
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "all_gather": lambda world: (world - 1) / world,
    "reduce_scatter": lambda world: (world - 1) / world,
    "all_to_all": lambda world: (world - 1) / world,
    "broadcast": lambda world: 1.0,
    DDP_STEP: lambda world: 2 * (world - 1) / world,
}
DATATYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "int32", "int64")
LIMIT = "W ranks that each copy that many bytes at the same time (y.copy_(x)); of a ddp_step: the step by itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-b", "--minbytes", type=_bytes, default=4096, help="smallest size (default 4K)")
    parser.add_argument("-e", "--maxbytes", type=_bytes, default=25 << 20, help="largest size (default 25M)")
    parser.add_argument("-f", "--stepfactor", type=_factor, default=0, help="between sizes (default: 4K, 1M, 25M)")
    parser.add_argument(
        "-d", "--datatype", choices=DATATYPES, default="float32", metavar="TYPE", help=f"of {', '.join(DATATYPES)}"
    )
    parser.add_argument("-n", "--iters", type=positive, default=0, help="calls a measurement (default: by size)")
    parser.add_argument(
        "--machines",
        metavar="NAMES",
        help="a letter a rank: pretend that ranks run on these machines, joined over loopback (aabb)",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="beside Open MPI, MPICH and Intel MPI, from C and by mpi4py; FOLDER has, or gets, their packages",
    )
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="operations to run")


def _bytes(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    unit = text[-1:].upper()
    return int(text[:-1]) << units[unit] if unit in units else int(text)


def _factor(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes would not grow; say at least 2")
    return int(text)


def sizes(options: argparse.Namespace) -> list[int]:
    """Return the sizes to measure in bytes; raise RefusedError if there are none."""
    if options.stepfactor < 2:
        found = [size for size in (4096, 1 << 20, 25 << 20) if options.minbytes <= size <= options.maxbytes]
    else:
        found, size = [], max(1, options.minbytes)
        while size <= options.maxbytes:
            found.append(size)
            size *= options.stepfactor
    if not found:
        raise RefusedError(
            f"there is no size from -b {options.minbytes} to -e {options.maxbytes}: widen them, or say -f 2 for other "
            "sizes than 4K, 1M and 25M"
        )
    return found


def run(options: argparse.Namespace) -> Iterator[Row]:
    if options.peers:
        if options.datatype != "float32" or options.machines:
            raise RefusedError("--peers measures float32 on one machine: leave --datatype and --machines out")
        yield from mpi.rows(options.peers, options.world, sizes(options), options.rounds)
        return
    dtype = getattr(torch, options.datatype)
    for operation in options.op:
        if operation == DDP_STEP:
            count = sum(parameter.numel() for parameter in linear_layers().parameters())
            yield _line(operation, count, torch.float32, options, measure_ddp, options.iters or 3)
            continue
        for size in sizes(options):
            count = max(1, size // dtype.itemsize)
            calls = options.iters or max(8, min(1000, (64 << 20) // max(size, 1)))
            yield _line(operation, count, dtype, options, _measure, calls, operation, count, dtype)


def _line(operation: str, count: int, dtype: torch.dtype, options, measure, calls: int, *arguments) -> Row:
    world = len(options.machines or "") or options.world
    before = on_machines(options.machines) if options.machines else None
    per_rank = run_ranks(
        measure, world, options.rounds, calls, *arguments, timeout_s=600, group_timeout_s=120, before=before
    )
    times = slowest_rank([samples for samples, _ in per_rank])
    wrong = sum(wrong for _, wrong in per_rank)
    if wrong:
        raise AssertionError(f"{operation} of {count} elements: {wrong} are wrong; not measured")
    bytes = count * dtype.itemsize
    best = times.get("symmetric", times["ordinary"])
    algbw_gb_s = {name: bytes / times[name].p50_us / 1e3 for name in ("symmetric", "ordinary") if name in times}
    facts = {
        "algbw_gb_s": algbw_gb_s,
        "busbw_gb_s": {name: rate * OPERATIONS[operation](world) for name, rate in algbw_gb_s.items()},
        "ordinary_ratio": times["gloo"].p50_us / times["ordinary"].p50_us,
        "of_limit": times["limit"].p50_us / best.p50_us,
        "wrong": wrong,
    }
    of: dict[str, str | int] = {
        "operation": operation,
        "bytes": bytes,
        "count": count,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return Row({**of, "world": world}, times, "gloo", facts)


def _measure(rank: int, rounds: int, calls: int, operation: str, count: int, dtype: torch.dtype):
    warnings.simplefilter("ignore", FutureWarning)  # torch renames these functions again
    world = dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    per_rank = max(1, count // world)
    source = torch.zeros(per_rank * world if operation != "all_reduce" else count, dtype=dtype)
    shard = torch.zeros(per_rank, dtype=dtype)
    whole = torch.zeros(per_rank * world, dtype=dtype)

    def call_on(group):
        return {
            "all_reduce": lambda: dist.all_reduce(source, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, shard, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole, group=group),
            "all_to_all": lambda: dist.all_to_all_single(whole, source, group=group),
            "broadcast": lambda: dist.broadcast(source, 0, group=group),
        }[operation]

    contenders = {"ordinary": call_on(None)}
    wrong = _wrong_elements(rank, operation, source, shard, whole, contenders["ordinary"])
    if operation == "all_reduce" and not os.environ.get("WEFT_HOST"):
        shared = weft.empty_symmetric(count, dtype=dtype).fill_(rank + 1)
        contenders["symmetric"] = lambda: weft.all_reduce(shared)
        contenders["symmetric"]()
        wrong += int((shared != world * (world + 1) // 2).sum())
        shared.zero_()
    contenders["gloo"] = call_on(gloo)
    copied_from, copied_to = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
    contenders["limit"] = lambda: copied_to.copy_(copied_from)
    samples = alternate(contenders, meet=dist.barrier, rounds=rounds, calls=calls)
    return samples, wrong


def _wrong_elements(rank, operation, source, shard, whole, call) -> int:
    """Return the number of wrong elements for small whole numbers; leave zeros in the tensors."""
    world = dist.get_world_size()
    source.fill_(rank + 1)
    shard.fill_(rank + 1)
    whole.fill_(rank + 1)
    call()
    total = world * (world + 1) // 2
    each = torch.arange(1, world + 1, dtype=source.dtype).repeat_interleave(len(shard))
    got, expected = {
        "all_reduce": (source, total),
        "all_gather": (whole, each),
        "reduce_scatter": (shard, total),
        "all_to_all": (whole, each),
        "broadcast": (source, 1),
    }[operation]
    wrong = int((got != expected).sum())
    for tensor in (source, shard, whole):
        tensor.zero_()
    return wrong


def plot(lines: list[Row], path: str) -> None:
    """Draw time against size, one panel an operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = list(dict.fromkeys(line.of["operation"] for line in lines))
    canvas, panels = pyplot.subplots(1, len(operations), figsize=(4 * len(operations), 4), layout="constrained")
    for panel, operation in zip([panels] if len(operations) == 1 else panels, operations, strict=True):
        rows = [line for line in lines if line.of["operation"] == operation]
        for name in dict.fromkeys(name for row in rows for name in row.times):
            points = [(line.of["bytes"], line.times[name].p50_us) for line in rows if name in line.times]
            if points:
                panel.loglog(*zip(*points, strict=True), "o-", label=name)
        panel.set(title=f"{operation}, {rows[0].of['world']} ranks", xlabel="bytes", ylabel="us")
        panel.legend()
        panel.grid(alpha=0.3)
    canvas.savefig(path, dpi=110)
