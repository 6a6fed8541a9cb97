"""The part of a model that a rank holds, under the model's own names."""

from collections.abc import Iterable

import torch
from torch import nn

from weft.forward.members import Members
from weft.metadata import set_metadata
from weft.sharding.owners import owners_of


def hold(into: nn.Module, model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Register in `into` the children, parameters and buffers of `model` that the stages use.

    They keep their names and places.

    Raises:
        ValueError: `into` has such a name for something else.
    """
    modules = {id(module) for stage in stages for module in stage.modules()}
    tensors = {id(x) for stage in stages for x in [*stage.parameters(), *stage.buffers()]}

    def fill(part: nn.Module, whole: nn.Module) -> bool:
        for name, tensor in whole._parameters.items():
            if tensor is not None and id(tensor) in tensors:
                _free(part, name)
                part.register_parameter(name, tensor)
        for name, buffer in whole._buffers.items():
            if buffer is not None and id(buffer) in tensors:
                _free(part, name)
                part.register_buffer(name, buffer, persistent=name not in whole._non_persistent_buffers_set)
        for name, child in whole._modules.items():
            if child is None:
                continue
            if id(child) in modules:
                _free(part, name)
                part.add_module(name, child)
            elif fill(container := nn.Module(), child):
                _free(part, name)
                part.add_module(name, container)
        part.training = whole.training
        return bool(part._parameters or part._buffers or part._modules)

    fill(into, model)


def _free(part: nn.Module, name: str) -> None:
    if hasattr(part, name):
        raise ValueError(
            f"the model has a {name!r} of its own, also a name of {type(part).__name__}: call it otherwise, or put "
            "the model into an nn.Sequential"
        )


class StageParams:
    """The tensors of a model that a module holds, and their replacement.

    Parameters are replaced if a model is built on the meta device, cut, and given memory or values afterwards.

    Args:
        into: the module that `hold` has filled.
        roots: the parts of the model that run, which use the tensors under the same names.
    """

    def __init__(self, into: nn.Module, roots: Iterable[nn.Module]):
        self._roots = tuple(roots)
        self._tensors, self._members = _tensors_of(into), Members(into)

    def renew(self, into: nn.Module) -> dict[torch.Tensor, torch.Tensor] | None:
        """Rebind the tensors of the roots to those in `into`; return {old: new}, None if `into` is as it was."""
        if not self._members.changed():
            return None
        self._members.record()
        now, changed = _tensors_of(into), {}
        for name, old in self._tensors.items():
            new = now.get(name)
            if new is None:
                raise ValueError(
                    f"{name} has gone since the model was cut, and the stages still use it: change the layers of the "
                    "model, and cut it afterwards"
                )
            if new is old:
                continue
            changed[old] = new
            if owners_of(old) is not None:
                set_metadata(new, "owners", owners_of(old))
            for root in self._roots:
                _replace(root, name, old, new)
        self._tensors = now
        return changed


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name: tensor for tensors in named for name, tensor in tensors}


def _replace(root: nn.Module, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    for part in path.split(".") if path else ():
        root = getattr(root, part, None)  # type: ignore[assignment]
        if root is None:
            return
    for tensors in (root._parameters, root._buffers):
        if tensors.get(attribute) is old:
            tensors[attribute] = new  # type: ignore[assignment]
