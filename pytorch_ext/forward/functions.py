"""The function mode: handlers in place of functions of torch, while a context lasts."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

Handler = Callable[[Callable, tuple, dict[str, Any]], Any]  # (function, args, kwargs) -> its result


class FunctionMode(TorchFunctionMode):
    """Context in which functions of torch go to handlers. A handler may call the function, past this mode.

    Args:
        table: function to its handler.
        every: handler of all other functions; None leaves them as they are.
        inside: a tensor class with rules of its own; the mode also gets the functions that these rules call.
        owner: the object that the mode works for.
        passed: functions that are left as they are.
    """

    def __init__(
        self,
        table: Mapping[Callable, Handler] | None = None,
        every: Handler | None = None,
        inside: type[torch.Tensor] | None = None,
        owner: object = None,
        passed: Collection[Callable] = (),
    ):
        super().__init__()
        self.table, self.every, self.inside, self.owner, self.passed = table or {}, every, inside, owner, passed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.passed:
            return func(*args, **kwargs)
        if self.inside is not None and self.inside in types and torch._C._is_torch_function_enabled():
            with self:
                return self.inside.__torch_function__(func, types, args, kwargs)
        handler = self.table.get(func, self.every)
        return func(*args, **kwargs) if handler is None else handler(func, args, kwargs)


def seen_by_modes(function: Callable, *args: Any, **kwargs: Any) -> tuple[Any] | None:
    """Let the innermost function mode handle a call of our own function, as it does with those of torch.

    Returns:
        The result, in a tuple; None if no mode is active, and the function itself must run.
    """
    if not torch._C._is_torch_function_mode_enabled():
        return None
    return (handle_torch_function(function, args, *args, **kwargs),)
