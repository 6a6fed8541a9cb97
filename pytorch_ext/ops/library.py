"""The operators of torch.ops.weft, as which torch.compile sees the kernels."""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("weft", "DEF")


def register(schema: str, implementation: Callable, fake: Callable) -> Callable:
    """Define torch.ops.weft.<name> for every device and return the operator.

    The operators have no autograd of their own: torch.autograd.Functions call them.

    Args:
        schema: name, arguments and results, in PyTorch's schema language.
        fake: the implementation for tensors without data.
    """
    _LIBRARY.define(schema)
    name = schema.split("(")[0]
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.weft, name).default
