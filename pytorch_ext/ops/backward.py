"""What backwards have in common."""

import functools

import torch


def first_order(backward):
    """For a backward that cannot itself be differentiated: it refuses create_graph=True.

    torch's once_differentiable would raise only when a second backward passes through it, and where that does not
    (torch.autograd.grad towards weights, a Hessian) the second derivatives would silently be zeros.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(ctx).__name__}: create_graph=True is for second derivatives, which what is split over ranks "
                "does not have; compute them of the whole model"
            )
        return backward(ctx, *gradients)

    return wrapper


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """[..., F] to [M, F]."""
    return x if x.dim() == 2 else x.reshape(-1, x.size(-1))
