"""torch.autocast for products that are autograd functions of our own."""

import torch


def autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def cast_operands(*operands: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What autocast makes of a linear's operands; as they are where it is off."""
    device = next(t for t in operands if t is not None).device.type
    return tuple(_cast(t, device) for t in operands) if autocasts(device) else operands


def _cast(t, device):
    """As autocast does for torch's linear: fp64 and what is not floating point stay."""
    if t is None or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(device))
