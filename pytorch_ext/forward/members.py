"""What is in a module, and whether it is still the same."""

from torch import nn


class Members:
    """Record of what is in a module, with a check in one pass that it is still the same.

    Attributes:
        modules, parameters: all of them, each once, as they were recorded.
    """

    def __init__(self, module: nn.Module, *, parameters: bool = True, buffers: bool = True):
        """Record the modules inside of a module, and its parameters and buffers."""
        kinds = {"_modules": True, "_parameters": parameters, "_buffers": buffers}
        self._module, self._kinds = module, [kind for kind, compared in kinds.items() if compared]
        self.record()

    def record(self) -> None:
        """Take what is there now as the same."""
        modules = self.modules = list(self._module.modules())
        self.parameters = list(self._module.parameters())
        self._dicts = [vars(each)[kind] for each in modules for kind in self._kinds]
        self._buffers = [each._buffers for each in modules]
        self._kept = [list(members.values()) for members in self._dicts]  # so that no other one gets the id of one
        self._ids = self._now()

    def changed(self) -> bool:
        return self._now() != self._ids

    def has_buffers(self) -> bool:
        return any(self._buffers) and next(self._module.buffers(), None) is not None

    def _now(self) -> list[int]:
        return [id(member) for members in self._dicts for member in members.values()]


def remove_hooks(module: nn.Module, *hooks: object) -> None:
    """Remove forward hooks and pre-hooks of a module, which may be a copy of the one that they were registered on."""
    for registered in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(registered.items()):
            if hook in hooks:
                del registered[key]
                for flags in (
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    flags.pop(key, None)
