"""weft tune: measure every tile configuration and the library's op, and write the winners' table.

Run it by hand, never inside training: ranks that tuned for themselves would run different kernels.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from weft.bench.device_time import alternate
from weft.bench.environment import environment
from weft.bench.matmul import ProductShape, products, shards
from weft.kernels import config as configs
from weft.kernels import launch, matmul_tiles
from weft.testing import cases

# A row serves sizes within a factor of two, so these serve 1k to 16k tokens and 1 to 16 ranks.
TOKENS, TENSOR_PARALLEL = (2048, 8192), (2, 8)
_ROUNDS = 11

Calls = dict[str, Callable[[], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=cases.MODELS, help="all by default")
    parser.add_argument("--out", metavar="FOLDER", help="where the table goes; by default into the installed package")


def run(op: str, options) -> int:
    """Write <op>.json and return the exit code; raise SystemExit without a CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("weft tune: there is no CUDA device here, and only measurements go into a table")
    entries = tune(shards(options.model, TENSOR_PARALLEL, TOKENS), torch.device("cuda"), torch.bfloat16)
    architecture = launch.architecture_of(torch.device("cuda"))
    folder = Path(options.out) if options.out else Path(configs.__file__).parent / "configs" / architecture
    folder.mkdir(parents=True, exist_ok=True)
    measured_on = {"device": torch.cuda.get_device_name(), **environment()}
    (folder / f"{op}.json").write_text(configs.table_text(entries, measured_on))
    faster = sum(entry.ours_us <= entry.peer_us for entry in entries)
    print(f"{len(entries)} problems, ours at least as fast as ATen in {faster}: {folder / op}.json")
    return 0


def tune(shards, device: torch.device, dtype: torch.dtype) -> list[configs.Entry]:
    """Return an entry for each product of each layer for which at least one configuration is correct."""
    found = [winner(product, device) for _, layer, m in shards for product in products(layer, m, device, dtype)]
    return [entry for entry in found if entry is not None]


def winner(product: ProductShape, device: torch.device) -> configs.Entry | None:
    """Return the fastest configuration with a correct result; None if there is none."""
    problem = product.problem
    listed = matmul_tiles.listed(launch.architecture_of(device), problem.dtype, problem.narrow)
    right = {}
    for config in matmul_tiles.candidates(listed, problem.k):
        try:
            product.check(config)
        except AssertionError as wrong:
            print(f"left out: {config} for {problem}: {wrong}")
        else:
            right[str(config)] = config
    if not right:
        return None
    calls: Calls = {name: partial(product.ours, config) for name, config in right.items()}
    times = medians_us({**calls, "peer": product.peer})
    best = min(right, key=lambda name: times[name])
    return configs.Entry(problem.key(), right[best], times[best], times["peer"])


def medians_us(calls: Calls) -> dict[str, float]:
    return {name: quantiles.p50_us for name, quantiles in alternate(calls, _ROUNDS).items()}
