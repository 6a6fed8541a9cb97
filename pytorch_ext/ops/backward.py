"""Base class of autograd functions that communicate, and helpers for their backward."""

import functools
from typing import NoReturn

import torch


def refuse_transforms(name: str) -> NoReturn:
    """Raise for a call of something that communicates inside of a transform of torch.func."""
    raise RuntimeError(
        f"{name} inside of a transform of torch.func (grad, vmap, jvp): these have no rule for what ranks send to each "
        "other. Use loss.backward() or torch.autograd.grad, or transform the whole model before weft.parallelize"
    )


class _NoBackward:
    """Stands for the context of a function that keeps nothing."""

    def save_for_backward(self, *tensors):
        pass

    def mark_non_differentiable(self, *tensors):
        pass


class RankFunction(torch.autograd.Function):
    """An autograd function with collectives.

    Torch's `apply` goes through the arguments for torch.func, whose transforms have no rule for a collective: they are
    refused here instead, unless they neither transform nor differentiate the tensors.
    """

    @classmethod
    def apply(cls, *args):
        if torch._C._are_functorch_transforms_active():
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if any(x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
                refuse_transforms(cls.__name__)
            return cls.forward(_NoBackward(), *args)  # of a mask, say, which transformers makes with vmap
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


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
