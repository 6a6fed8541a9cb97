"""The parameters and buffers of a model that a rank has, under the model's own names."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from weft.forward.members import Members
from weft.metadata import set_metadata
from weft.pipeline.absent import Absent, like
from weft.pipeline.forward_cut import ForwardCut
from weft.sharding.owners import owners_of


def slots_of(model: nn.Module) -> list[tuple[nn.Module, dict, str, torch.Tensor]]:
    """Return every place of a parameter or buffer: module, dict, name and tensor."""
    return [
        (module, tensors, name, x)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, x in tensors.items()
        if x is not None
    ]


@contextmanager
def restored_slots(model: nn.Module) -> Iterator[list[tuple[nn.Module, dict, str, torch.Tensor]]]:
    """Yield `slots_of(model)`; afterwards each place has its tensor again."""
    slots = slots_of(model)
    try:
        yield slots
    finally:
        for _, tensors, name, x in slots:
            tensors[name] = x


class HeldLayers(nn.Module):
    """Layers, and other parameters and buffers of a model as they are now.

    Args:
        outside: module and name of each of these.
    """

    def __init__(self, layers: Sequence[nn.Module], outside: Sequence[tuple[nn.Module, str]]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._outside = tuple(outside)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        outside = (module._parameters.get(name) for module, name in self._outside)
        return iter(dict.fromkeys([*self.layers.parameters(), *(x for x in outside if x is not None)]))

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        outside = (module._buffers.get(name) for module, name in self._outside)
        return iter([*self.layers.buffers(), *(x for x in outside if x is not None)])


def outside_of(cut: ForwardCut) -> list[tuple[nn.Module, str]]:
    """Return module and name of the parameters and buffers around the layers."""
    own = {id(module) for layer in cut.layers.values() for module in layer.modules()}
    return [(module, name) for module, _, name, _ in slots_of(cut.model) if id(module) not in own]


def _leave_out(cut: ForwardCut, own: Sequence[HeldLayers]) -> None:
    """Put absent tensors in the place of those that the stages of this rank do not use."""
    held = {id(x) for stage in own for x in [*stage.parameters(), *stage.buffers()]}
    names = {id(x): name for name, x in [*cut.model.named_parameters(), *cut.model.named_buffers()]}
    running = {id(module) for stage in own for module in stage.modules()}
    for layer in cut.layers.values():
        if id(layer) not in running and hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = False  # type: ignore[assignment]
    stand_ins: dict[int, Absent] = {}
    for _, tensors, name, x in slots_of(cut.model):
        if id(x) not in held and not isinstance(x, Absent):
            stand_ins.setdefault(id(x), like(x, names[id(x)]))
            tensors[name] = stand_ins[id(x)]


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
    """The part of a model that this rank's stages use, registered in another module.

    Parameters are replaced if a model is built on the meta device, cut, and given memory or values afterwards.

    Args:
        into: gets this part, under the model's own names; the model gets absent tensors in the place of the others.
        stages: this rank's stages.

    Raises:
        ValueError: `into` has such a name for something else.
    """

    def __init__(self, into: nn.Module, cut: ForwardCut, stages: Sequence[HeldLayers]):
        hold(into, cut.model, stages)
        _leave_out(cut, stages)
        self._into, self._model = into, cut.model
        self._tensors, self._members = _tensors_of(into), Members(into)

    def renew(self) -> dict[torch.Tensor, torch.Tensor] | None:
        """Give the model the tensors that are now in `into`; return {old: new}, None if `into` is as it was."""
        if not self._members.changed():
            return None
        self._members.record()
        now, changed = _tensors_of(self._into), {}
        modules = dict(self._model.named_modules(remove_duplicate=False))
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
            path, _, own_name = name.rpartition(".")
            for tensors in (modules[path]._parameters, modules[path]._buffers) if path in modules else ():
                if tensors.get(own_name) is old:
                    tensors[own_name] = new  # type: ignore[assignment]
        self._tensors = now
        return changed


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name: tensor for tensors in named for name, tensor in tensors}
