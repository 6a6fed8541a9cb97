"""torch.autocast for products in weft's own autograd functions."""

import contextlib

import torch


def without_autocast(device: str) -> contextlib.AbstractContextManager:
    """Return a context for products whose operands have their types, autocast or not."""
    return torch.autocast(device, enabled=False) if autocasts(device) else contextlib.nullcontext()


def autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def cast_operands(*operands: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return a product's operands as autocast casts them; unchanged where autocast is off."""
    device = next(t for t in operands if t is not None).device.type
    return tuple(_cast(t, device) for t in operands) if autocasts(device) else operands


def _cast(t, device):
    """Cast as autocast does for torch's linear: fp64 and other than floating-point tensors stay."""
    if t is None or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(device))
