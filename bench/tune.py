"""weft tune: measure every tile configuration and the library's op, and write the winners' table."""

import argparse
from pathlib import Path

import torch

from weft import tuning
from weft.bench.environment import environment
from weft.bench.matmul import products, shards
from weft.kernels import config as configs
from weft.kernels import launch
from weft.testing import cases

# A row serves sizes within a factor of two, so these serve 1k to 16k tokens and 1 to 16 ranks.
TOKENS, TENSOR_PARALLEL = (2048, 8192), (2, 8)


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
    problems = [product.problem for _, layer, m in shards for product in products(layer, m, device, dtype)]
    found = [tuning.measured(problem, device) for problem in dict.fromkeys(problems)]
    return [entry for entry in found if entry is not None]
