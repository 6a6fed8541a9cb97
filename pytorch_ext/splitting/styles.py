"""The styles in which a plan can split a layer, each with what makes this rank's part of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from weft.nn import ParallelEmbedding, ParallelLinear

Plan = Mapping[str, str | Mapping]


@dataclass(frozen=True)
class Style:
    """One way to split.

    Attributes:
        takes: the class of layer; subclasses do something that the replacement would not do.
        part: part(layer, group=..., **options) -> the layer that holds this rank's part.
    """

    takes: type[nn.Module]
    part: Callable[..., nn.Module]


STYLES = {
    "column": Style(nn.Linear, partial(ParallelLinear.from_linear, style="column")),
    "row": Style(nn.Linear, partial(ParallelLinear.from_linear, style="row")),
    "vocabulary": Style(nn.Embedding, ParallelEmbedding.from_embedding),
}
KEPT = ("sequence", "tokenwise")  # what a plan says of modules that it leaves whole


def part_of(name: str, module: nn.Module, entry: str | Mapping, group) -> nn.Module:
    """This rank's part of a layer.

    Raises:
        ValueError: no such style, a layer that cannot be split so, one with hooks. TypeError: a layer of another kind.
    """
    options = {"style": entry} if isinstance(entry, str) else dict(entry)
    style = options.pop("style", None)
    if style not in STYLES:
        known = ", ".join(map(repr, [*STYLES, *KEPT]))
        raise ValueError(f"parallelize: {name}: style {style!r} is not one of {known}")
    takes = STYLES[style].takes
    if type(module) is not takes:
        raise TypeError(
            f"parallelize: {name} is {type(module).__name__}; style {style!r} takes nn.{takes.__name__} itself"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(f"parallelize: {name} has hooks, which its replacement would lose: remove them first")
    try:
        return STYLES[style].part(module, group=group, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"parallelize: {name}: {error}") from error
