"""Some heads at a time, so that what stands beside the model's own tensors is bounded."""

import torch

# Keys and values of other ranks at a time. A GPU needs many to be busy; a core is busy with one head.
AT_ONCE_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def head_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> list[tuple[slice, slice]]:
    """Slices of query heads and of the KV heads that they use, each of as many as AT_ONCE_BYTES permit, or of one.

    Args:
        length: positions of keys at a time; the same on every rank, and then so are the groups.
    """
    each = q.size(1) // k.size(1)
    head_bytes = k.size(0) * length * (k.size(3) + v.size(3)) * k.element_size()
    at_once = max(1, AT_ONCE_BYTES[k.device.type] // max(1, head_bytes))
    starts = range(0, k.size(1), at_once)
    slices = [slice(start, min(start + at_once, k.size(1))) for start in starts]
    return [(slice(keys.start * each, keys.stop * each), keys) for keys in slices]


def joined(groups: list[torch.Tensor]) -> torch.Tensor:
    """[B, H, ...] of all heads."""
    return groups[0] if len(groups) == 1 else torch.cat(groups, 1)
