"""Attention of transformers models, with window, softcap and sinks, through their attention interface."""

import copy
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from weft.context_parallel.attention import attend
from weft.context_parallel.shared_sequence import SharedSequence, by_part

# Attention implementations that take the place of those of transformers. Each has its mask: True for what is seen, or a
# number that is added, because some models add it themselves.
_NAMES = {"sdpa": "weft", "eager": "weft_eager"}


def use_context_attention(model: nn.Module) -> None:
    """Set `attention` as the attention of the transformers models in `model`, if there are any."""
    models = models_of_transformers(model)
    if not models:
        return
    import transformers
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for kind, function, otherwise in (("sdpa", attention, sdpa_mask), ("eager", eager_attention, eager_mask)):
        transformers.AttentionInterface.register(_NAMES[kind], function)
        AttentionMaskInterface.register(_NAMES[kind], partial(mask, otherwise=otherwise))
    copies: dict = {}  # other models may have the same configuration
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, transformers.PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)  # type: ignore[assignment]
    for module in models:
        if module.config._attn_implementation in _NAMES:
            module.set_attn_implementation(_NAMES[module.config._attn_implementation])


def models_of_transformers(model: nn.Module) -> list:
    """Return the transformers models in `model`."""
    return [module for module in model.modules() if is_transformers(module)]


def is_transformers(module: nn.Module) -> bool:
    """Return whether the module is a model of transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")  # `transformers` alone loads it when asked: seconds
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def refuse_missing_weights(model: nn.Module, output) -> None:
    """Raise ValueError if the caller asked for attention weights: no rank has them."""
    fields = output if isinstance(output, dict) else {}
    names = [name for name in ("attentions", "encoder_attentions", "decoder_attentions") if name in fields]
    if any(isinstance(fields[name], tuple) and not fields[name] for name in names):
        raise ValueError(
            f"{type(model).__name__} shares its sequence, and no rank computes attention weights: call it with "
            "output_attentions=False, or on a mesh with cp=1"
        )


@dataclass(frozen=True)
class Pattern:
    """A causal mask, with or without a window, that is never built; transformers passes it to `attention`."""

    window: int | None

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._never_built(repr(name), "use a mesh with cp=1")

    def __getitem__(self, index):
        raise self._never_built("a part", 'use a mesh with cp=1, or attn_implementation="sdpa"')

    def _never_built(self, what: str, instead: str) -> ValueError:
        return ValueError(
            f"the model asks for {what} of its causal mask, which weft's attention never builds: {instead}"
        )


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, *, otherwise, **options):
    """Return a Pattern if it describes the whole mask, else what the function `otherwise` of transformers makes."""
    padding = options.get("attention_mask")
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    # allow_is_causal_skip: the mask has no documents, and no part from the user.
    fp64 = options.get("dtype") == torch.float64  # which gathers the sequence, with a mask
    if square and not fp64 and options.get("allow_is_causal_skip", True) and (padding is None or bool(padding.all())):
        window = options.get("local_size")
        if _is_window(options["mask_function"], q_length, window):
            return Pattern(window)
    options["allow_is_causal_skip"] = False
    return otherwise(batch_size, q_length, kv_length, q_offset, kv_offset, **options)


def _is_window(function, length: int, window: int | None) -> bool:
    """Check that a mask function of transformers is the causal one with this window.

    A mask of chunks of that size is not: its first keys differ in one of two neighbouring rows.
    """
    rows = torch.tensor([[max(0, length - 2)], [length - 1]])
    columns, none = torch.arange(length).unsqueeze(0), torch.zeros(1, 1, dtype=torch.int64)
    expected = columns <= rows
    if window is not None:
        expected = expected & (columns > rows - window)
    return torch.equal(function(none, none, rows, columns), expected)


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **options):
    """Compute attention as transformers' interface asks.

    Args:
        query, key, value: [B, H, S, D].

    Returns:
        [B, S, H, D], and None for the weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in ("block_indices", "sinks"):
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name} to its attention, and weft does not know what they do: use a "
                "mesh with cp=1"
            )
    if (chosen := options.pop("indices", None)) is not None:
        attention_mask = _of_chosen(chosen, attention_mask, key.size(2))
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    window = None
    if isinstance(attention_mask, Pattern):
        window, attention_mask, is_causal = attention_mask.window, None, True
    if window is not None and softcap is None and sinks is None and not isinstance(query, SharedSequence):
        shown = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device)
        attention_mask, window, is_causal = shown.tril().triu(1 - window), None, False
    if window is None and softcap is None and sinks is None:
        options["is_causal"] = is_causal
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if not isinstance(query, SharedSequence) or attention_mask is not None or options.get("position_bias") is not None:
        found = "a sequence that is not shared" if attention_mask is None else "a mask that is not causal"
        raise ValueError(
            f"{type(module).__name__}: an attention with window={window}, softcap={softcap} or sinks needs "
            f"a causal mask over a shared sequence, got {found}: pass neither padding nor a cache, and call the model "
            "that weft.parallelize got"
        )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = {"causal": is_causal, "window": window, "softcap": softcap, "sinks": sinks, "scale": scaling}
    return by_part(attend, query, key, value, dropout=dropout, **mask).transpose(1, 2).contiguous(), None


def eager_attention(module, query, key, value, attention_mask, is_causal=None, **options):
    """As `attention`, in place of the eager one of transformers.

    That one is causal by its mask alone. With a mask of numbers the model's own function runs, on this rank's rows: the
    gradients of rows without any key are those of its softmax, and not of scaled_dot_product_attention.
    """
    own = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if isinstance(attention_mask, torch.Tensor) and own is not None:
        return own(module, query, key, value, attention_mask, **options)
    is_causal = False if attention_mask is None else None
    return attention(module, query, key, value, attention_mask, is_causal=is_causal, **options)


def _of_chosen(chosen, mask: torch.Tensor, keys: int) -> torch.Tensor:
    """Return a mask that also hides the keys which an indexer did not choose (DeepSeek sparse attention).

    Args:
        chosen: positions of keys for each query, [B, S, chosen]; they are the same for all heads.
        mask: what shows a key, or what is added to its score, [B or 1, 1, S, keys].
    """
    hidden = torch.ones(*chosen.shape[:2], keys, dtype=torch.bool, device=chosen.device)
    hidden = hidden.scatter(-1, chosen.long(), False).unsqueeze(1)
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
