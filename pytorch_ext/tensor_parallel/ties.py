"""Parameters that several layers share, when these layers are split."""

from torch import nn

from weft.sharding.shard import shard_of
from weft.tensor_parallel.local_sizes import has_numbers


def tie(model: nn.Module, replacements: dict[str, nn.Module]) -> None:
    """Refuse a plan under which parameters that are one could not stay one; keep_parameters sees to it that they do."""
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
            if has_numbers(layer):  # it has the parameter, and does not compute with it
                setattr(layer, key, first)
                continue
            if layer is None and getattr(model.get_submodule(name), key) is first:
                continue
            if layer is None or shard_of(getattr(layer, key)) != shard_of(first):
                told = ", ".join(f"{owner}.{parameter}" for owner, parameter in places)
                raise ValueError(
                    f"parallelize: {told} are one parameter, and the plan does not split them in the same way; "
                    "name all of them, along the same dimension"
                )


def keep_parameters(layer: nn.Module, replacement: nn.Module) -> None:
    """Let the replacement train the layer's own Parameter objects, which an optimizer may hold already."""
    known = dict(layer.named_parameters(remove_duplicate=False))
    for prefix, module in replacement.named_modules(prefix="", remove_duplicate=False):
        for key, part in module._parameters.items():
            parameter = known.get(f"{prefix}.{key}" if prefix else key)
            if part is None or parameter is None or parameter is part:
                continue
            parameter.data, parameter.grad = part.data, None
            shard = shard_of(part)
            if shard is not None:
                shard.mark(parameter)
            module._parameters[key] = parameter


def _check_inside(places: list[tuple[str, str]], replacements: dict[str, nn.Module]) -> None:
    """A module that is replaced with all that it contains cannot share a parameter with what is outside of it."""
    for name, layer in replacements.items():
        names = [f"{other}." for other, one in replacements.items() if one is layer]
        inside = [place for place in places if place[0].startswith(tuple(names))]
        if not inside or len(inside) == len(places) or has_numbers(layer):
            continue
        told = ", ".join(f"{owner}.{parameter}" for owner, parameter in places)
        raise ValueError(
            f"parallelize: {told} are one parameter, of which {name} would get a part of its own: leave {name} out "
            "of the plan, or untie it"
        )
