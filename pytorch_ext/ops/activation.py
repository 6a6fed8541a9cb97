"""Activations by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def check_activation(name: str | None) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not one of {', '.join(repr(known) for known in ACTIVATIONS)}")
