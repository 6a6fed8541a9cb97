"""What `weft.explain` tells, as tables for a terminal."""

from collections.abc import Mapping

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from weft.explaining.reports import NO_NEWS, NOTHING, Explanation, LayerReport, size_in_words


def tables(found: Explanation) -> Group:
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
