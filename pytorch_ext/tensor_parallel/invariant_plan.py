"""A plan's layers in units, and the functions between them, so that no bit depends on the number of ranks."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from weft.context_parallel.shared_sequence import NATIVE, SharedSequence
from weft.nn.dropout import SEVERAL
from weft.ops import invariant
from weft.ops.attention import attention, takes_kernel
from weft.rng import UnitDraws
from weft.tensor_parallel.auto import AutomaticPlan
from weft.tensor_parallel.styles import kind_of

_LINEAR = ("nn.Linear", "transformers.Conv1D")
_EXACT = ("vocabulary", "lookup", "attributes")  # no sum over ranks has two terms that are not 0

_POINTWISE = {
    *(F.silu, F.gelu, F.mish, F.softplus, F.elu, F.selu, F.celu, F.logsigmoid),
    *(torch.tanh, torch.Tensor.tanh, F.tanh, torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid),
    *(torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.erf, torch.Tensor.erf),
    *(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt),
}
_PRODUCTS = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__}


class InAnyShape(UnitDraws):
    """UnitDraws in which functions of a part of the features also give an element the bits that it has in any part."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if SharedSequence in types:
            if func in NATIVE or not torch._C._is_torch_function_enabled():
                return func(*args, **kwargs)
            TorchFunctionMode.__enter__(self)  # for the functions of units that the sequence's rule calls
            try:
                return SharedSequence.__torch_function__(func, types, args, kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
        if func in _POINTWISE and args:
            in_place = kwargs.pop("inplace", False)
            y = invariant.pointwise(lambda x: func(x, *args[1:], **kwargs), args[0])
            return args[0].copy_(y) if in_place else y
        if func in _PRODUCTS and len(args) == 2 and min(args[0].dim(), args[1].dim()) > 2:
            return invariant.batched_product(*args)
        if func is F.scaled_dot_product_attention:
            return self._attention_by_heads(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _one_call(self, query, *args, **options) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else nullcontext():
            return super().__torch_function__(F.scaled_dot_product_attention, (), (query, *args), options)

    def _attention_by_heads(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        """Return the attention [..., heads, T, D], with one call for each KV head and its query heads.

        ATen's products within it follow the number of heads: with one head of 6 elements the gradients of keys and
        values have other bits than with two. Here every call has the same shape and strides, and on a GPU takes the
        products: the faster functions add gradients of queries in any order. Weft's kernel treats every head alone.
        """
        if query.dim() < 3 or query.size(-3) % max(1, key.size(-3)):
            return self._one_call(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
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
            y = self._one_call(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=together > 1)
            parts.append(invariant.ContiguousGradFunction.apply(y))
        return torch.cat(parts, -3) if parts else query.new_empty(*query.shape[:-1], value.size(-1))


def same_bits() -> AbstractContextManager:
    """Return a context for a forward of a model in units, in which it has the same bits on any number of ranks."""
    return InAnyShape().in_its_place()


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
