"""What backwards have in common."""

import functools

import torch
from torch.autograd.function import once_differentiable


def first_order(backward):
    """torch's once_differentiable, which is for a backward that cannot itself be differentiated, without its cost.

    Entering no_grad takes a few microseconds; outside of create_graph=True gradients are off already.
    """
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx, *gradients):
        return guarded(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return wrapper


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """[..., F] to [M, F]."""
    return x if x.dim() == 2 else x.reshape(-1, x.size(-1))
