"""Functions of torch with the same bits for a row, a head or an element whatever stands beside it.

They stand in the place of torch's during the forward of a model with `invariant`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack

from weft.context_parallel.shared_sequence import SharedSequence
from weft.forward import FunctionMode, Handler
from weft.forward.running import followed
from weft.ops import invariant
from weft.ops.attention import attention, takes_kernel
from weft.ops.autocast import cast_operands, without_autocast
from weft.ops.unit_parameters import WholeLinearFunction
from weft.rng import UnitDraws

_POINTWISE: set[Callable] = {
    *(F.silu, F.gelu, F.mish, F.softplus, F.elu, F.selu, F.celu, F.logsigmoid),
    *(torch.tanh, torch.Tensor.tanh, F.tanh, torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid),
    *(torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.erf, torch.Tensor.erf),
    *(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt),
}
PRODUCTS: set[Callable] = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__}


def functions_in_any_shape(draws: UnitDraws) -> dict[Callable, Handler]:
    """Return handlers that give an element of a part of the features the bits that it has in any part."""
    return {
        **dict.fromkeys(_POINTWISE, _pointwise),
        **dict.fromkeys(PRODUCTS, _product),
        **dict.fromkeys((F.rms_norm, F.normalize, F.cosine_similarity), _in_itself),
        F.linear: _linear,
        F.scaled_dot_product_attention: lambda func, args, kwargs: _attention_by_heads(draws, *args, **kwargs),
    }


def _pointwise(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    if not args or any(isinstance(x, torch.Tensor) for x in args[1:]):
        return func(*args, **kwargs)
    options = {name: value for name, value in kwargs.items() if name != "inplace"}
    y = invariant.pointwise(lambda x: func(x, *args[1:], **options), args[0])
    return args[0].copy_(y) if kwargs.get("inplace") else y


def _in_itself(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """Call a function that uses a tensor several times; their gradients are added before any others of that tensor."""
    return func(*[x.view_as(x) if isinstance(x, torch.Tensor) else x for x in args], **kwargs)


def _product(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    batched = len(args) == 2 and min(args[0].dim(), args[1].dim()) > 2
    return invariant.batched_product(*args) if batched else func(*args, **kwargs)


def _linear(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    operands = cast_operands(*_linear_operands(*args, **kwargs))
    if not _has_rows(*operands):
        return func(*args, **kwargs)
    with without_autocast("cpu"):
        return WholeLinearFunction.apply(*operands)


def _linear_operands(input, weight, bias=None):
    return input, weight, bias


def _has_rows(x, weight, _) -> bool:
    """Return whether a product of csrc/matmul takes a linear layer's operands."""
    known = x.device.type == weight.device.type == "cpu" and x.dtype == weight.dtype in invariant.DTYPES
    return known and type(x) is torch.Tensor and x.dim() > 0 and weight.dim() == 2 and x.size(-1) == weight.size(1)


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
    if heads_alone(query, key, value, attn_mask, dropout_p):
        of_heads = (
            query.reshape(-1, together, *query.shape[-2:]),
            *(x.reshape(-1, 1, *x.shape[-2:]) for x in (key, value)),
        )
        if len(of_heads[0]) == 1:  # several run in one thread each, one alone in all threads: that has other bits
            of_heads = tuple(torch.cat([x, x]) for x in of_heads)
        q, k, v = map(invariant.in_own_memory, of_heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=together > 1)
        y = y[: query.shape[:-3].numel() * key.size(-3)].view(*query.shape[:-1], value.size(-1))
        return invariant.ContiguousGradFunction.apply(y)
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


def heads_alone(query, key, value, attn_mask=None, dropout_p=0.0, *_, **__) -> bool:
    """Return whether ATen's attention gives each head the same bits in one call for all, each as a sequence of its own.

    It does on CPUs where every head's rows begin at full vectors.
    """
    few = all(x.dim() == 4 and x.size(-1) % 16 == 0 and x.device.type == "cpu" for x in (query, key, value))
    return few and not dropout_p and query.numel() > 0 and (attn_mask is None or attn_mask.dim() == 2)


def draws_of_units(seed: int | None) -> UnitDraws:
    """Return a context for a forward of a model in units, in which it has the same bits on any number of ranks."""
    return UnitDraws(seed, functions_in_any_shape, SharedSequence)


def same_bits() -> AbstractContextManager:
    """Return `draws_of_units(None)`, or a context that does nothing inside of another one."""
    modes = _get_current_function_mode_stack()
    inside = any(isinstance(mode, FunctionMode) and isinstance(mode.owner, UnitDraws) for mode in modes)
    return nullcontext() if inside else draws_of_units(None)


def with_same_bits(forward: Callable, module: nn.Module, *args, **kwargs):
    """Step of a model's forward, in `same_bits`."""
    with followed(module), same_bits():
        return forward(*args, **kwargs)
