"""A module's forward as a chain of named steps around the module's own.

`ORDER` has the steps from the outermost to the innermost, whatever the order in which they were added. A step gets the
rest of the chain as a function, and calls it or not. A forward that was set on the module before stays the innermost.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

ORDER = {
    "trace": "records the module for a plan",
    "generate": "sends calls of a model's generate through its stages",
    "stage": "runs a layer on the stage or rank that has it",
    "bits": "gives functions the same bits on any number of ranks (invariant)",
    "uncompiled": "leaves the module out of torch.compile's graphs",
    "sequence": "gets parts of a sequence that ranks share, and returns parts",
    "recompute": "keeps no activations and runs again in backward",
    "numbers": "sees this rank's widths, and drops this rank's parts",
    "between": "follows the code between the layers of a model in stages",
}
Step = Callable[..., Any]  # step(forward, module, *args, **kwargs) -> the module's result; forward is the rest


class ForwardChain:
    """The forward of one module. It is copied with the module."""

    def __init__(self, module: nn.Module):
        own = vars(module).get("forward")
        self.module, self.own = module, own
        self.steps: dict[str, Step] = {}
        self._of_class: Callable | None = None
        self._composed: Callable | None = None
        self.__signature__ = inspect.signature(module.forward)

    @classmethod
    def of(cls, module: nn.Module, copied_from: nn.Module | None = None) -> "ForwardChain":
        """Return the module's chain; begin one if there is none.

        Args:
            copied_from: the module that this one is a shallow copy of, if it may have a forward of its own.
        """
        found = vars(module).get("forward")
        if isinstance(found, ForwardChain) and found.module is module:
            return found
        made = cls(module)
        if isinstance(found, ForwardChain):
            made.steps, made.own = {name: copy(step) for name, step in found.steps.items()}, found.own
            copied_from = found.module
        if isinstance(made.own, MethodType) and made.own.__self__ is copied_from:
            made.own = MethodType(made.own.__func__, module)
        module.forward = made  # type: ignore[method-assign]
        return made

    def add(self, name: str, step: Step) -> None:
        """Add a step, or put it in the place of the one with this name."""
        if name not in ORDER:
            raise KeyError(name)
        self.steps[name] = step
        self._composed = None

    def remove(self, name: str) -> None:
        """Remove a step; without any, the module has its own forward again."""
        del self.steps[name]
        self._composed = None
        if not self.steps and vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            if self.own is not None:
                vars(self.module)["forward"] = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        composed = self._composed
        if composed is None or self._of_class is not type(self.module).forward:
            composed = self._compose()
        return composed(*args, **kwargs)

    def _compose(self) -> Callable:
        self._of_class = type(self.module).forward
        forward: Callable = MethodType(self._of_class, self.module) if self.own is None else self.own
        for name in reversed(ORDER):
            if name in self.steps:
                forward = partial(self.steps[name], forward, self.module)
        self._composed = forward
        return forward

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_composed": None}  # it is bound to this module


def step_of(module: nn.Module, name: str) -> Step | None:
    """Return a step of a module's forward by its name; None if there is none."""
    found = vars(module).get("forward")
    return found.steps.get(name) if isinstance(found, ForwardChain) else None


def steps_of(module: nn.Module) -> list[str]:
    """Return the names of the steps in a module's forward, from the outermost to the innermost."""
    found = vars(module).get("forward")
    return [name for name in ORDER if name in found.steps] if isinstance(found, ForwardChain) else []


def chains_in(model: nn.Module) -> Iterator[tuple[str, ForwardChain]]:
    """Yield (module name, chain) for each module of a model with steps in its forward."""
    for name, module in model.named_modules():
        found = vars(module).get("forward")
        if isinstance(found, ForwardChain):
            yield name, found
