"""Example inputs for tracing a model."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weft.nn import ParallelEmbedding, ParallelLinear
from weft.tensor_parallel.auto.trace import constant
from weft.tensor_parallel.transformers_calls import calls_of_transformers, is_transformers

BATCH, LENGTH = 3, 5  # the batch is not 2, so a pair is not mistaken for a batch
_IMAGES = (32, 64, 28, 224, 299)  # heights and widths
_MOST_ARGUMENTS = 4


def calls(model: nn.Module, constants: bool = False) -> Iterator[Callable[[nn.Module], Any]]:
    """Yield calls to try, the likeliest first.

    Args:
        constants: arguments get no gradient.
    """
    if is_transformers(model):
        yield from calls_of_transformers(model, BATCH, LENGTH)
        return
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if 1 <= len(needed) <= _MOST_ARGUMENTS:
        for tensor in _tensors(model):
            yield calling(tuple(tensor.clone() for _ in needed), {} if constants else None)


def calling(batch: Any, options: dict | None = None) -> Callable[[nn.Module], Any]:
    """Return a function that calls a model with these inputs. Floating-point tensors lose their values.

    Args:
        batch: a tensor, a tuple of arguments or a dict of named arguments.
        options: named arguments in addition to a tuple, for a user's own call. Tensors in it that require no gradient
            then get none. None is a guessed call.
    """
    call = (), batch
    if not isinstance(batch, dict):
        call = batch if isinstance(batch, tuple) else (batch,), options or {}
    arguments, named = _bare(call, constants=options is not None)
    return lambda model: model(*arguments, **named)


def _bare(value: Any, constants: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        bare = torch.empty_like(value, device="meta")
        return constant(bare) if constants and not value.requires_grad else bare
    if isinstance(value, dict):
        return {name: _bare(part, constants) for name, part in value.items()}
    return type(value)(_bare(part, constants) for part in value) if type(value) in (list, tuple) else value


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield tokens if the model has an embedding, images if it has convolutions, and features of its layers' widths."""
    modules = list(model.modules())
    if any(isinstance(module, nn.Embedding | ParallelEmbedding) for module in modules):
        yield torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        yield torch.zeros(BATCH, dtype=torch.int64)
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    shapes: list[tuple[int, ...]] = []
    for module in modules:
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            space = len(module.kernel_size)
            shapes += [(BATCH, module.in_channels, *[size] * space) for size in _IMAGES if space < 3 or size < 64]
    for width in _widths(modules):
        shapes += [(BATCH, LENGTH, width), (BATCH, width)]
    for shape in dict.fromkeys(shapes):
        yield torch.empty(shape, dtype=dtype, device="meta")


def _widths(modules) -> list[int]:
    widths = []
    for module in modules:
        if isinstance(module, nn.Linear) or (isinstance(module, ParallelLinear) and module.style == "column"):
            widths.append(module.in_features)
        elif isinstance(module, nn.MultiheadAttention):
            widths.append(module.embed_dim)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            widths.append(module.normalized_shape[-1])
    return widths
