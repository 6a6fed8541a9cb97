"""A plan's layers in units, and the functions between them, so that no bit depends on the number of ranks."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.context_parallel.shared_sequence import NATIVE, SharedSequence
from weft.ops import invariant
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
_DROPS = {F.dropout: ("p", 1, 0.5), F.scaled_dot_product_attention: ("dropout_p", 4, 0.0)}


class InAnyShape(TorchFunctionMode):
    """Mode in which functions of a rank's part of the features give an element the same bits as in any other part.

    Raises:
        ValueError: a function drops elements at random.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if SharedSequence in types:
            if func in NATIVE or not torch._C._is_torch_function_enabled():
                return func(*args, **kwargs)
            with self:  # for the functions of units that the sequence's rule calls
                return SharedSequence.__torch_function__(func, types, args, kwargs)
        if func in _POINTWISE and args:
            in_place = kwargs.pop("inplace", False)
            y = invariant.pointwise(lambda x: func(x, *args[1:], **kwargs), args[0])
            return args[0].copy_(y) if in_place else y
        if func in _PRODUCTS and len(args) == 2 and min(args[0].dim(), args[1].dim()) > 2:
            return invariant.batched_product(*args)
        if func in _DROPS and _drops(func, args, kwargs):
            raise ValueError(f"invariant: {func.__name__} drops other elements on another number of ranks; set it to 0")
        if func is F.scaled_dot_product_attention:
            return _attention_by_heads(*args, **kwargs)
        return func(*args, **kwargs)


def _attention_by_heads(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Return the attention [..., heads, T, D], with one call for each KV head and its query heads.

    ATen's products within it follow the number of heads: with one head of 6 elements the gradients of keys and values
    have other bits than with two. Here every call has the same shape and strides.
    """
    if query.dim() < 4 or query.size(-3) % max(1, key.size(-3)):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    together = query.size(-3) // max(1, key.size(-3))
    parts = []
    for head in range(key.size(-3)):
        own = query.narrow(-3, head * together, together), key.narrow(-3, head, 1), value.narrow(-3, head, 1)
        mask = attn_mask
        if mask is not None and mask.dim() > 2 and mask.size(-3) > 1:
            mask = mask.narrow(-3, head * together, together).contiguous()
        q, k, v = (part.contiguous() for part in own)
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=together > 1)
        parts.append(invariant.ContiguousGradFunction.apply(y))
    return torch.cat(parts, -3) if parts else query.new_empty(*query.shape[:-1], value.size(-1))


def _drops(func, args: tuple, kwargs: dict) -> bool:
    name, place, default = _DROPS[func]
    probability = kwargs.get(name, args[place] if len(args) > place else default)
    training = func is not F.dropout or kwargs.get("training", args[2] if len(args) > 2 else True)
    return probability > 0 and training


def in_units(entries: Mapping[str, str | Mapping], model: nn.Module, units: int) -> dict[str, str | Mapping]:
    """Return a plan's entries with every split layer in that many units.

    Raises:
        ValueError: a style or a kind of layer has no such form.
    """
    found: dict[str, str | Mapping] = {}
    for name, entry in entries.items():
        style, kind = _style(entry), kind_of(model.get_submodule(name))
        if style in ("column", "row") and kind in _LINEAR:
            options = {"style": entry} if isinstance(entry, str) else entry
            found[name] = {**options, "invariant": units}
        elif style in _EXACT:
            found[name] = entry
        else:
            raise ValueError(f"parallelize: {name}: style {style!r} of {kind} has no form with invariant={units}")
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
