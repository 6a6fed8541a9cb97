"""What `weft.explain` tells: of each product, collective, layer and shared sequence of a model."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

ATEN, OVERLAPPED = "ATen", "overlapped"
NO_NEWS = "the kernels run on CUDA devices"  # why everything on a CPU is ATen's


@dataclass(frozen=True)
class ProductReport:
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
    computed: dict[str, ProductReport]
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
            reasons = [product.why] if product.algorithm == ATEN else []
            communication = self.communicated.get(name)
            if communication and communication.how != OVERLAPPED:
                reasons.append(communication.why)
            if reasons:
                found[name] = "; ".join(dict.fromkeys(reasons))
        return found

    def as_dict(self) -> dict:
        bytes_ = {"forward_bytes": self.forward_bytes, "backward_bytes": self.backward_bytes}
        return {**asdict(self), **bytes_, "why_not_faster": self.why_not_faster}

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.layer}, weight {self.shard}, over {self.transport}"]
        for name, product in self.computed.items():
            news = [] if NO_NEWS in product.why else [str(product)]
            if name in self.communicated and NO_NEWS not in self.communicated[name].why:
                news.append(self.communication[name])
            lines += [f"    {name if row == 0 else '':<8} {told}" for row, told in enumerate(news)]
        lines.append(
            f"    sends    {size_in_words(self.forward_bytes)} forward, {size_in_words(self.backward_bytes)} backward"
        )
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


NOTHING = "no layer is split over ranks"


@dataclass(frozen=True)
class Explanation:
    """A model's.

    Attributes:
        tokens: of what the layers' reports are told; None where there are no such reports.
        sequence: what was seen of a shared sequence.
        whole: what an automatic plan left whole on every rank, by name, and why.
        ranks: what each dimension of the mesh does, and what this rank holds.
        planned: of a model that is not split yet, what an automatic plan makes of each module, by name.
    """

    tokens: int | None
    layers: tuple[LayerReport, ...]
    sequence: tuple[SequenceReport, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()
    planned: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        whole = [f"{name}: whole on every rank: {why}" for name, why in self.whole.items()]
        planned = [f"{name}: {entry}" for name, entry in self.planned.items()]
        found = [*self.ranks, *planned, *map(str, self.layers), *map(str, self.sequence), *whole]
        heading = [] if self.tokens is None else [f"at {self.tokens} tokens:"]
        return "\n".join([*heading, *(found or [NOTHING])])

    def as_dict(self) -> dict:
        layers, sequence = [layer.as_dict() for layer in self.layers], [asdict(report) for report in self.sequence]
        return {
            "tokens": self.tokens,
            "layers": layers,
            "sequence": sequence,
            "whole": dict(self.whole),
            **self._of_mesh(),
        }

    def _of_mesh(self) -> dict:
        return {"ranks": list(self.ranks), "planned": dict(self.planned)}

    def json(self, indent: int | None = 2) -> str:
        """`as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def __rich__(self):
        """What `rich.print` prints: a table."""
        return _tables(self)

    def show(self) -> None:
        """Prints it: a table on a terminal, the plain text elsewhere."""
        console = Console()
        if console.is_terminal:
            console.print(self)
        else:
            print(self)


def size_in_words(bytes_: float | None) -> str:
    if bytes_ is None:
        return "not told by tokens"
    for unit in ("B", "KiB", "MiB"):
        if bytes_ < 1024:
            return f"{bytes_:.4g} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.4g} GiB"


def _tables(found: Explanation) -> Group:
    parts: list[Table | str] = [*map(escape, found.ranks)]
    if found.planned:
        parts.append(_of_names(found.planned, "split", "how"))
    else:
        parts.append(_of_layers(found))
    if not (found.layers or found.sequence or found.whole or found.planned or found.ranks):
        parts.append(NOTHING)
    if found.sequence:
        parts.append(_of_sequences(found))
    if found.whole:
        parts.append(_of_names(found.whole, "whole on every rank", "why"))
    return Group(*parts)


def _of_layers(found: Explanation) -> Table:
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
        "" if sent == 0 else size_in_words(sent),
        "; ".join(why for why in layer.why_not_faster.get(name, "").split("; ") if not why.startswith(NO_NEWS)),
    ]


def _of_sequences(found: Explanation) -> Table:
    table = Table("module", "what", "how", title="the shared sequence", title_justify="left")
    for report in found.sequence:
        table.add_row(*map(escape, (report.name or "the model", report.kind, report.text)))
    return table


def _of_names(told: Mapping[str, str], title: str, heading: str) -> Table:
    table = Table("layer", heading, title=title, title_justify="left")
    for name, why in told.items():
        table.add_row(escape(name), escape(why))
    return table
