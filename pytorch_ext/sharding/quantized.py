"""Quantised weights of torchao: a tensor subclass whose rows and groups of columns have scales.

torchao cuts such a tensor itself, with its scales (aten.slice). A cut inside of a group would need other numbers, so it
is refused. Products take the values that the numbers stand for, which are those of the whole tensor.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weft.metadata import metadata
from weft.sharding.sizes import split_sizes

_CUT = "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"


def is_quantized(x: Any) -> bool:
    """Return whether x is a quantised tensor of torchao."""
    return hasattr(type(x), "tensor_data_names") and hasattr(x, "dequantize")


def values_of(x: torch.Tensor) -> torch.Tensor:
    """Return x, or the values that a quantised x stands for, [out, in]."""
    return x.dequantize() if is_quantized(x) else x


def numbers_in(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (attribute, tensor) for the plain tensors in a quantised one: its numbers, scales and zero points."""
    for name in x.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield name, getattr(x, name)


def with_numbers(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor quantised as x is, with other numbers, scales and zero points."""
    inner = {name: change(numbers) for name, numbers in numbers_in(x)}
    return type(x).__tensor_unflatten__(inner, x.__tensor_flatten__()[1], None, None)  # type: ignore[attr-defined]


def stored_name(name: str, attribute: str) -> str:
    """Return torchao's name in safetensors for a plain tensor in the quantised tensor `name`."""
    module, _, weight = name.rpartition(".")
    return f"{module}._{weight}_{attribute}"


def on_meta(metadata: Mapping[str, str], stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the quantised tensors of safetensors files by name, on the meta device.

    Args:
        metadata: the texts in the files' heads, in which torchao describes its tensors.
        stored: the stored tensors, on the meta device.

    Raises:
        ValueError: a part of a tensor is not stored; torchao does not know the kind.
    """
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    found: dict[str, torch.Tensor] = {}
    for name, text in sorted(metadata.items()):
        kind = json.loads(text) if "_type" in text else {"_type": "Tensor"}
        if kind["_type"] == "Tensor":
            continue
        parts = [stored_name(name, attribute) for attribute in kind.get("_tensor_data_names", ())]
        if lacking := [part for part in parts if part not in stored]:
            raise ValueError(f"{name} is quantised, and {', '.join(lacking)} is not stored")
        head = {"tensor_names": json.dumps([name]), name: text}
        found |= unflatten_tensor_state_dict({part: stored[part] for part in parts}, head)[0]
    return found


def kept_whole(x: torch.Tensor) -> str | None:
    """Return why a quantised tensor cannot be cut anywhere; None if it can be cut between groups."""
    if type(x).__name__ not in _CUT:
        return f"torchao's {type(x).__name__} cannot be cut"
    if any(
        getattr(x, name, None) is not None for name in ("act_quant_kwargs", "activation_quantization", "act_pre_scale")
    ):
        return "torchao also quantises its input"
    return None


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
    names, about = x.narrow(0, 0, sum(map(len, pieces))).__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: [getattr(piece, name) for piece in pieces] for name in names}
    whole = {name for name in names if getattr(x, name).size(0) == 1}  # one scale for all rows
    joined = {name: parts[0] if name in whole else torch.cat(parts) for name, parts in inner.items()}
    return type(x).__tensor_unflatten__(joined, about, None, None)  # type: ignore[attr-defined]


def check_groups(x: torch.Tensor, dim: int, edges: Iterable[int]) -> None:
    """Raise ValueError for a cut along `dim` inside of a group, and for a tensor that cannot be cut."""
    if reason := kept_whole(x):
        raise ValueError(f"a quantised weight {tuple(x.shape)}: {reason}: leave the layer out of the plan")
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


def groups_of(x: torch.Tensor) -> tuple[str | None, int]:
    """Return why a quantised weight cannot be cut, or None, and the number of columns with one scale."""
    reason = kept_whole(x)
    return reason, 1 if reason else group_size(x, 1)


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
        known = groups_of(weight) if is_quantized(weight) else metadata(weight, "quantized")
        if known is None:
            continue
        reason, size = known
        if reason:
            found[name] = reason
        elif any(part % size for part in split_sizes(weight.size(1), world)[:-1]):
            found[name] = f"{world} ranks would cut its quantised groups of {size} columns"
    return found
