"""weft bench several_gpus: collectives, sums with a norm and overlapped products against those of NCCL and of others.

Each GPU has one rank. With fewer than two GPUs, every row says that it was not measured.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from weft.bench.measure import Quantiles, slowest_rank
from weft.bench.several_gpus_rank import (
    ANY_ORDER,
    APART,
    COLLECTIVES,
    LAYERS,
    LIBRARY,
    NCCL_CALLS,
    ONE_KERNEL,
    ORDINARY,
    OVERLAPPED,
    SYMMETRIC,
    THREE_CALLS,
    Collective,
    Norm,
    Product,
    RankReport,
    RankResult,
    Work,
    measure_rank,
)
from weft.bench.table import Row, not_measured
from weft.testing import cases
from weft.testing.ranks import run_ranks

LIMIT = "the links' rate, which is not measured; times are the slowest rank's of each round"
SIZES = [4096 << shift for shift in range(0, 17, 2)]  # 4 KiB to 256 MiB
NORMS = (1, 4096), (8, 4096), (1, 8192), (4, 8192)  # rows and hidden size; each is one kernel with up to 8 ranks
MODELS, TOKENS = ("llama-3-8b", "llama-3-70b"), (4096, 8192)

_BACKEND = "cpu:weft,cuda:nccl"
_TIMEOUT_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(world=None)
    parser.add_argument("--only", choices=("collectives", "products"), help="both by default")


def run(options) -> list[Row]:
    """Return the rows, measured on `options.world` GPUs; on all GPUs of the machine by default."""
    world, gpus = options.world, torch.cuda.device_count()
    wanted = works(world or max(gpus, 2), options.only)
    if reason := why_not(world, gpus):
        return [not_measured(work.op, shape, reason) for work in wanted for shape in work.shapes()]
    count = world or gpus
    settings: dict[str, Any] = {"timeout_s": _TIMEOUT_S, "group_timeout_s": _TIMEOUT_S, "start": "spawn"}
    per_rank = run_ranks(measure_rank, count, wanted, options.rounds, backend=_BACKEND, **settings)
    transport = Row({"op": "transport", "shape": f"W={count}"}, remark=per_rank[0].transport)
    return [transport, *(line for number, work in enumerate(wanted) for line in of_ranks(work, number, per_rank))]


def why_not(world: int | None, gpus: int) -> str | None:
    """Return the reason that nothing can be measured; None if there is none."""
    if gpus < 2 or world == 1:
        return "needs several GPUs"
    return f"needs {world} GPUs, and there are {gpus}" if world and world > gpus else None


def works(world: int, only: str | None = None) -> list[Work]:
    collectives: list[Work] = [Collective(name, bytes, world) for name in COLLECTIVES for bytes in SIZES]
    collectives += [Norm(rows, hidden, world) for rows, hidden in NORMS]
    products: list[Work] = [
        Product(how, f"{model} tp={world} {layer.name}", m // world * world, layer.n * (1 + layer.gated), layer.k)
        for how, layer_names in LAYERS.items()
        for model in MODELS
        for layer in cases.linear_layers(cases.MODELS[model], world)
        if layer.name in layer_names
        for m in TOKENS
    ]
    return [*(collectives if only != "products" else []), *(products if only != "collectives" else [])]


def of_ranks(work: Work, number: int, per_rank: Sequence[RankReport]) -> list[Row]:
    """Return the rows of one work from the reports of all ranks."""
    found: list[RankResult] = [rank.found[number] for rank in per_rank]
    eager = slowest_rank([result.eager for result in found])
    graphs = {name: times.p50_us for name, times in slowest_rank([result.graph for result in found]).items()}
    missing = found[0].missing
    if isinstance(work, Product):
        return [_line(work.op, work.shapes()[0], OVERLAPPED, (APART, LIBRARY), eager, graphs, missing)]
    if isinstance(work, Norm):
        known = (THREE_CALLS, NCCL_CALLS, "FlashInfer")
        return [_line(work.op, work.shapes()[0], ONE_KERNEL, known, eager, graphs, missing)]
    peers = tuple(name for name in (*eager, *missing) if name not in (ORDINARY, SYMMETRIC, ANY_ORDER))
    return [
        _line(work.op, shape, kind, peers, eager, graphs, missing)
        for kind, shape in zip(work.kinds(), work.shapes(), strict=True)
    ]


def _line(
    op: str,
    shape: str,
    ours: str,
    peers: tuple[str, ...],
    eager: dict[str, Quantiles],
    graphs: dict[str, float],
    missing: dict[str, str],
) -> Row:
    if ours in missing:
        return not_measured(op, shape, missing[ours])
    there = {name: eager[name] for name in peers if name in eager}
    graph_us = {"ours": graphs.get(ours), **{name: graphs.get(name) for name in there}}
    remark = "; ".join(f"{name} not measured: {missing[name]}" for name in peers if name in missing)
    best = min(there, key=lambda name: there[name].p50_us)
    return Row({"op": op, "shape": shape}, {"ours": eager[ours], **there}, best, {"graph_us": graph_us}, remark)
