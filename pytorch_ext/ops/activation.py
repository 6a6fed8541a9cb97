"""Activations by name, each with its derivative, for layers that apply one inside their own autograd function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.arguments import check_choice

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """y = apply(z); dz = backward(dy, z)."""

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation("gelu", F.gelu, _aten.gelu_backward.default),
    "gelu_tanh": Activation(
        "gelu_tanh",
        lambda z: F.gelu(z, approximate="tanh"),
        lambda dy, z: _aten.gelu_backward.default(dy, z, approximate="tanh"),
    ),
    "relu": Activation("relu", F.relu, lambda dy, z: _aten.threshold_backward.default(dy, z, 0)),
    "silu": Activation("silu", F.silu, _aten.silu_backward.default),
}


def activation_of(name: str | None) -> Activation | None:
    """Return the activation of that name; None for None.

    Raises:
        ValueError: there is no such activation.
    """
    check_choice("activation", name, [None, *ACTIVATIONS])
    return ACTIVATIONS.get(name) if name else None
