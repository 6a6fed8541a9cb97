"""The modules that a program calls, by the names that its model gives them; and changes of torch that end again."""

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.forward.running import in_trial

_AROUND = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "ModelStage"}  # classes around a whole model
_SHAPE_INFERENCE = {"_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference"}


class Changes:
    """Changes of attributes, and whatever else is undone by a call."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def put(self, home: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class."""
        before = getattr(home, name)
        setattr(home, name, value)
        self._undo.append(lambda: setattr(home, name, before))

    def at_end(self, undo: Callable[[], Any]) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all, the last first."""
        while self._undo:
            self._undo.pop()()


def is_around(module: nn.Module) -> bool:
    """Return whether the module only wraps a model, whose name is not part of its modules' names."""
    return type(module).__name__ in _AROUND


class CalledModules(threading.local):
    """Modules that run on this thread now; and of all threads, the outermost ones that were called."""

    def __init__(self, roots: list[nn.Module]):
        self.stack: list[nn.Module] = []
        self.root_call = 0  # number of the call of the outermost module, in the step
        self.roots = roots

    def counts(self, module: nn.Module) -> bool:
        """Return whether a call is one of the program's model, and no trial."""
        return bool(self.stack) or not (
            in_trial() or _in_shape_inference() or any(x.is_meta for x in module.parameters())
        )

    def is_root(self, module: nn.Module) -> bool:
        """Return whether a call that begins is of a whole model."""
        return not is_around(module) and (not self.stack or is_around(self.stack[-1]))

    def enter_root(self, module: nn.Module) -> bool:
        """Note a root; return whether it is a new one."""
        new = not any(module is root for root in self.roots)
        if new:
            self.roots.append(module)
        return new


def outermost(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters that no other module called."""
    inner = {id(module) for root in roots for module in root.modules() if module is not root}
    return [root for root in roots if id(root) not in inner and any(True for _ in root.parameters())]


def names_of(roots: Sequence[nn.Module], model: nn.Module | None) -> dict[int, str]:
    """Return the names of all modules inside the roots, by id.

    The only model gives its names as they are. Names of other roots begin with the class, and from the second root of a
    class on with its number: `Critic(2).head`. Stages of one model, whose parameters have no names in common, have no
    such prefix.

    Args:
        model: gives the names; None: the root that is outermost.
    """
    models = outermost(roots)
    inside = [] if model is None else getattr(model, "module", model).named_modules()
    names = {id(module): name for name, module in inside}
    bare, classes = models if len(models) == 1 or _are_stages(models) else [], Counter[str]()
    for root in sorted(roots, key=lambda root: root not in models):
        prefix = ""
        if not any(root is other for other in bare) and id(root) not in names:
            classes[name := _class_name(root)] += 1
            prefix = name if classes[name] == 1 else f"{name}({classes[name]})"
        for name, module in root.named_modules():
            names.setdefault(id(module), ".".join(filter(None, (prefix, name))))
    return names


def _are_stages(models: Sequence[nn.Module]) -> bool:
    names = [name for model in models for name, _ in model.named_parameters()]
    return len({*map(_class_name, models)}) == 1 and len(names) == len({*names})


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class, without torch's wrappers."""
    while (inner := getattr(module, "_orig_mod", getattr(module, "_fsdp_wrapped_module", None))) is not None:
        module = inner
    return next(made.__name__ for made in type(module).__mro__ if not issubclass(made, FSDPModule))


def _in_shape_inference() -> bool:
    """Return whether torch.distributed.pipelining runs a stage on uninitialised memory, to learn shapes."""
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code.co_name not in _SHAPE_INFERENCE:
        frame = frame.f_back
    return frame is not None


def holder_of(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the smallest module that holds all of these: a pipeline's, or of a program that calls layers by itself."""
    holders = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in vars(x)]
    inside = ((holder, list(holder.modules())) for holder in holders)
    sizes = [(len(held), holder) for holder, held in inside if {*map(id, modules)} <= {*map(id, held)}]
    return min(sizes, key=lambda pair: pair[0])[1] if sizes else None
