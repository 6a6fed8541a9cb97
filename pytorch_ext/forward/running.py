"""Stack of the running modules. Torch's global module hooks keep it while a module is followed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class _Stack(threading.local):
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


_stack = _Stack()
_lock = threading.Lock()
_followers = 0
_trials = 0
_hooks: list = []


@contextmanager
def trial() -> Iterator[None]:
    """Say that calls of a model inside are not the program's own: they find out how it is to be cut."""
    global _trials
    _trials += 1
    try:
        yield
    finally:
        _trials -= 1


def in_trial() -> bool:
    return _trials > 0


@contextmanager
def followed(module: nn.Module) -> Iterator[None]:
    """Keep the stack of running modules inside the context. It starts with this module."""
    global _followers
    with _lock:
        _followers += 1
        if _followers == 1:
            _hooks.append(register_module_forward_pre_hook(_enter))
            _hooks.append(register_module_forward_hook(_leave, always_call=True))
    before = len(_stack.modules)
    _stack.modules.append(module)
    try:
        yield
    finally:
        del _stack.modules[before:]  # of a forward that a later stage goes on with, torch calls no hooks
        with _lock:
            _followers -= 1
            while not _followers and _hooks:
                _hooks.pop().remove()


def running() -> nn.Module | None:
    """Return the innermost running module; None if no module is followed."""
    return _stack.modules[-1] if _stack.modules else None


def is_running(module: nn.Module) -> bool:
    """Return whether the module is running; False if no module is followed."""
    return any(other is module for other in _stack.modules)


def _enter(module: nn.Module, args) -> None:
    if _stack.modules:
        _stack.modules.append(module)


def _leave(module: nn.Module, args, output) -> None:
    if len(_stack.modules) > 1 and _stack.modules[-1] is module:
        _stack.modules.pop()
