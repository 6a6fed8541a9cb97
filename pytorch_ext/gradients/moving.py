"""A gradient's way to its place in a bucket."""

import torch

from weft import _C
from weft.gradients.layout import Slot

# A bucket of this size has left a core's second-level cache before it is reduced.
_PAST_CACHE_FROM_BYTES = 2 << 20


def put(gradient: torch.Tensor, slot: Slot) -> None:
    """Copies a gradient to its slot's place."""
    view, bucket = slot.view, slot.bucket
    assert view is not None and bucket is not None
    # A slot's elements fill its memory, and so do those of whatever has the same strides.
    alike = gradient.dtype == view.dtype and gradient.stride() == view.stride() and not gradient.is_neg()
    if alike and gradient.is_cpu and bucket.flat.nbytes >= _PAST_CACHE_FROM_BYTES:
        _C.copy_past_cache(gradient.data_ptr(), slot.address, gradient.nbytes)
    else:
        view.copy_(gradient)
