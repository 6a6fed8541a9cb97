"""The norm of gradients that lie on several ranks: each element of the whole model's gradient counts once."""

import math
from collections.abc import Sequence

import torch

from weft.sharding.sharded_grad import GradientElsewhere, local, place_for


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Its `.grad`, or else its `main_grad`, as a plain tensor. None where pieces of it have gradients instead."""
    if parameter.grad is None or isinstance(parameter.grad, GradientElsewhere):
        return getattr(parameter, "main_grad", None)
    return local(parameter.grad)


def counted(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Of a parameter's gradient, or of that of a piece of one, what no rank of the shard's before has as well."""
    return place_for(parameter).counted(gradient)


def powers(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """float64 scalar: the sum of |g|^p over all elements; for p = inf the largest |g|. Of sums in fp32, or in fp64 of
    fp64, over a tensor each."""
    norms = [torch.zeros((), device=gradients[0].device)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        wide = torch.promote_types(dtype, torch.float32)
        same = [gradient for gradient in gradients if gradient.dtype == dtype and gradient.numel()]
        if same:
            norms += torch._foreach_norm(same, norm_type, dtype=wide)
    together = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device).double() for norm in norms]), norm_type)
    return together if math.isinf(norm_type) else together.pow(norm_type)
