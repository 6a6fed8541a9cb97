"""attn_implementation="weft" for models of transformers, with or without weft.parallelize."""

from functools import partial

import torch

from weft.adapters import need
from weft.context_parallel import transformers_attention
from weft.context_parallel.transformers_attention import Pattern, mask

NAME = "weft"


def register() -> None:
    """Register "weft" as an attention of transformers.

        register()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="weft")

    If the model shares its sequence (weft.parallelize over "cp"), it runs weft.context_attention. Otherwise it runs
    torch's scaled_dot_product_attention, with the same result as attn_implementation="sdpa", and refuses softcaps and
    sinks.

    Raises:
        ImportError: transformers is older than 5.23.
    """
    need("weft.adapters.hugging_face", "transformers", "5.23")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, partial(mask, otherwise=sdpa_mask))


def attention(module, query, key, value, attention_mask, **options):
    """Compute attention by transformers' interface.

    Args:
        module: the attention layer, for its options and for error messages.
        query, key, value: [B, H, S, D].
        attention_mask: a tensor, a Pattern made by `mask`, or None.
        options: the interface's further options.

    Returns:
        [B, S, H, D], and None for the weights.

    Raises:
        TypeError: the mask is of another type.
        ValueError: a window, softcap or sinks without a causal mask over a shared sequence.
    """
    if not isinstance(attention_mask, torch.Tensor | Pattern | None):
        raise TypeError(
            f'{type(module).__name__}: attn_implementation="weft" takes a mask that is a tensor or none, got '
            f"{type(attention_mask).__name__}: pass a tensor, or use the attention that this mask is for"
        )
    return transformers_attention.attention(module, query, key, value, attention_mask, **options)
