"""Quantised weights of torchao: a tensor subclass whose rows and groups of columns have scales.

torchao cuts such a tensor itself, with its scales (aten.slice). A cut inside of a group would need other numbers, so it
is refused. Products take the values that the numbers stand for, which are those of the whole tensor.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from weft.metadata import metadata
from weft.sharding.sizes import split_sizes


def is_quantized(x: Any) -> bool:
    """Return whether x is a quantised tensor of torchao."""
    return hasattr(type(x), "tensor_data_names") and hasattr(x, "dequantize")


def values_of(x: torch.Tensor) -> torch.Tensor:
    """Return x, or the values that a quantised x stands for, [out, in]."""
    return x.dequantize() if is_quantized(x) else x


def numbers_in(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a quantised one: its numbers, scales and zero points."""
    for name in x.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield getattr(x, name)


def pick_quantized(x: torch.Tensor, dim: int, stretches: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the stretches of x along `dim`, one after another.

    Raises:
        ValueError: a stretch begins or ends inside of a group; the columns have several stretches.
    """
    check_groups(x, dim, (edge for stretch in stretches for edge in stretch))
    pieces = [x.narrow(dim, start, stop - start) for start, stop in stretches]
    if len(pieces) == 1:
        return pieces[0]
    if dim != 0:
        raise ValueError(f"a quantised weight {tuple(x.shape)} cannot be cut into several parts of its columns")
    names, about = pieces[0].__tensor_flatten__()  # type: ignore[attr-defined]
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in names}
    return type(x).__tensor_unflatten__(joined, about, None, None)  # type: ignore[attr-defined]


def check_groups(x: torch.Tensor, dim: int, edges: Iterable[int]) -> None:
    """Raise ValueError for a cut along `dim` inside of a group."""
    size = group_size(x, dim)
    for edge in edges:
        if edge % size and edge != x.size(dim):
            raise ValueError(
                f"a quantised weight {tuple(x.shape)} in groups of {size} cannot be cut at {edge} of dimension {dim}: "
                "leave the layer out of the plan, or quantise with another group size"
            )


def group_size(x: torch.Tensor, dim: int) -> int:
    """Return the number of neighbours along `dim` with one scale; 1 where cuts may be anywhere."""
    size = int(getattr(x, "block_size", (1, 1))[dim])
    return 1 if size >= x.size(dim) else size


def uneven_groups(model: torch.nn.Module, world: int) -> dict[str, str]:
    """Return the layers with a quantised weight that ranks cannot cut between groups, to the reason.

    Args:
        model: the model, or a copy without values that knows its group sizes as metadata.
        world: number of ranks.
    """
    found = {}
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        size = group_size(weight, 1) if is_quantized(weight) else metadata(weight, "group_size")
        if size and any(part % size for part in split_sizes(weight.size(1), world)[:-1]):
            found[name] = f"{world} ranks would cut its quantised groups of {size} columns"
    return found
