"""Layers that an automatic plan does not look into: the shape of their output, and the dimension of their features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.nn.expert_form import ExpertForm, form_of, has_form
from weft.tensor_parallel.styles import kind_of


@dataclass(frozen=True)
class LayerSpec:
    """One kind of layer.

    Attributes:
        output: output(layer, width, *args, **kwargs) -> the layer's output without values; width(whole) returns the
            width of the output on this rank.
        features: the feature dimension of the input and of the output.
        sizes: sizes(layer) -> (input features, output features).
    """

    output: Callable
    features: int
    sizes: Callable[[nn.Module], tuple[int, int]]


def known(module: nn.Module) -> LayerSpec | None:
    spec = LAYERS.get(kind_of(module))
    return EXPERTS if spec is None and is_experts(module) else spec


def is_experts(module: nn.Module) -> bool:
    """Return whether the module is a layer of fused experts that the style "experts" splits."""
    return has_form(module) and isinstance(form_of(module), ExpertForm)


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return (input features, output features); (0, 0) for other modules."""
    kind = known(layer)
    return kind.sizes(layer) if kind else (0, 0)


def _linear(layer, width, x):
    return x.new_empty((*x.shape[:-1], width(sizes_of(layer)[1])), device="meta")


def _conv(layer, width, x):
    space = len(layer.kernel_size)
    options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    one = getattr(nn, kind_of(layer)[3:])(1, 1, *options, padding_mode=layer.padding_mode, device="meta")
    size = one(torch.empty((*x.shape[: -1 - space], 1, *x.shape[-space:]), device="meta")).shape[-space:]
    return x.new_empty((*x.shape[: -1 - space], width(layer.out_channels), *size), device="meta")


def _embedding(layer, width, tokens):
    return layer.weight.new_empty((*tokens.shape, layer.embedding_dim), device="meta")


def _norm(layer, width, x):
    return torch.empty_like(x, device="meta")


def _attention(layer, width, query, key, value, *args, need_weights=True, average_attn_weights=True, **kwargs):
    length = -2 if layer.batch_first or query.dim() == 2 else 0
    shape = [query.shape[0 if layer.batch_first else 1]] if query.dim() == 3 else []
    shape += [] if average_attn_weights else [layer.num_heads]
    weights = query.new_empty((*shape, query.shape[length], key.shape[length]), device="meta")
    return query.new_empty((*query.shape[:-1], layer.embed_dim), device="meta"), weights if need_weights else None


def _experts(layer, width, x, *args, **kwargs):
    return torch.empty_like(x, device="meta")


def _hidden(layer) -> tuple[int, int]:
    form = form_of(layer)
    assert isinstance(form, ExpertForm)
    return form.hidden, form.hidden


def _named(*names: str) -> Callable[[Any], tuple[int, int]]:
    return lambda layer: (getattr(layer, names[0]), getattr(layer, names[-1]))


EXPERTS = LayerSpec(_experts, -1, _hidden)
LAYERS = {
    "nn.Linear": LayerSpec(_linear, -1, _named("in_features", "out_features")),
    "transformers.Conv1D": LayerSpec(_linear, -1, _named("nx", "nf")),
    **{f"nn.Conv{n}d": LayerSpec(_conv, -1 - n, _named("in_channels", "out_channels")) for n in (1, 2, 3)},
    "nn.Embedding": LayerSpec(_embedding, -1, _named("num_embeddings", "embedding_dim")),
    **{f"nn.BatchNorm{n}d": LayerSpec(_norm, 1, _named("num_features")) for n in (1, 2, 3)},
    **{f"nn.InstanceNorm{n}d": LayerSpec(_norm, -1 - n, _named("num_features")) for n in (1, 2, 3)},
    "nn.GroupNorm": LayerSpec(_norm, 1, _named("num_channels")),
    "nn.MultiheadAttention": LayerSpec(_attention, -1, _named("embed_dim")),
}
