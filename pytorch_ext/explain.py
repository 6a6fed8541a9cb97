"""`weft.explain`: what runs in each parallel layer of a model, and why not the faster thing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.nn import ParallelLinear
from weft.ops import choice, overlap

if TYPE_CHECKING:
    from weft.kernels.matmul_tiles import Problem


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        name: as in `named_modules`.
        layer: its class and style.
        shard: this rank's part of the weight, of the whole.
        transport: what carries its collectives.
        products: "forward", "dgrad" and "wgrad", each with what computes it and why.
        communication: of "forward" and "dgrad", where a collective goes with it: which, whether the two overlap, why.
    """

    name: str
    layer: str
    shard: str
    transport: str
    products: dict[str, str]
    communication: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.layer}, weight {self.shard}, over {self.transport}"]
        for product, what in self.products.items():
            lines.append(f"    {product:<8} {what}")
            if product in self.communication:
                lines.append(f"             {self.communication[product]}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The layers' reports, for a number of tokens."""

    tokens: int
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        return "\n".join([f"at {self.tokens} tokens:", *map(str, self.layers)])


def explain(model: nn.Module, *, tokens: int = 4096) -> Explanation:
    """Which algorithm computes each product of each parallel linear layer, and why.

    Args:
        tokens: of the whole batch that the ranks of a layer's group work on; what is faster depends on it.

    Raises:
        ValueError: tokens is not positive.
    """
    if tokens < 1:
        raise ValueError(f"explain: tokens={tokens} must be at least 1")
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, ParallelLinear))
    return Explanation(tokens, tuple(_report(name, layer, tokens) for name, layer in layers))


def _report(name: str, layer: ParallelLinear, tokens: int) -> LayerReport:
    weight, shard = layer.weight, layer.shards["weight"]
    n, k = weight.shape
    # A row layer's activation comes after its reduction, outside of the product.
    fused = layer.activation if layer.style == "column" else None
    products = {
        "forward": _product(tokens, n, k, "nt", weight, fused),
        "dgrad": _product(tokens, k, n, "nn", weight),
        "wgrad": _product(n, k, tokens, "tn", weight),
    }
    collectives = _COLLECTIVES[layer.style, layer.sequence_parallel]
    communication = {
        product: _communication(layer, tokens, weight.t() if product == "forward" else weight, how)
        for product, how in collectives.items()
    }
    kind = f"{type(layer).__name__} {layer.style}"
    of_whole = f"{tuple(weight.shape)} of {shard.global_shape}"
    return LayerReport(name, kind, of_whole, layer.communicator.transport, products, communication)


# By style and whether the layer is sequence-parallel: how the rows of each product travel.
_COLLECTIVES = {
    ("column", False): {"dgrad": "reduced"},
    ("column", True): {"forward": "gathered", "dgrad": "scattered"},
    ("row", False): {"forward": "reduced"},
    ("row", True): {"forward": "scattered", "dgrad": "gathered"},
}
_NAMES = {"gathered": "all_gather", "scattered": "reduce_scatter", "reduced": "all_reduce"}


def _communication(layer: ParallelLinear, tokens: int, b: torch.Tensor, how: str) -> str:
    try:
        return f"{_NAMES[how]}, {overlap.decide(layer.place, tokens, b, how)}"
    except ValueError as error:  # overlap="always" where it cannot be: what the layer will raise
        return f"{_NAMES[how]}: {error}"


def _product(m: int, n: int, k: int, layout: str, weight: torch.Tensor, fused: str | None = None) -> str:
    if not choice.on_kernel(weight.device):
        return str(choice.excluded(weight.device))
    from weft.kernels.matmul_tiles import Problem

    # Rows (n) or columns (t) of both operands lie at 16 bytes where the contiguous dimension is a multiple of that.
    contiguous = {"nt": (k, k), "nn": (k, n), "tn": (m, n)}[layout]
    aligned = all(size * weight.element_size() % 16 == 0 for size in contiguous)
    problem = Problem(m, n, k, layout, aligned, weight.dtype, fused or "none")
    algorithm = choice.algorithm(problem, weight.device)
    if not algorithm.kernel or weight.device.type != "cuda":
        return str(algorithm)
    from weft.kernels import launch

    return f"{algorithm} ({origin_of(problem, launch.code_architecture(weight.device))})"


def origin_of(problem: "Problem", architecture: str) -> str:
    """Where our kernel's machine code for the product comes from: "ahead-of-time", or "jit" and why."""
    from weft.kernels import launch
    from weft.kernels.matmul import matmul

    def operand(rows: int, columns: int, turned: bool) -> torch.Tensor:
        shape = (columns, rows) if turned else (rows, columns)
        matrix = torch.empty(shape, dtype=problem.dtype, device="meta")
        return matrix.t() if turned else matrix

    a_turned, b_turned = (letter == "t" for letter in problem.layout)
    activation = None if problem.fused == "none" else problem.fused
    with launch.recording(architecture) as launches:
        matmul(
            operand(problem.m, problem.k, a_turned),
            operand(problem.k, problem.n, b_turned),
            activation=activation,
            keep_z=activation is not None,
        )
    found = launch.origin(launches[0], architecture)
    return f"{found.how}: {found.why}" if found.why else found.how
