"""weft bench invariance: a Llama's step with invariant=8 and without, on ranks that split layers or sequence."""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import weft
from weft.bench.measure import alternate, slowest_rank
from weft.bench.table import Row
from weft.testing.models import Llama
from weft.testing.ranks import run_ranks

UNITS, POSITION_UNITS = 8, 4
CASES = (("tp", torch.float32), ("tp", torch.bfloat16), ("cp", torch.float32))
BLOCKS, BATCH, SEQUENCE = 2, 2, 256
PEER = "without invariant"
LIMIT = "the ordinary step: the same products by MKL or oneDNN, and sums in the order of ranks"


class Llama256(Llama):
    """Hidden size 256, 16 query heads, 8 KV heads."""

    HEAD, KV_HEADS, HIDDEN, WORDS = 16, 8, 1024, 4096


class Llama1024(Llama):
    """Hidden size 1024, 16 query heads, 8 KV heads."""

    HEAD, KV_HEADS, HIDDEN, WORDS = 64, 8, 4096, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this bench has only the common options."""


def run(options: argparse.Namespace) -> Iterator[Row]:
    for model, width in ((Llama256, 256), (Llama1024, 1024)):
        for split, dtype in CASES:
            samples = run_ranks(_measure, options.world, model, dtype, split, options.rounds, timeout_s=300)
            times = slowest_rank(samples)
            shape = f"hidden {width}, {BATCH * SEQUENCE} tokens {str(dtype).removeprefix('torch.')}"
            shape += f", sequence in {POSITION_UNITS} units" if split == "cp" else ""
            facts = {"of_limit": times[PEER].p50_us / times["weft"].p50_us}
            yield Row({"shape": shape, "world": options.world}, times, PEER, facts)


def _measure(rank: int, kind: type[Llama], dtype: torch.dtype, split: str, rounds: int) -> dict[str, list[float]]:
    world = dist.get_world_size()
    mesh = (weft.init_mesh(cp=world) if split == "cp" else weft.init_mesh(tp=world))["cp", "tp"]
    steps = {}
    for name, units in (("weft", UNITS), (PEER, None)):
        torch.manual_seed(0)
        context: str | dict[str, int] = {"units": POSITION_UNITS} if units and split == "cp" else "auto"
        model = weft.parallelize(kind(BLOCKS).to(dtype), mesh, invariant=units, context=context)
        tokens = torch.randint(0, kind.WORDS, (BATCH, SEQUENCE))
        steps[name] = _step(model, torch.optim.AdamW(model.parameters()), tokens)
    return alternate(steps, meet=dist.barrier, rounds=rounds, calls=2)


def _step(model, optimizer, tokens):
    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()

    return step
