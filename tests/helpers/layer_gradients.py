"""Results that tests of a layer compare."""

import torch
from torch import nn


def gradients_of(module: nn.Module, x: torch.Tensor, dy: torch.Tensor):
    """Run forward and backward; return the output, the gradient of x, and the parameters' gradients by name."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in module.named_parameters()}
