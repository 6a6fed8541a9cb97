"""Parameters that are another rank's: this rank has none of their elements, and gives them an empty gradient."""

from collections.abc import Sequence

import torch

from weft.ops.backward import first_order


def with_absent(y: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """y; its backward gives each of the parameters a gradient, as whoever waits for all of them expects."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _WithAbsent.apply(y, *trained) if trained and torch.is_grad_enabled() else y


class _WithAbsent(torch.autograd.Function):
    """forward  y; backward  dy, and zeros of the parameters' own (empty) shapes."""

    @staticmethod
    def forward(ctx, y, *parameters):
        ctx.save_for_backward(*parameters)
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
