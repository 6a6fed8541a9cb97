"""Comparison of stored tensors with those of a model."""

from collections.abc import Mapping

import torch

from weft.checkpoint import safetensors_io
from weft.checkpoint.chunks import TensorPart
from weft.checkpoint.contents import HeldTensor
from weft.checkpoint.on_all_ranks import CheckpointError
from weft.checkpoint.safetensors_io import Box, Files, Source, StoredTensor


def differences(tensors: Mapping[str, HeldTensor], source: Source, cast: bool) -> tuple[list[str], list[str]]:
    """Return the tensors that are stored with another shape or type, as text, and the names that are not stored."""
    misfits, missing = [], []
    for one in tensors.values():
        entries = entries_of(one, source)
        if not entries:
            missing.append(one.names[0])
        for entry in entries:
            has, stored = (safetensors_io.code_of(one.dtype), one.shape), (entry.code, entry.shape)
            if has[1] != stored[1] or (has[0] != stored[0] and not cast):
                misfits.append(
                    f"{one.names[0]} is {has[0]} {list(has[1])} in the model, {stored[0]} {list(stored[1])} stored"
                )
    return misfits, missing


def entries_of(one: HeldTensor, source: Source) -> list[StoredTensor]:
    """Return the stored tensors under all names of a tensor, each once."""
    return list(dict.fromkeys(source.model[name] for name in one.names if name in source.model))


def check_tied(one: HeldTensor, source: Source, opened: Files) -> None:
    """Check that a tied parameter that is stored several times has the same values each time."""
    entries = entries_of(one, source)
    for other in entries[1:]:
        for part in one.parts:
            values = [torch.empty_like(part.tensor) for _ in range(2)]
            for value, entry in zip(values, (entries[0], other), strict=True):
                opened.fill(TensorPart(part.offset, value), entry)
            if not torch.equal(*values):
                raise CheckpointError(
                    f"{', '.join(one.names)} are one parameter of the model, and are stored with different values"
                )


def boxes_of(source: Source, with_training: bool) -> dict[Box, str]:
    """Return the stored boxes that have a checksum, with their types."""
    entries = [*source.model.values(), *(source.training.values() if with_training else ())]
    return {box: entry.code for entry in entries for box in entry.boxes if box.checksum is not None}
