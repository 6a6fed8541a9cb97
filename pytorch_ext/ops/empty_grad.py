"""Gradients of parameters that take no part in this rank's sum: those of other ranks, and those added elsewhere."""

from collections.abc import Sequence

import torch

from weft.ops.backward import RankFunction, first_order


def with_absent(y: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return y; its backward gives each of the parameters a gradient, for code that waits for all gradients."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _WithAbsent.apply(y, *trained) if trained and torch.is_grad_enabled() else y


class _WithAbsent(RankFunction):
    """forward  y; backward  dy, and zeros of the parameters' (empty) shapes."""

    @staticmethod
    def forward(ctx, y, *parameters):
        ctx.save_for_backward(*parameters)
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def added_once(parameter: torch.Tensor, here: bool) -> torch.Tensor:
    """Return the parameter on the rank that adds it to a sum over ranks, and zeros on the others.

    The gradient of the sum is the same on every rank, so every rank gets the whole gradient of the parameter.
    """
    return _AddedOnce.apply(parameter, here)


class _AddedOnce(RankFunction):
    """forward  p or zeros; backward  dp = dy."""

    @staticmethod
    def forward(ctx, parameter, here):
        return parameter.view_as(parameter) if here else torch.zeros_like(parameter)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy, None
