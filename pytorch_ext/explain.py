"""`weft.explain`: what runs in each parallel layer of a model, and why not the faster thing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.context.notes import notes
from weft.context.region import sharing_in
from weft.nn import ParallelLinear
from weft.ops import choice, overlap

if TYPE_CHECKING:
    pass


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
class SequenceReport:
    """What a module did with the sequence that ranks share, when it was last called.

    Attributes:
        name: as in `named_modules`; "" is the model itself.
        kind: "shares" (the model that was given to parallelize), "attention", or "gathered: " and why.
        text: of an attention: the layout, the method, and what the others would have sent; of what was gathered, its
            shape and size.
    """

    name: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.kind}: {self.text}"


@dataclass(frozen=True)
class Explanation:
    """The layers' reports, for a number of tokens, and what was seen of a shared sequence."""

    tokens: int
    layers: tuple[LayerReport, ...]
    sequence: tuple[SequenceReport, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"at {self.tokens} tokens:", *map(str, self.layers), *map(str, self.sequence)])


def explain(model: nn.Module, *, tokens: int = 4096) -> Explanation:
    """Which algorithm computes each product of each parallel linear layer, and why; and of a model that shares its
    sequence, how each attention was computed when it was last called, and for what the sequence was gathered.

    Args:
        tokens: of the whole batch that the ranks of a layer's group work on; what is faster depends on it.

    Raises:
        ValueError: tokens is not positive.
    """
    if tokens < 1:
        raise ValueError(f"explain: tokens={tokens} must be at least 1")
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, ParallelLinear))
    return Explanation(tokens, tuple(_report(name, layer, tokens) for name, layer in layers), _of_sequences(model))


def _of_sequences(model: nn.Module) -> tuple[SequenceReport, ...]:
    seen = [SequenceReport(*found) for found in notes(model)]
    shares = []
    for name, sharing in sharing_in(model).items():
        text = f"dimension {sharing.dim} of its arguments, {sharing.ranks.world} ranks, over {sharing.ranks.transport}"
        shares.append(SequenceReport(name, "shares", text if seen else f"{text}; call it once to see how"))
    return (*shares, *seen)


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

    return f"{algorithm} ({choice.origin(problem, launch.code_architecture(weight.device))})"
