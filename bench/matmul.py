"""weft bench matmul: the linear layers' products at published models' shards, against torch.matmul and its epilogue."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from weft.bench.device_time import LIMIT, Ceilings, Contest, ceilings, measure
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.kernels.config import MatmulConfig
from weft.kernels.matmul import matmul
from weft.kernels.matmul_tiles import Problem, problem_of
from weft.ops import kernel_choice
from weft.ops.matmul import accumulate
from weft.testing import cases, reference
from weft.testing.tolerance import assert_close

__all__ = ["LIMIT", "add_arguments", "contests", "products", "rows", "run", "shards"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=cases.MODELS, help="all by default")
    parser.add_argument("--tp", action="append", type=int, choices=cases.TENSOR_PARALLEL, help="all by default")
    parser.add_argument("--tokens", action="append", type=positive, help="1024 to 16384 by default")


def run(options) -> list[Row]:
    limits = ceilings()
    return measure(contests(options.model, options.tp, options.tokens), limits, options.rounds)


def rows(limits: Ceilings, models=None, tokens=(1024, 16384)) -> list[Row]:
    """Return the rows for `make gpu`: every layer at the ends of the splits and of the tokens."""
    return measure(contests(models, (1, 8), tokens), limits)


def contests(models=None, tensor_parallel=None, tokens=None) -> Iterator[Contest]:
    """Yield forward, dgrad and wgrad of each layer of each model at each split and number of tokens."""
    for label, layer, m in shards(models, tensor_parallel or cases.TENSOR_PARALLEL, tokens or cases.TOKENS):
        for product in products(layer, m, torch.device("cuda"), torch.bfloat16):
            yield product.contest(label)


def shards(models, tensor_parallel, tokens) -> Iterator[tuple[str, cases.LinearLayer, int]]:
    """Yield label, layer and number of tokens of each shard."""
    for name in models or cases.MODELS:
        for tp in tensor_parallel:
            for layer in cases.linear_layers(cases.MODELS[name], tp):
                for m in tokens:
                    yield f"{name} tp={tp} {layer.name} {m}x{layer.n}x{layer.k}", layer, m


@dataclass(frozen=True)
class ProductShape:
    """One of a layer's three products.

    Attributes:
        ours: Returns the kernel's result with a configuration; None lets the kernel choose.
        peer: Returns the library's result.
        check: Compares some rows of ours with fp64 and raises AssertionError if they are wrong.
    """

    kind: str
    problem: Problem
    ours: Callable[[MatmulConfig | None], torch.Tensor]
    peer_name: str
    peer: Callable[[], torch.Tensor]
    check: Callable[[MatmulConfig | None], None]
    operations: float
    moved_bytes: float

    def contest(self, label: str) -> Contest:
        return Contest(
            f"matmul {self.kind}",
            label,
            lambda: self.ours(None),
            {self.peer_name: self.peer},
            lambda: self.check(None),
            self.operations,
            self.moved_bytes,
        )


def products(layer: cases.LinearLayer, m: int, device: torch.device, dtype: torch.dtype) -> list[ProductShape]:
    """Return one layer's products on m tokens: forward with epilogue, dgrad, wgrad, and wgrad added to a main_grad."""
    k = layer.k
    weight = (torch.randn((1 + layer.gated) * layer.n, k, device=device) / k**0.5).to(dtype)
    gate, up = weight.chunk(2) if layer.gated else (weight, None)
    x = torch.randn(m, k, device=device).to(dtype)
    dz = torch.randn(m, weight.size(0), device=device).to(dtype)
    main_grad = torch.zeros(weight.shape, device=device)
    rows = slice(0, 64)

    def plain(x, weight):
        if layer.gated:
            assert layer.activation is not None
            w_gate, w_up = weight.chunk(2)
            return reference.gated_linear(x, w_gate, w_up, activation=layer.activation)
        return reference.linear(x, weight, None, layer.activation)

    def forward(config):
        b_up = up.t() if up is not None else None
        keep_z = layer.activation is not None  # as a layer calls it
        return matmul(x, gate.t(), b_up=b_up, activation=layer.activation, keep_z=keep_z, config=config)[0]

    def plain_forward():
        if up is None:
            return plain(x, weight)
        assert layer.activation is not None
        z_gate, z_up = (x @ weight.t()).chunk(2, -1)  # one product, as in a tuned model
        return reference.ACTIVATIONS[layer.activation].apply(z_gate) * z_up

    def check_forward(config):
        assert_close(
            forward(config)[rows], plain(x[rows], weight), plain(x[rows].double(), weight.double()), str(layer)
        )

    def dgrad(config):
        return matmul(dz, weight, config=config)[0]

    def check_dgrad(config):
        assert_close(dgrad(config)[rows], dz[rows] @ weight, dz[rows].double() @ weight.double(), str(layer))

    def wgrad(config):
        return matmul(dz.t(), x, config=config)[0]

    def check_wgrad(config):
        a = dz[:, rows].t()
        assert_close(wgrad(config)[rows], a @ x, a.double() @ x.double(), str(layer))

    def added(config):
        return matmul(dz.t(), x, addend=main_grad, out=main_grad, config=config)[0]

    def check_added(config):
        a = dz[:, rows].t()
        main_grad.zero_()
        # The tolerance is of a rounded product: cuBLAS may sum fp32 in pieces, closer than one chain of tensor cores.
        assert_close(added(config)[rows], (a @ x).float(), a.double() @ x.double(), str(layer))

    def plain_added():
        with kernel_choice.prefer("library"):
            accumulate(dz.t(), x, main_grad)
        return main_grad

    size, operations = dtype.itemsize, 2.0 * m * weight.numel()
    operands = x.numel() + weight.numel()
    activation = layer.activation or "none"
    forward_problem = problem_of(x, gate.t(), up.t() if up is not None else None, activation=activation)
    epilogue = f" + {layer.activation}" if layer.activation else ""
    return [
        ProductShape(
            "forward",
            forward_problem,
            forward,
            f"torch.matmul{epilogue}",
            plain_forward,
            check_forward,
            operations,
            size * (operands + m * layer.n),
        ),
        ProductShape(
            "dgrad",
            problem_of(dz, weight),
            dgrad,
            "torch.matmul",
            lambda: dz @ weight,
            check_dgrad,
            operations,
            size * (operands + dz.numel()),
        ),
        ProductShape(
            "wgrad",
            problem_of(dz.t(), x),
            wgrad,
            "torch.matmul",
            lambda: dz.t() @ x,
            check_wgrad,
            operations,
            size * (x.numel() + dz.numel() + weight.numel()),
        ),
        ProductShape(
            "wgrad to main_grad",
            problem_of(dz.t(), x, adds=True),
            added,
            "torch.addmm in fp32",
            plain_added,
            check_added,
            operations,
            size * (x.numel() + dz.numel()) + 8 * weight.numel(),
        ),
    ]
