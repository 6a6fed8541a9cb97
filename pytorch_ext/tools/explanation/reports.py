"""The reports of `weft.explain`: each product, collective, layer and shared sequence of a model."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

ATEN, OVERLAPPED = "ATen", "overlapped"
NO_NEWS = "the kernels run on CUDA devices"  # the reason for every product on a CPU; not printed


@dataclass(frozen=True)
class ProductReport:
    """The computation of one product of a layer.

    Attributes:
        algorithm: "weft kernel" or "ATen".
        why: the reason for the algorithm; with ATen, the reason against the kernel.
        variant: configuration of the kernel; "" with ATen.
        origin: source of the kernel's machine code, on a GPU.
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
        how: "overlapped" or "one after the other"; "" if the layer will raise.
        why: the reason, or the error that the layer will raise.
    """

    collective: str
    how: str
    why: str

    def __str__(self) -> str:
        return f"{self.collective}, {self.how}: {self.why}" if self.how else f"{self.collective}: {self.why}"


@dataclass(frozen=True)
class Traffic:
    """One collective of a layer.

    `sent_bytes` is the average over the W ranks, for a whole tensor of B bytes: (W-1)/W B for an all-gather or a
    reduce-scatter, twice that for an all-reduce. The transport does not change it.

    Attributes:
        product: the product that it goes with: "forward"; or "dgrad" or "wgrad" in backward.
        what: the tensor.
    """

    product: str
    collective: str
    what: str
    sent_bytes: int


@dataclass(frozen=True)
class LayerReport:
    """The report on one layer.

    Attributes:
        name: as in `named_modules`.
        layer: its class and style.
        shard: this rank's part of the weight, and the whole.
        transport: transport of its collectives.
        computed: "forward", "dgrad" and "wgrad" -> the product's computation.
        communicated: "forward" and "dgrad" -> the collective, if there is one.
        traffic: every collective, if input and weight require gradients; None if the tokens do not determine it (for a
            convolution, its bytes depend on the image).
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
        """The values of `computed` as text."""
        return {name: str(product) for name, product in self.computed.items()}

    @property
    def communication(self) -> dict[str, str]:
        """The values of `communicated` as text: the collective, whether the two overlap, and the reason."""
        return {name: str(communication) for name, communication in self.communicated.items()}

    @property
    def forward_bytes(self) -> int | None:
        """Bytes that a rank sends in forward; see Traffic."""
        return self._sent({"forward"})

    @property
    def backward_bytes(self) -> int | None:
        """Bytes that a rank sends in backward; see Traffic."""
        return self._sent({"dgrad", "wgrad"})

    def _sent(self, products: set[str]) -> int | None:
        if self.traffic is None:
            return None
        return sum(each.sent_bytes for each in self.traffic if each.product in products)

    @property
    def why_not_faster(self) -> dict[str, str]:
        """Reasons of each product on a slower path: of the product, then of its communication."""
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
            lines += [f"    {name if row == 0 else '':<8} {text}" for row, text in enumerate(news)]
        lines.append(
            f"    sends    {size_in_words(self.forward_bytes)} forward, {size_in_words(self.backward_bytes)} backward"
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class SequenceReport:
    """The use of the shared sequence in a module's last call.

    Attributes:
        name: as in `named_modules`; "" is the model itself.
        kind: "shares" (the model given to parallelize), "attention", or "gathered: " and the reason.
        text: for an attention, the layout, the method, and the traffic of the other methods; for a gather, shape and
            size.
    """

    name: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.kind}: {self.text}"


NOTHING = "no layer is split over ranks"


@dataclass(frozen=True)
class Explanation:
    """The report on a model.

    Attributes:
        tokens: number of tokens that the layers' reports assume; None without such reports.
        layers: reports on the layers.
        sequence: reports on the use of a shared sequence.
        whole: name -> reason, for each module that an automatic plan left whole on every rank.
        ranks: lines about each dimension of the mesh, and about this rank's share.
        planned: name -> entry of the automatic plan, for a model that is not split yet.
        calls: name -> hooks and steps around a module's forward; {} unless they were asked for.
        gathered: name -> reason, for each layer that an automatic plan splits and whose outputs it gathers.
    """

    tokens: int | None
    layers: tuple[LayerReport, ...]
    sequence: tuple[SequenceReport, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()
    planned: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, str] = field(default_factory=dict)
    gathered: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        whole = [f"{name}: whole on every rank: {why}" for name, why in self.whole.items()]
        whole += [f"{name}: its outputs are gathered: {why}" for name, why in self.gathered.items()]
        planned = [f"{name}: {entry}" for name, entry in self.planned.items()]
        calls = [f"{name or 'the model'} is called through {text}" for name, text in self.calls.items()]
        found = [*self.ranks, *planned, *map(str, self.layers), *map(str, self.sequence), *whole, *calls]
        heading = [] if self.tokens is None else [f"at {self.tokens} tokens:"]
        return "\n".join([*heading, *(found or [NOTHING])])

    def as_dict(self) -> dict:
        layers, sequence = [layer.as_dict() for layer in self.layers], [asdict(report) for report in self.sequence]
        return {
            "tokens": self.tokens,
            "layers": layers,
            "sequence": sequence,
            "whole": dict(self.whole),
            "gathered": dict(self.gathered),
            "ranks": list(self.ranks),
            "planned": dict(self.planned),
            "calls": dict(self.calls),
        }

    def json(self, indent: int | None = 2) -> str:
        """Return `as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def __rich__(self):
        """Return the table that `rich.print` prints."""
        return _tables(self)

    def show(self) -> None:
        """Print a table on a terminal, the plain text elsewhere."""
        console = Console()
        if console.is_terminal:
            console.print(self)
        else:
            print(self)


def size_in_words(bytes_: float | None) -> str:
    if bytes_ is None:
        return "unknown from tokens"
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
    if found.gathered:
        parts.append(_of_names(found.gathered, "outputs are gathered", "why"))
    if found.calls:
        parts.append(_of_names(found.calls, "module", "called through"))
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


def _of_names(reasons: Mapping[str, str], title: str, heading: str) -> Table:
    table = Table("layer", heading, title=title, title_justify="left")
    for name, why in reasons.items():
        table.add_row(escape(name), escape(why))
    return table
