"""The same arithmetic with other rounding: what two right programs may differ by is measured with it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.sharding.sharded_grad import local

_ATEN = torch.ops.aten


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Change each parameter by one rounding step, up or down."""
    generator = torch.Generator().manual_seed(0)
    for parameter in map(local, filter(torch.is_floating_point, model.parameters())):
        sides = torch.randint(2, parameter.shape, generator=generator).mul_(2).sub_(1)
        parameter.mul_((1 + torch.finfo(parameter.dtype).eps * sides).to(parameter))


class OtherOrder(TorchDispatchMode):
    """Compute each product as the sum of two, the second half of the terms first."""

    supports_higher_order_operators = True  # flex attention, as it is

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (_ATEN.mm.default, _ATEN.bmm.default):
            return _in_halves(func, *args)
        if func in (_ATEN.addmm.default, _ATEN.baddbmm.default):
            first, product = args[0], _ATEN.mm.default if func is _ATEN.addmm.default else _ATEN.bmm.default
            made, beta = kwargs.get("alpha", 1) * _in_halves(product, *args[1:]), kwargs.get("beta", 1)
            return made + beta * first if beta else made  # with 0 it may be uninitialised memory
        return func(*args, **kwargs)


def _in_halves(product: Callable, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    half = a.size(-1) // 2
    if not half or not a.is_floating_point():
        return product(a, b)
    return product(a[..., half:], b[..., half:, :]) + product(a[..., :half], b[..., :half, :])
