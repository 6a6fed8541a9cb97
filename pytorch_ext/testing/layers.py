"""What tests of a layer compare."""

import torch
from torch import nn


def gradients_of(module: nn.Module, x: torch.Tensor, dy: torch.Tensor):
    """Output, gradient of x, and gradients of the parameters by name, of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in module.named_parameters()}
