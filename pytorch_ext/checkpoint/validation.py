"""Comparison of stored tensors with those of a model."""

from collections.abc import Mapping

import torch

from weft.checkpoint import safetensors_io
from weft.checkpoint.boxes import TensorPart
from weft.checkpoint.contents import HeldTensor
from weft.checkpoint.on_all_ranks import CheckpointError
from weft.checkpoint.safetensors_io import Box, Files, Source, StoredTensor


def differences(tensors: Mapping[str, HeldTensor], source: Source, cast: bool) -> tuple[list[str], list[str]]:
    """Compare the model's tensors with the stored ones.

    Args:
        tensors: the model's tensors.
        source: the stored tensors.
        cast: allow another type.

    Returns:
        A text for each tensor that is stored with another shape or type, and the names of tensors that are not stored.
    """
    misfits, missing = [], []
    for tensor in tensors.values():
        entries = entries_of(tensor, source)
        if not entries:
            missing.append(tensor.names[0])
        for entry in entries:
            has, stored = (safetensors_io.code_of(tensor.dtype), tensor.shape), (entry.code, entry.shape)
            if has[1] != stored[1] or (has[0] != stored[0] and not cast):
                misfits.append(
                    f"{tensor.names[0]} is {has[0]} {list(has[1])} in the model, {stored[0]} {list(stored[1])} stored"
                )
    return misfits, missing


def entries_of(tensor: HeldTensor, source: Source) -> list[StoredTensor]:
    """Return the stored tensors under all names of a tensor, each once."""
    return list(dict.fromkeys(source.model[name] for name in tensor.names if name in source.model))


def check_tied(tensor: HeldTensor, source: Source, opened: Files) -> None:
    """Raise CheckpointError if a tied parameter is stored several times with different values."""
    entries = entries_of(tensor, source)
    for other in entries[1:]:
        for part in tensor.parts:
            values = [torch.empty_like(part.tensor) for _ in range(2)]
            for value, entry in zip(values, (entries[0], other), strict=True):
                opened.fill(TensorPart(part.offset, value), entry)
            if not torch.equal(*values):
                raise CheckpointError(
                    f"{', '.join(tensor.names)} are one parameter of the model, and are stored with different values"
                )


def boxes_of(source: Source, with_training: bool) -> dict[Box, str]:
    """Return the stored boxes that have a checksum, with their types."""
    entries = [*source.model.values(), *(source.training.values() if with_training else ())]
    return {box: entry.code for entry in entries for box in entry.boxes if box.checksum is not None}
