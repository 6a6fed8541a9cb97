"""`weft.explain`: what runs in each parallel layer of a model, what it sends, and why not the faster thing."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn

from weft.context.notes import notes
from weft.context.region import sharing_in
from weft.nn import ParallelEmbedding, ParallelLinear
from weft.nn.sharded import ShardHolder
from weft.ops import choice, overlap


@dataclass(frozen=True)
class Product:
    """What computes one of a layer's products.

    Attributes:
        algorithm: "weft kernel" or "ATen".
        why: why that one; of ATen, why not the kernel.
        variant: the kernel's configuration; "" of ATen.
        origin: where the kernel's machine code comes from, on a GPU.
    """

    algorithm: str
    why: str
    variant: str = ""
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}{f' ({self.origin})' if self.origin else ''}"


@dataclass(frozen=True)
class Communication:
    """The collective that goes with a product.

    Attributes:
        how: "overlapped" or "one after the other"; "" where the layer will raise.
        why: why so, or what it will raise.
    """

    collective: str
    how: str
    why: str

    def __str__(self) -> str:
        return f"{self.collective}, {self.how}: {self.why}" if self.how else f"{self.collective}: {self.why}"


@dataclass(frozen=True)
class Traffic:
    """One collective of a layer: what each of the W ranks sends, on average, of a whole of B bytes: (W-1)/W B to gather
    it or to reduce and scatter it, twice that to all-reduce it, however the transport does it.

    Attributes:
        product: that it goes with: "forward"; "dgrad" and "wgrad" are of backward.
        what: the tensor.
    """

    product: str
    collective: str
    what: str
    sent_bytes: int


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        name: as in `named_modules`.
        layer: its class and style.
        shard: this rank's part of the weight, of the whole.
        transport: what carries its collectives.
        computed: "forward", "dgrad" and "wgrad", each with what computes it.
        communicated: of "forward" and "dgrad", where a collective goes with it.
        traffic: everything that it sends, where its input and its weight want gradients; None where tokens do not tell
            (of a convolution, whose bytes are an image's).
    """

    name: str
    layer: str
    shard: str
    transport: str
    computed: dict[str, Product]
    communicated: dict[str, Communication]
    traffic: tuple[Traffic, ...] | None

    @property
    def products(self) -> dict[str, str]:
        """`computed` in words."""
        return {name: str(product) for name, product in self.computed.items()}

    @property
    def communication(self) -> dict[str, str]:
        """`communicated` in words: which collective, whether the two overlap, why."""
        return {name: str(communication) for name, communication in self.communicated.items()}

    @property
    def forward_bytes(self) -> int | None:
        """What a rank sends in forward; see Traffic."""
        return self._sent({"forward"})

    @property
    def backward_bytes(self) -> int | None:
        """What a rank sends in backward; see Traffic."""
        return self._sent({"dgrad", "wgrad"})

    def _sent(self, products: set[str]) -> int | None:
        if self.traffic is None:
            return None
        return sum(each.sent_bytes for each in self.traffic if each.product in products)

    @property
    def why_not_faster(self) -> dict[str, str]:
        """Of each product that takes a slower path, why: of the product, then of its communication."""
        found = {}
        for name, product in self.computed.items():
            reasons = [product.why] if product.algorithm == _ATEN else []
            communication = self.communicated.get(name)
            if communication and communication.how != _OVERLAPPED:
                reasons.append(communication.why)
            if reasons:
                found[name] = "; ".join(dict.fromkeys(reasons))
        return found

    def as_dict(self) -> dict:
        bytes_ = {"forward_bytes": self.forward_bytes, "backward_bytes": self.backward_bytes}
        return {**asdict(self), **bytes_, "why_not_faster": self.why_not_faster}

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.layer}, weight {self.shard}, over {self.transport}"]
        for name, product in self.products.items():
            lines.append(f"    {name:<8} {product}")
            if name in self.communication:
                lines.append(f"             {self.communication[name]}")
        lines.append(f"    sends    {_size(self.forward_bytes)} forward, {_size(self.backward_bytes)} backward")
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

    def as_dict(self) -> dict:
        layers, sequence = [layer.as_dict() for layer in self.layers], [asdict(report) for report in self.sequence]
        return {"tokens": self.tokens, "layers": layers, "sequence": sequence}

    def json(self, indent: int | None = 2) -> str:
        """`as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def __rich__(self):
        """What `rich.print` prints: a table."""
        from rich.console import Group

        return Group(_layer_table(self), _sequence_table(self)) if self.sequence else _layer_table(self)

    def show(self) -> None:
        """Prints it: a table on a terminal, the plain text elsewhere."""
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            console.print(self)
        else:
            print(self)


def explain(model: nn.Module, *, tokens: int = 4096) -> Explanation:
    """Which algorithm computes each product of each parallel layer, what the layer sends, and why not the faster path;
    and of a model that shares its sequence, how each attention was computed when it was last called, and for what the
    sequence was gathered.

    The result prints as text; `.show()` and `rich.print` print a table, `.json()` and `.as_dict()` give it to programs.

    Args:
        tokens: of the whole batch that the ranks of a layer's group work on; what is faster, and what is sent, depends
            on it.

    Raises:
        ValueError: tokens is not positive.
    """
    if tokens < 1:
        raise ValueError(f"explain: tokens={tokens} must be at least 1")
    return Explanation(tokens, tuple(_of_layers(model, tokens)), _of_sequences(model))


def _of_layers(model: nn.Module, tokens: int) -> Iterator[LayerReport]:
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield _linear(name, module, tokens)
        elif isinstance(module, ParallelEmbedding):
            yield _embedding(name, module, tokens)
        elif isinstance(module, ShardHolder) and module.shards:
            yield _other(name, module)


def _of_sequences(model: nn.Module) -> tuple[SequenceReport, ...]:
    seen = [SequenceReport(*found) for found in notes(model)]
    shares = []
    for name, sharing in sharing_in(model).items():
        text = f"dimension {sharing.dim} of its arguments, {sharing.ranks.world} ranks, over {sharing.ranks.transport}"
        shares.append(SequenceReport(name, "shares", text if seen else f"{text}; call it once to see how"))
    return (*shares, *seen)


def _linear(name: str, layer: ParallelLinear, tokens: int) -> LayerReport:
    weight = layer.weight.t() if layer.transposed else layer.weight
    n, k = weight.shape
    # A row layer's activation comes after its reduction, outside of the product.
    fused = layer.activation if layer.style == "column" else None
    layouts = ("nn", "nt") if layer.transposed else ("nt", "nn")
    computed = {
        "forward": _product(tokens, n, k, layouts[0], weight, fused),
        "dgrad": _product(tokens, k, n, layouts[1], weight),
        "wgrad": _product(n, k, tokens, "tn", weight),
    }
    communicated = {
        product: _communication(layer, tokens, weight.t() if product == "forward" else weight, how)
        for product, how in _COLLECTIVES[layer.style, layer.sequence_parallel].items()
    }
    return LayerReport(
        name,
        f"{type(layer).__name__} {layer.style}",
        _shard(layer),
        layer.communicator.transport,
        computed,
        communicated,
        tuple(_linear_traffic(layer, tokens)),
    )


# By style and whether the layer is sequence-parallel: how the rows of each product travel.
_COLLECTIVES = {
    ("column", False): {"dgrad": "reduced"},
    ("column", True): {"forward": "gathered", "dgrad": "scattered"},
    ("row", False): {"forward": "reduced"},
    ("row", True): {"forward": "scattered", "dgrad": "gathered"},
}
_NAMES = {"gathered": "all_gather", "scattered": "reduce_scatter", "reduced": "all_reduce"}
_ATEN, _OVERLAPPED, _APART = "ATen", "overlapped", "one after the other"


def _linear_traffic(layer: ParallelLinear, tokens: int) -> Iterator[Traffic]:
    """Every collective of a step. What travels with a product of a column layer is x or dx, of a row layer y or dy."""
    column, region = layer.style == "column", layer.sequence_parallel
    world, size = layer.communicator.world, layer.weight.element_size()
    inputs, outputs = size * tokens * layer.in_features, size * tokens * layer.out_features
    travelling = inputs if column else outputs
    for product, how in _COLLECTIVES[layer.style, region].items():
        what = ("x" if column else "y") if product == "forward" else ("dx" if column else "dy")
        yield _traffic(product, _NAMES[how], what, travelling, world)
    if column and region and layer.weight.requires_grad:
        yield _traffic("wgrad", "all_gather", "x", inputs, world)
    if not column and region and layer.bias is not None and layer.bias.requires_grad:
        yield _traffic("wgrad", "all_reduce", "db", size * layer.out_features, world)
    if layer.gather_output:
        yield _traffic("forward", "all_gather", "y", outputs, world)
    if layer.split_input:
        yield _traffic("dgrad", "all_gather", "dx", inputs, world)

    for name, shard in layer.shards.items():
        if shard.cut.replicated and layer.get_parameter(name).requires_grad:
            yield Traffic("wgrad", "all_to_all", f"d{name} of what several ranks have", _shared_bytes(layer, name))


def _shared_bytes(layer: ParallelLinear, name: str) -> int:
    """What a rank sends, on average, to those that have the same part of a parameter."""
    shard, world = layer.shards[name], layer.communicator.world
    pairs = [(one, other) for one in range(world) for other in range(world) if one != other]
    length = sum(stop - start for pair in pairs for start, stop in shard.cut.common(*pair))
    whole = layer.get_parameter(name).element_size() * math.prod(shard.global_shape)
    return whole // shard.global_shape[shard.dim] * length // world


def _shard(layer: ShardHolder) -> str:
    shard = next(iter(layer.shards.values()))  # of the weight
    return f"{tuple(shard.shape)} of {shard.global_shape}"


def _traffic(product: str, collective: str, what: str, whole_bytes: int, world: int) -> Traffic:
    times = 2 if collective == "all_reduce" else 1
    return Traffic(product, collective, what, times * whole_bytes * (world - 1) // world)


def _embedding(name: str, layer: ParallelEmbedding, tokens: int) -> LayerReport:
    why = "a lookup moves its rows and computes nothing"
    whole_bytes = layer.weight.element_size() * tokens * layer.embedding_dim
    return LayerReport(
        name,
        type(layer).__name__,
        _shard(layer),
        layer.communicator.transport,
        {"forward": Product(_ATEN, why), "wgrad": Product(_ATEN, why)},
        {},
        (_traffic("forward", "all_reduce", "y", whole_bytes, layer.communicator.world),),
    )


def _other(name: str, layer: ShardHolder) -> LayerReport:
    """A layer of which nothing is known but that it is split."""
    ranks = next(iter(layer.shards.values())).communicator
    kind = f"{type(layer).__name__} {getattr(layer, 'style', '')}".rstrip()
    computed = {product: Product(_ATEN, "weft has no kernel for this layer") for product in ("forward", "backward")}
    return LayerReport(name, kind, _shard(layer), ranks.transport, computed, {}, None)


def _communication(layer: ParallelLinear, tokens: int, b: torch.Tensor, how: str) -> Communication:
    try:
        decided = overlap.decide(layer.place, tokens, b, how)
    except ValueError as error:  # overlap="always" where it cannot be: what the layer will raise
        return Communication(_NAMES[how], "", str(error))
    return Communication(_NAMES[how], _OVERLAPPED if decided.fused else _APART, decided.reason)


def _product(m: int, n: int, k: int, layout: str, weight: torch.Tensor, fused: str | None = None) -> Product:
    if not choice.on_kernel(weight.device):
        return Product(_ATEN, choice.excluded(weight.device).reason)
    from weft.kernels import launch
    from weft.kernels.matmul_tiles import Problem, choose_tile

    # Rows (n) or columns (t) of both operands lie at 16 bytes where the contiguous dimension is a multiple of that.
    contiguous = {"nt": (k, k), "nn": (k, n), "tn": (m, n)}[layout]
    aligned = all(size * weight.element_size() % 16 == 0 for size in contiguous)
    problem = Problem(m, n, k, layout, aligned, weight.dtype, fused or "none")
    algorithm = choice.algorithm(problem, weight.device)
    if not algorithm.kernel:
        return Product(_ATEN, algorithm.reason)
    variant, origin = str(choose_tile(problem, weight.device).config), ""
    if weight.device.type == "cuda":
        origin = str(choice.origin(problem, launch.code_architecture(weight.device)))
    return Product("weft kernel", algorithm.reason, variant, origin)


def _layer_table(found: Explanation):
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"at {found.tokens} tokens", title_justify="left")
    for heading in ("layer", "weight", "product", "computed by", "communication", "sends", "why not faster"):
        table.add_column(heading, justify="right" if heading == "sends" else "left")
    for layer in found.layers:
        for number, name in enumerate(layer.computed):
            first = [f"{layer.name}: {layer.layer}", f"{layer.shard}, over {layer.transport}"]
            table.add_row(*map(escape, [*(first if number == 0 else ["", ""]), *_product_cells(layer, name)]))
        table.add_section()
    return table


def _product_cells(layer: LayerReport, name: str) -> list[str]:
    product, traffic = layer.computed[name], [each for each in layer.traffic or () if each.product == name]
    communication = [f"{each.collective} {each.what}" for each in traffic]
    if name in layer.communicated and layer.communicated[name].how:
        communication.append(layer.communicated[name].how)
    sent = None if layer.traffic is None else sum(each.sent_bytes for each in traffic)
    return [
        name,
        f"{product.algorithm} {product.variant}".rstrip(),
        ", ".join(communication),
        "" if sent == 0 else _size(sent),
        layer.why_not_faster.get(name, ""),
    ]


def _sequence_table(found: Explanation):
    from rich.markup import escape
    from rich.table import Table

    table = Table("module", "what", "how", title="the shared sequence", title_justify="left")
    for report in found.sequence:
        table.add_row(*map(escape, (report.name or "the model", report.kind, report.text)))
    return table


def _size(bytes_: float | None) -> str:
    if bytes_ is None:
        return "not told by tokens"
    for unit in ("B", "KiB", "MiB"):
        if bytes_ < 1024:
            return f"{bytes_:.4g} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.4g} GiB"
