"""Groups of heads that are computed at a time, to bound the memory on top of the model's own tensors."""

import torch

# Keys and values of other ranks at a time, in bytes. A GPU needs many heads to be busy; a core is busy with one.
AT_ONCE_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def head_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> list[tuple[slice, slice]]:
    """Return slices of query heads, each with the slice of the KV heads that they use.

    A slice has as many KV heads as AT_ONCE_BYTES permits, and at least one.

    Args:
        length: positions of keys at a time. It must be the same on every rank, so that the groups are the same.
    """
    each = q.size(1) // k.size(1)
    head_bytes = k.size(0) * length * (k.size(3) + v.size(3)) * k.element_size()
    at_once = max(1, AT_ONCE_BYTES[k.device.type] // max(1, head_bytes))
    starts = range(0, k.size(1), at_once)
    slices = [slice(start, min(start + at_once, k.size(1))) for start in starts]
    return [(slice(keys.start * each, keys.stop * each), keys) for keys in slices]


def joined(groups: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the groups' results to [B, H, ...] of all heads."""
    return groups[0] if len(groups) == 1 else torch.cat(groups, 1)
