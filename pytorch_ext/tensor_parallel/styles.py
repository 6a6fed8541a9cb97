"""Styles of a plan, each with the functions that make this rank's part of a layer."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import nn

from weft.nn import (
    ChannelBatchNorm,
    ChannelGroupNorm,
    ChannelInstanceNorm,
    OwnDropout2d,
    ParallelConv,
    ParallelConv1D,
    ParallelConv1d,
    ParallelConv2d,
    ParallelConv3d,
    ParallelEmbedding,
    ParallelExperts,
    ParallelLinear,
    ParallelMultiheadAttention,
    ShardedDropout,
)
from weft.nn.sharded import lost_with
from weft.tensor_parallel.local_sizes import with_numbers
from weft.tensor_parallel.sharded_embedding import split_lookup

Plan = Mapping[str, str | Mapping]
ANY = "any module"


def _convolutions(style: str) -> dict[str, Callable[..., nn.Module]]:
    kinds: tuple[type[ParallelConv], ...] = (ParallelConv1d, ParallelConv2d, ParallelConv3d)
    return {f"nn.{kind.kind.__name__}": partial(kind.from_conv, style=style) for kind in kinds}


# Style to kind of layer (see `kind_of`) to a function: part(layer, group=..., **options) -> the layer that holds this
# rank's part.
STYLES: dict[str, dict[str, Callable[..., nn.Module]]] = {
    "column": {
        "nn.Linear": partial(ParallelLinear.from_linear, style="column"),
        **_convolutions("column"),
        "transformers.Conv1D": partial(ParallelConv1D.from_conv1d, style="column"),
    },
    "row": {
        "nn.Linear": partial(ParallelLinear.from_linear, style="row"),
        **_convolutions("row"),
        "transformers.Conv1D": partial(ParallelConv1D.from_conv1d, style="row"),
    },
    "channels": {
        **{f"nn.BatchNorm{space}d": ChannelBatchNorm.from_norm for space in (1, 2, 3)},
        **{f"nn.InstanceNorm{space}d": ChannelInstanceNorm.from_norm for space in (1, 2, 3)},
        "nn.GroupNorm": ChannelGroupNorm.from_norm,
        **_convolutions("channels"),
    },
    "heads": {"nn.MultiheadAttention": ParallelMultiheadAttention.from_attention},
    "experts": {ANY: ParallelExperts.from_experts},
    "dropout": {"nn.Dropout": ShardedDropout.from_dropout, "nn.Dropout2d": OwnDropout2d.from_dropout},
    "vocabulary": {"nn.Embedding": ParallelEmbedding.from_embedding},
    "lookup": {ANY: split_lookup},
    "attributes": {ANY: with_numbers},
}
KEPT = ("sequence", "tokenwise")  # entries for modules that stay whole


def kind_of(module: nn.Module) -> str:
    """Return the kind of a layer, the name of its own class.

    A subclass is a kind of its own, because a replacement would not do what it adds. The exception is a subclass of
    nn.Linear that only writes the same forward in another way: it is an nn.Linear.
    """
    kind = type(module)
    if getattr(nn, kind.__name__, None) is kind:
        return f"nn.{kind.__name__}"
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return "transformers.Conv1D"
    if isinstance(module, nn.Linear) and _has_nothing_else(module) and _is_linear(kind, module.bias is not None):  # type: ignore[arg-type]
        return "nn.Linear"
    return kind.__qualname__


def _has_nothing_else(module: nn.Linear) -> bool:
    attributes = {name for name in vars(module) if not name.startswith("_")}
    inside = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    known = {"training", "in_features", "out_features", "forward"}  # tracing sets forward
    return attributes <= known and inside <= {"weight", "bias"} and not any(module.children())


@cache
def _is_linear(kind: type[nn.Linear], bias: bool) -> bool:
    """Test on random numbers whether a subclass without own attributes computes the same as nn.Linear."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Linear)]:
        methods = {name for name, value in vars(base).items() if callable(value) or isinstance(value, property)}
        if not methods <= {"__init__", "forward", "extra_repr", "reset_parameters"}:
            return False
    generator = torch.Generator().manual_seed(0)
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("cpu"), torch.no_grad():
        plain = nn.utils.skip_init(nn.Linear, 3, 5, bias=bias)
        own = kind.__new__(kind)
        vars(own).update(vars(plain))
        x, *numbers = (torch.randn(shape, generator=generator) for shape in ((2, 4, 3), (5, 3), (5,)))
        for parameter, value in zip(plain.parameters(), numbers, strict=False):
            parameter.copy_(value)
        try:
            return all(torch.allclose(kind.forward(own.train(mode), x), plain(x)) for mode in (True, False))
        except Exception:  # the forward needs something else
            return False


def part_of(name: str, module: nn.Module, entry: str | Mapping, group) -> nn.Module:
    """Return this rank's part of a layer.

    Args:
        name: the layer's name in the model, for messages.
        entry: the plan's entry, a style or a dict of "style" and its options.

    Raises:
        ValueError: the style does not exist, or the layer cannot be split so or has hooks.
        TypeError: the style does not take this kind of layer.
    """
    options = {"style": entry} if isinstance(entry, str) else dict(entry)
    style = options.pop("style", None)
    if style not in STYLES:
        known = ", ".join(map(repr, [*STYLES, *KEPT]))
        raise ValueError(f"parallelize: {name}: style {style!r} is not one of {known}")
    parts = STYLES[style]
    part = parts.get(ANY, parts.get(kind_of(module)))
    if part is None:
        taken = " or ".join(f"{kind} itself" for kind in parts)
        raise TypeError(f"parallelize: {name} is {type(module).__name__}; style {style!r} takes {taken}")
    if style != "attributes" and (lost := lost_with(module)):
        raise ValueError(f"parallelize: {name} has {lost}, which its replacement would lose: remove that first")
    try:
        return part(module, group=group, **options)
    except (TypeError, ValueError) as error:
        unknown = re.search(r"unexpected keyword argument ('\w+')", str(error))
        text = f"style {style!r} has no option {unknown[1]}; it has {_options_of(part)}" if unknown else error
        raise type(error)(f"parallelize: {name}: {text}") from None


def _options_of(part: Callable) -> str:
    """Return the names of a style's options, which are those of the layer that it makes."""
    method = part.func if isinstance(part, partial) else part
    layer = getattr(method, "__self__", method)
    parameters = inspect.signature(layer).parameters.values()
    fixed = ("style", "group", "device", "dtype")
    return ", ".join(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed) or "none"
