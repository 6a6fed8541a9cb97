"""Norms of gradients that lie on several ranks: each element of the whole model's gradient counts once."""

import math
from collections.abc import Sequence

import torch

from weft.sharding.sharded_grad import GradientElsewhere, local, place_for


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter's `.grad`, or else its `main_grad`, as a plain tensor.

    None means that it has neither, for example because its pieces have the gradients.
    """
    if parameter.grad is None or isinstance(parameter.grad, GradientElsewhere):
        return getattr(parameter, "main_grad", None)
    return local(parameter.grad)


def counted(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient that no lower rank of the shard's group has too.

    Args:
        parameter: a parameter, or a piece of one.
        gradient: its gradient.
    """
    return place_for(parameter).counted(gradient)


def powers(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of |g|^norm_type over all elements, or the largest |g| if norm_type is inf.

    Args:
        gradients: tensors of any types on any devices, at least one.
        norm_type: above 0.

    Returns:
        A float64 scalar. The sum over each tensor is in fp32, or in fp64 if the tensor is.
    """
    norms = [torch.zeros((), device=gradients[0].device)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        wide = torch.promote_types(dtype, torch.float32)
        same = [gradient for gradient in gradients if gradient.dtype == dtype and gradient.numel()]
        if same:
            norms += torch._foreach_norm(same, norm_type, dtype=wide)
    together = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device).double() for norm in norms]), norm_type)
    return together if math.isinf(norm_type) else together.pow(norm_type)
