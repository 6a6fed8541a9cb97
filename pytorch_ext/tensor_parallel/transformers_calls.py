"""Models of transformers: example calls, and implementations of attention."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.context_parallel import transformers_attention
from weft.tensor_parallel.peft_wrappers import without_peft


def is_transformers(model: nn.Module) -> bool:
    """Return whether the model is of transformers, with or without peft's wrapper around it."""
    return transformers_attention.is_transformers(without_peft(model))


def calls_of_transformers(model, batch: int, length: int) -> Iterator[Callable[[nn.Module], Any]]:
    """Yield example calls with the model's main input and the decoder's input, without a cache.

    The first calls also return hidden states and attention weights, if the model can. The trace then shows which of
    these are whole and which must be gathered.
    """
    named = inspect.signature(without_peft(model).forward).parameters
    main, config = model.main_input_name, model.config
    main = main if isinstance(main, str) else main[0]
    if main not in named:  # parts of models that take something else than the whole
        main = next((name for name in _INPUTS if name in named), main)
    texts = _tokens(batch, length)
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in named else {}
    needed = (name for name, one in named.items() if one.default is one.empty and name.endswith("_ids"))
    fixed |= dict.fromkeys((name for name in needed if name not in (main, "input_ids")), texts)
    if "decoder_input_ids" in named:
        fixed["decoder_input_ids"] = _tokens(batch, length + 1)
    patches = list(_patches(model, named, batch, texts))
    if main.endswith("ids"):
        inputs = [{main: texts, **more} for more in ({}, *_with_texts(config, named, batch, length, model.dtype))]
    else:
        signals = (*_signals(config, batch, model.dtype), *_features(model, batch))
        inputs = [{main: tensor} for tensor in signals]
    for beside in filter(None, patches or [_beside(config, named, batch, model.dtype)]):
        # First, because with texts alone the images' part of a model would not run.
        text = {"input_ids": texts} if "input_ids" in named else {}
        hidden = {**text, **beside, **fixed, "output_hidden_states": True}
        yield partial(_call, named={**hidden, "output_attentions": True})
        yield partial(_call, named=hidden)
        yield partial(_call, named={**text, **beside, **fixed})
    for given in inputs:
        hidden = {**given, **fixed, "output_hidden_states": True}
        yield partial(_call, named={**hidden, "output_attentions": True})
        yield partial(_call, named=hidden)
        yield partial(_call, named={**given, **fixed})


def _call(model: nn.Module, named: dict[str, Any]) -> Any:
    config = getattr(without_peft(model), "config", None)  # `model` may be a function that calls one in stages
    if getattr(config, "_attn_implementation", None) not in ("eager", None):
        named = {name: x for name, x in named.items() if name != "output_attentions"}  # others return none, and warn
    return model(**named)


def attentions(model: nn.Module) -> Sequence[str]:
    """Return the attention implementations that the models of transformers inside may use.

    "eager" (plain operations) is first, because there the model's own code repeats KV heads.
    """
    models: Iterator[Any] = filter(is_transformers, model.modules())
    fused = any(one.config._attn_implementation != "eager" and getattr(one, "_supports_sdpa", False) for one in models)
    return ["eager", "sdpa"] if fused else ["eager"]


def prepare(twin: nn.Module, attention: str) -> None:
    """Set a copy's attention implementation, and turn off gradient checkpointing."""
    modules: Iterator[Any] = twin.modules()
    for module in modules:
        supported = attention == "eager" or getattr(module, "_supports_sdpa", False)
        if is_transformers(module) and supported and module.config._attn_implementation != attention:
            module.set_attn_implementation(attention)
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False


def _tokens(batch: int, length: int) -> torch.Tensor:
    return (torch.arange(length) + torch.arange(batch).unsqueeze(1)) % 4 + 3  # texts that differ


