"""The part of a model that a rank holds, under the model's own names."""

from collections.abc import Iterable

from torch import nn


def hold(into: nn.Module, model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Registers in `into` those children, parameters and buffers of `model` that the stages use, where they are in it.

    Raises:
        ValueError: a name that `into` has for something else.
    """
    modules = {id(module) for stage in stages for module in stage.modules()}
    tensors = {id(one) for stage in stages for one in [*stage.parameters(), *stage.buffers()]}

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
            f"the model has a {name!r} of its own, which is a name of {type(part).__name__}: call it otherwise, or put "
            "the model into an nn.Sequential"
        )
