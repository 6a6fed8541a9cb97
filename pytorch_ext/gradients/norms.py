"""The norm of gradients that lie on several ranks: each element of the whole model's gradient counts once."""

import math
from collections.abc import Sequence

import torch

from weft.gradients.sharding import piece_of
from weft.shard import shard_of
from weft.sharded_grad import local


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Its `.grad`, or else its `main_grad`, as a plain tensor."""
    return getattr(parameter, "main_grad", None) if parameter.grad is None else local(parameter.grad)


def counted(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Of a parameter's gradient, or of that of a piece of one, what no rank of the shard's before has as well."""
    piece = piece_of(parameter)
    base = parameter if piece is None else piece.parameter
    shard = shard_of(base)
    if shard is None or not shard.cut.replicated:
        return gradient
    if piece is None:
        return shard.counted(gradient)
    mine = torch.zeros_like(base, dtype=torch.bool)
    for start, stop in shard.cut.owned(shard.communicator.rank):
        mine.narrow(shard.dim, start, stop - start).fill_(True)
    in_memory = mine.as_strided((mine.numel(),), (1,))
    return gradient[in_memory[piece.start : piece.stop]]


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
