"""Helpers for the backward of autograd functions."""

import functools

import torch


def first_order(backward):
    """Decorate a backward that has no derivative of its own, so that it raises for create_graph=True.

    torch's once_differentiable raises only when a second backward passes through it. Where none does
    (torch.autograd.grad towards weights, a Hessian), the second derivatives would silently be zeros.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(ctx).__name__}: create_graph=True is for second derivatives, which operations split over ranks "
                "do not have; compute them on the whole model"
            )
        return backward(ctx, *gradients)

    return wrapper


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., F] to [M, F]."""
    return x if x.dim() == 2 else x.reshape(-1, x.size(-1))
