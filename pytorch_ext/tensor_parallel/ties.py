"""Parameters that several split layers share."""

import torch
from torch import nn

from weft.sharding.quantized import is_quantized
from weft.sharding.shard import shard_of
from weft.tensor_parallel.local_sizes import has_numbers


def tie(model: nn.Module, replacements: dict[str, nn.Module]) -> None:
    """Check that shared parameters can stay shared. `keep_parameters` then keeps them so."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, key))
    for places in owners.values():
        _check_inside(places, replacements)
        split = [place for place in places if place[0] in replacements]
        if len(places) == 1 or not split:
            continue
        parts = [getattr(replacements[name], key) for name, key in split]
        first = next((part for part in parts if shard_of(part) is not None), parts[0])
        for name, key in places:
            layer = replacements.get(name)
            if has_numbers(layer):  # it has the parameter but does not compute with it
                setattr(layer, key, first)
                continue
            if layer is None and getattr(model.get_submodule(name), key) is first:
                continue
            if layer is None or shard_of(getattr(layer, key)) != shard_of(first):
                names = ", ".join(f"{owner}.{parameter}" for owner, parameter in places)
                raise ValueError(
                    f"parallelize: {names} are one parameter, and the plan does not split them in the same way; "
                    "name all of them, along the same dimension"
                )


def keep_parameters(layer: nn.Module, replacement: nn.Module) -> None:
    """Let the replacement train the layer's own Parameter objects, which an optimizer may hold already."""
    known = dict(layer.named_parameters(remove_duplicate=False))
    for prefix, module in replacement.named_modules(prefix="", remove_duplicate=False):
        for key, part in module._parameters.items():
            parameter = known.get(f"{prefix}.{key}" if prefix else key)
            if part is None or parameter is None or parameter is part or is_quantized(part):  # torchao's keeps its own
                continue
            if part.shape != parameter.shape:
                # A loss of the whole model that is still held keeps a node of the old shape, which torch gives up for
                # another type.
                other = torch.float32 if parameter.dtype != torch.float32 else torch.float64
                parameter.data = parameter.data.new_empty(0, dtype=other)
            parameter.data, parameter.grad = part.data, None
            shard = shard_of(part)
            if shard is not None:
                shard.mark(parameter)
            module._parameters[key] = parameter


def _check_inside(places: list[tuple[str, str]], replacements: dict[str, nn.Module]) -> None:
    """Check that a module that is replaced with its contents shares no parameter with modules outside of it."""
    for name, layer in replacements.items():
        prefixes = [f"{other}." for other, replacement in replacements.items() if replacement is layer]
        inside = [place for place in places if place[0].startswith(tuple(prefixes))]
        if not inside or len(inside) == len(places) or has_numbers(layer):
            continue
        names = ", ".join(f"{owner}.{parameter}" for owner, parameter in places)
        raise ValueError(
            f"parallelize: {names} are one parameter, and {name} would get a part of it for itself: leave {name} out "
            "of the plan, or untie it"
        )
