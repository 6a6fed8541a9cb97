"""The operators of torch.ops.weft: what torch.compile sees of the kernels."""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("weft", "DEF")


def register(schema: str, implementation: Callable, fake: Callable) -> Callable:
    """Defines torch.ops.weft.<name> for every device, and what it does to tensors without data; returns the operator.

    Autograd stands outside: the operators are what a torch.autograd.Function calls.
    """
    _LIBRARY.define(schema)
    name = schema.split("(")[0]
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.weft, name).default
