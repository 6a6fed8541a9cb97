"""Empty gradients for parameters owned by other ranks; this rank has none of their elements."""

from collections.abc import Sequence

import torch

from weft.ops.backward import first_order


def with_absent(y: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return y; its backward gives each of the parameters a gradient, for code that waits for all gradients."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _WithAbsent.apply(y, *trained) if trained and torch.is_grad_enabled() else y


class _WithAbsent(torch.autograd.Function):
    """forward  y; backward  dy, and zeros of the parameters' (empty) shapes."""

    @staticmethod
    def forward(ctx, y, *parameters):
        ctx.save_for_backward(*parameters)
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