def _with_texts(config, named, batch: int, length: int, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what a model without parts may need with its texts: places on a page, or an image."""
    if "bbox" in named:
        yield from ({"bbox": torch.zeros(batch, length, 4, dtype=kind)} for kind in (torch.int64, dtype))
    if "pixel_values" in named and getattr(config, "image_size", None) is not None:
        yield {"pixel_values": next(_signals(config, batch, dtype))}


_INPUTS = {"pixel_values": "image_size", "input_features": "num_mel_bins", "input_values": "conv_kernel"}


def _beside(config, named, batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the inputs that the parts of a model of several kinds of input take, by their configurations."""
    found = {}
    for part in (value for value in vars(config).values() if hasattr(value, "to_dict")):
        for name, mark in _INPUTS.items():
            if name in named and name not in found and getattr(part, mark, None) is not None:
                found[name] = next(_signals(part, batch, dtype)) if name != "input_values" else _waves(batch, dtype)
    return found


def _patches(model, named, batch: int, texts: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Yield images of 4 x 4 patches, with texts around them if the model has texts, as Qwen-VL takes them.

    A patch is a row of values or [channels, height, width].
    """
    config = model.config
    vision = getattr(config, "vision_config", config)
    grid = next((name for name in ("image_grid_thw", "grid_thw") if name in named), "")
    token = getattr(config, "image_token_id", None)
    token = token if isinstance(token, int) else -1
    if not grid or getattr(vision, "patch_size", None) is None or (token < 0 and "input_ids" in named):
        return
    tower = next((part for part in model.modules() if getattr(part, "config", None) is vision), model)
    first = next((part for part in tower.modules() if isinstance(part, nn.Linear | nn.Conv2d | nn.Conv3d)), None)
    if first is None:
        return
    patch = (first.in_features,) if isinstance(first, nn.Linear) else (first.in_channels, *first.kernel_size)
    found = {grid: torch.tensor([[1, 4, 4]]).repeat(batch, 1)}
    if "input_ids" in named:
        merged = getattr(vision, "spatial_merge_size", getattr(vision, "merge_size", 1))
        merged = math.prod(merged) if isinstance(merged, (list, tuple)) else merged**2
        image = torch.full((batch, 16 // merged), token)
        found["input_ids"] = torch.cat([texts, image, texts], 1)
    if "mm_token_type_ids" in named:
        found["mm_token_type_ids"] = found["input_ids"].eq(token).int()
    main = "pixel_values" if "pixel_values" in named else next(iter(named))
    for shape in dict.fromkeys([(math.prod(patch),), patch]):
        yield {main: torch.empty(batch * 16, *shape, dtype=model.dtype, device="meta"), **found}


def _features(model, batch: int) -> Iterator[torch.Tensor]:
    """Yield waveforms of one channel, and features or channels in the widths of the first layers."""
    shapes: list[tuple[int, ...]] = [(batch, 1, 4032)]
    layers = [part for part in model.modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.ConvTranspose1d)]
    for layer in layers[:_FIRST_LAYERS]:
        width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        shapes += [(batch, _FRAMES, width), (batch, width, _FRAMES), (batch, width)]
    for config in (model.config, *vars(model.config).values()):
        if isinstance(bins := getattr(config, "num_mel_bins", None), int):
            shapes += [(batch, _FRAMES, bins), (batch, bins, _FRAMES)]
    yield from (torch.empty(shape, dtype=model.dtype, device="meta") for shape in dict.fromkeys(shapes))


_FIRST_LAYERS, _FRAMES = 3, 64


def _waves(batch: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(batch, 4032, dtype=dtype, device="meta")


def _signals(config, batch: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield image, spectrum and waveform inputs on the meta device."""
    size = getattr(config, "image_size", None)
    channels = getattr(config, "num_channels", 3)
    if size is not None:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        yield torch.empty(batch, channels, height, width, dtype=dtype, device="meta")
        if (pictures := getattr(config, "num_frames", None)) is not None:
            yield torch.empty(batch, pictures, channels, height, width, dtype=dtype, device="meta")
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if bins is not None and frames is not None:
        yield torch.empty(batch, frames, bins, dtype=dtype, device="meta")
    yield from (torch.empty(batch, channels, side, side, dtype=dtype, device="meta") for side in (224, 64, 32))
    if bins is not None:
        yield torch.empty(batch, bins, 2 * getattr(config, "max_source_positions", 50), dtype=dtype, device="meta")
        yield torch.empty(batch, _FRAMES, bins, dtype=dtype, device="meta")
    yield _waves(batch, dtype)
