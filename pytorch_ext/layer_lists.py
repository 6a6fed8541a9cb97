"""Lists of layers in a model, and the key-value caches that a caller may pass to its layers."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)


def opened_in(model: nn.Module) -> set[str]:
    """Return the names of the outermost lists of layers and of the modules that contain them."""
    opened: set[str] = set()

    def look(module: nn.Module, name: str) -> bool:
        prefix = f"{name}." if name else ""
        if type(module) in _LISTS:
            opened.add(name)
            for child_name, child in module.named_children():
                if type(child) in _LISTS:
                    look(child, prefix + child_name)
            return True
        found = [look(child, prefix + child_name) for child_name, child in module.named_children()]
        if any(found):
            opened.add(name)
        return any(found)

    look(model, "")
    return opened | {""}


def lists_in(model: nn.Module) -> set[str]:
    """Return the names of the outermost lists of layers."""
    return {name for name in opened_in(model) if type(model.get_submodule(name)) in _LISTS}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the elements of the outermost module lists, and every other module that contains no such list."""
    opened = opened_in(model)
    return {
        name: module
        for name, module in model.named_modules()
        if name not in opened and name.rpartition(".")[0] in opened
    }


def tensors_outside(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of no layer, which the model's own code uses."""
    opened = [model.get_submodule(name) for name in opened_in(model)]
    tensors = [x for module in opened for x in (*module._parameters.values(), *module._buffers.values())]
    return [tensor for tensor in tensors if tensor is not None]


def refuse_caches(module: nn.Module, args: Sequence, kwargs: Mapping, why: str) -> None:
    """Raise ValueError if a module is called with a cache of keys and values.

    Args:
        why: the reason, as a clause about the cache, for the message.
    """
    names = [name for name, value in kwargs.items() if "past_key_value" in name and not isinstance(value, int | None)]
    names += [type(value).__name__ for value in args if _is_cache(value)]
    if names:
        raise ValueError(
            f"{type(module).__name__} got a cache ({names[0]}), {why}: call the model with use_cache=False "
            "(model.config.use_cache = False)"
        )


def _is_cache(value) -> bool:
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__)
