"""A plan's layers in units, and the functions between them, so that no bit depends on the number of ranks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.context_parallel.shared_sequence import SharedSequence
from weft.forward import Handler
from weft.forward.running import followed
from weft.nn.dropout import SEVERAL
from weft.ops import invariant
from weft.ops.attention import attention, takes_kernel
from weft.rng import UnitDraws
from weft.tensor_parallel.auto import AutomaticPlan
from weft.tensor_parallel.styles import kind_of

_LINEAR = ("nn.Linear", "transformers.Conv1D")
_EXACT = ("vocabulary", "lookup", "attributes")  # no sum over ranks has two terms that are not 0

_POINTWISE: set[Callable] = {
    *(F.silu, F.gelu, F.mish, F.softplus, F.elu, F.selu, F.celu, F.logsigmoid),
    *(torch.tanh, torch.Tensor.tanh, F.tanh, torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid),
    *(torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.erf, torch.Tensor.erf),
    *(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt),
}
_PRODUCTS: set[Callable] = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__}


def _in_any_shape(draws: UnitDraws) -> dict[Callable, Handler]:
    """Return handlers that give an element of a part of the features the bits that it has in any part."""
    return {
        **dict.fromkeys(_POINTWISE, _pointwise),
        **dict.fromkeys(_PRODUCTS, _product),
        F.scaled_dot_product_attention: lambda func, args, kwargs: _attention_by_heads(draws, *args, **kwargs),
    }


def _pointwise(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    if not args:
        return func(**kwargs)
    options = {name: value for name, value in kwargs.items() if name != "inplace"}
    y = invariant.pointwise(lambda x: func(x, *args[1:], **options), args[0])
    return args[0].copy_(y) if kwargs.get("inplace") else y


def _product(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    batched = len(args) == 2 and min(args[0].dim(), args[1].dim()) > 2
    return invariant.batched_product(*args) if batched else func(*args, **kwargs)


def _one_call(draws: UnitDraws, query, *args, **options) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else nullcontext():
        return draws.drop(F.scaled_dot_product_attention, (query, *args), options)


def _attention_by_heads(
    draws: UnitDraws,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Return the attention [..., heads, T, D], with one call for each KV head and its query heads.

    ATen's products within it follow the number of heads: with one head of 6 elements the gradients of keys and
    values have other bits than with two. Here every call has the same shape and strides, and on a GPU takes the
    products: the faster functions add gradients of queries in any order. Weft's kernel treats every head alone.
    """
    if query.dim() < 3 or query.size(-3) % max(1, key.size(-3)):
        return _one_call(draws, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and not dropout_p and takes_kernel(query, key, value):
        whole = map(invariant.in_own_memory, (query, key, value))
        q, k, v = (part.flatten(0, -4) if part.dim() > 3 else part.unsqueeze(0) for part in whole)
        y = attention(q, k, v, causal=is_causal, scale=scale).view(*query.shape[:-1], value.size(-1))
        return invariant.ContiguousGradFunction.apply(y)
    together = query.size(-3) // max(1, key.size(-3))
    parts = []
    of_heads = query.split(together, -3), key.split(1, -3), value.split(1, -3)
    for head, own in enumerate(zip(*of_heads, strict=True)):
        mask = attn_mask
        if mask is not None and mask.dim() > 2 and mask.size(-3) > 1:
            mask = invariant.in_own_memory(mask.narrow(-3, head * together, together))
        q, k, v = map(invariant.in_own_memory, own)
        y = _one_call(draws, q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=together > 1)
        parts.append(invariant.ContiguousGradFunction.apply(y))
    return torch.cat(parts, -3) if parts else query.new_empty(*query.shape[:-1], value.size(-1))


def same_bits() -> AbstractContextManager:
    """Return a context for a forward of a model in units, in which it has the same bits on any number of ranks."""
    return UnitDraws(None, _in_any_shape, SharedSequence).in_its_place()


def with_same_bits(forward: Callable, module: nn.Module, *args, **kwargs):
    """Step of a model's forward, in `same_bits`."""
    with followed(module), same_bits():
        return forward(*args, **kwargs)


def in_units(entries: Mapping[str, str | Mapping], model: nn.Module, units: int) -> dict[str, str | Mapping]:
    """Return a plan's entries with every split layer in that many units.

    Raises:
        ValueError: a style or a kind of layer has no such form.
    """
    found: dict[str, str | Mapping] = {}
    for name, entry in entries.items():
        options = {"style": entry} if isinstance(entry, str) else entry
        style, kind = options["style"], kind_of(model.get_submodule(name))
        if options.get("drops") == SEVERAL:
            raise ValueError(
                f"parallelize: {name} drops split features in several places, which is not supported with "
                f"invariant={units}"
            )
        adds = style in ("column", "row") and kind in _LINEAR
        if adds or options.get("own_random_numbers") or (style == "dropout" and kind == "nn.Dropout"):
            found[name] = {**options, "invariant": units}
        elif style in _EXACT:
            found[name] = entry
        else:
            raise ValueError(f"parallelize: {name}: style {style!r} of {kind} is not supported with invariant={units}")
    return found


def check_same_layers(plan: AutomaticPlan, of_units: AutomaticPlan, units: int) -> None:
    """Check that a plan splits the layers that the plan for as many ranks as units splits.

    Raises:
        ValueError: a layer is split in one of them only, or in another way.
    """
    styles, wanted = ({name: _style(entry) for name, entry in p.plan.items()} for p in (plan, of_units))
    for name in {**styles, **wanted}:
        if styles.get(name) != wanted.get(name):
            there, here = wanted.get(name, "whole"), styles.get(name, "whole")
            raise ValueError(
                f"parallelize: invariant={units}: {name} would be {there!r} over {units} ranks and is {here!r} here; "
                "choose fewer units, or a plan of your own"
            )


def _style(entry: str | Mapping) -> str:
    return entry if isinstance(entry, str) else entry["style"]
