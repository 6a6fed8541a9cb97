"""weft bench matmul: the linear layers' products at published models' shards, against torch.matmul and its epilogue."""

import argparse
from collections.abc import Iterator

import torch

from weft.bench.device_time import LIMIT, Contest, contest_of, measure
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.kernels.matmul_tiles import Problem
from weft.testing import cases
from weft.tools import tuning

__all__ = ["LIMIT", "add_arguments", "contests", "products", "run", "shards"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=cases.MODELS, help="all by default")
    parser.add_argument("--tp", action="append", type=int, choices=cases.TENSOR_PARALLEL, help="all by default")
    parser.add_argument("--tokens", action="append", type=positive, help="1024 to 16384 by default")


def run(options) -> list[Row]:
    return measure(contests(options.model, options.tp, options.tokens), options.rounds)


def contests(models=None, tensor_parallel=None, tokens=None) -> Iterator[Contest]:
    """Yield forward, dgrad and wgrad of each layer of each model at each split and number of tokens."""
    for label, layer, m in shards(models, tensor_parallel or cases.TENSOR_PARALLEL, tokens or cases.TOKENS):
        for kind, problem in products(layer, m, torch.bfloat16).items():
            yield contest(kind, problem, label, torch.device("cuda"))


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


def contest(kind: str, problem: Problem, label: str, device: torch.device) -> Contest:
    """Return the contest of a product with the library's and its separate epilogue."""
    epilogue = problem.fused.removesuffix("_gated")
    peers = {"none": "torch.matmul", "main_grad": "torch.addmm in fp32"}
    width = problem.n * (1 + problem.fused.endswith("_gated"))
    read = problem.k * (problem.m + width) * problem.dtype.itemsize
    # A main_grad of fp32 is read and written.
    written = problem.m * problem.n * (8 if epilogue == "main_grad" else problem.dtype.itemsize)
    return contest_of(
        f"matmul {kind}",
        label,
        tuning.product_calls(problem, device),
        problem.dtype,
        peers.get(epilogue, f"torch.matmul + {epilogue}"),
        2.0 * problem.m * width * problem.k,
        read + written,
    )
