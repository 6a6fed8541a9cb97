"""weft bench matmul: the linear layers' products at published models' shards, against torch.matmul and its epilogue."""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from weft.bench.device_time import LIMIT, Contest, contest_of, measure
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.kernels.matmul_tiles import Problem, choose_tile
from weft.ops import invariant
from weft.testing import cases
from weft.tools import tuning

__all__ = ["LIMIT", "add_arguments", "contests", "products", "run", "shards"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=cases.MODELS, help="all by default")
    parser.add_argument("--tp", action="append", type=int, choices=cases.TENSOR_PARALLEL, help="all by default")
    parser.add_argument("--tokens", action="append", type=positive, help="1024 to 16384 by default")
    parser.add_argument("--only", default="", help="products whose name contains this: forward, dgrad, wgrad")
    parser.add_argument("--tiles", action="store_true", help="every tile of our kernel, not only the chosen one")
    parser.add_argument("--invariant", action="store_true", help="what the products of invariant=V cost")


def run(options) -> list[Row]:
    every = shards(options.model, options.tp or cases.TENSOR_PARALLEL, options.tokens or cases.TOKENS)
    return measure(contests(every, options), options.rounds)


def contests(every: Iterable[tuple[str, cases.LinearLayer, int]], options) -> Iterator[Contest]:
    """Yield forward, dgrad and wgrad of each shard, as far as the options ask for them."""
    device = torch.device("cuda")
    for label, layer, m in every:
        for kind, problem in products(layer, m, torch.bfloat16).items():
            if options.only not in kind:
                continue
            if not options.invariant:
                yield contest(kind, problem, label, device, options.tiles)
            elif problem.fused != "main_grad":
                yield invariant_contest(kind, replace(problem, fused="none"), label, device)


def shards(models, tensor_parallel, tokens) -> Iterator[tuple[str, cases.LinearLayer, int]]:
    """Yield label, layer and number of tokens of each shard."""
    for name in models or cases.MODELS:
        for tp in tensor_parallel:
            for layer in cases.linear_layers(cases.MODELS[name], tp):
                for m in tokens:
                    yield f"{name} tp={tp} {layer.name} {m}x{layer.n}x{layer.k}", layer, m


def products(layer: cases.LinearLayer, m: int, dtype: torch.dtype) -> dict[str, Problem]:
    """Return one layer's products on m tokens: forward with epilogue, dgrad, wgrad, and wgrad added to a main_grad."""
    width = (1 + layer.gated) * layer.n
    fused = (layer.activation or "none") + "_gated" * layer.gated
    return {
        "forward": tuning.product(m, layer.n, layer.k, "nt", dtype, fused),
        "dgrad": tuning.product(m, layer.k, width, "nn", dtype),
        "wgrad": tuning.product(width, layer.k, m, "tn", dtype),
        "wgrad to main_grad": tuning.product(width, layer.k, m, "tn", dtype, "main_grad"),
    }


def contest(kind: str, problem: Problem, label: str, device: torch.device, tiles: bool = False) -> Contest:
    """Return the contest of a product with the library's and its separate epilogue.

    A gated product has two peers: with the gate in ATen's operators, and with our kernel of the gate, which runs where
    the library computes the product.
    """
    epilogue, gated = problem.fused.removesuffix("_gated"), problem.fused.endswith("_gated")
    peers = {"none": "torch.matmul", "main_grad": "torch.addmm in fp32"}
    peer = peers.get(epilogue, f"torch.matmul + ATen's {epilogue}{' and product' * gated}")
    calls, tile = tuning.product_calls(problem, device), choose_tile(problem, device)
    others = tuning.tiles_of(problem, device) if tiles else []
    width = problem.n * (1 + gated)
    read = problem.k * (problem.m + width) * problem.dtype.itemsize
    # A main_grad of fp32 is read and written.
    written = problem.m * problem.n * (8 if epilogue == "main_grad" else problem.dtype.itemsize)
    operations = 2.0 * problem.m * width * problem.k
    facts = {"tile": f"{tile.config} of the {tile.source}"}
    op = f"matmul {kind}{', tiles' * tiles}"
    found = contest_of(op, label, calls, problem.dtype, peer, operations, read + written, facts, others)
    return replace(found, peers={**found.peers, "torch.matmul + weft's gate": calls.library}) if gated else found


def invariant_contest(kind: str, problem: Problem, label: str, device: torch.device) -> Contest:
    """Return the contest of a product whose bits depend on no size with the library's and our ordinary one."""
    calls = tuning.product_calls(problem, device)
    a, b = calls.operands
    in_units = replace(calls, ours=lambda tile: invariant.product_sum(a, b, dtype=problem.dtype))
    operations, moved = 2.0 * problem.m * problem.n * problem.k, problem.k * (problem.m + problem.n) * 2
    found = contest_of(f"invariant {kind}", label, in_units, problem.dtype, "torch.matmul", operations, moved)
    return replace(found, peers={**found.peers, "ours ordinary": partial(calls.ours, None)})
