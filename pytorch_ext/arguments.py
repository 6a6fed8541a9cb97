"""Argument checks that many functions share."""

from collections.abc import Iterable
from typing import Any

import torch


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ValueError if the value is not among the choices.

    Args:
        name: function and argument, for example "Pipeline: schedule".
    """
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")


def check_module(caller: str, model: Any) -> None:
    """Raise TypeError if `model` is no module: a state_dict, say, or a list of layers."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller} takes a torch.nn.Module, and not a {type(model).__name__}")


def check_tensor(caller: str, x: Any) -> None:
    """Raise TypeError if x is no tensor: a list of tensors, say."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{caller} must be a tensor, and not a {type(x).__name__}")
