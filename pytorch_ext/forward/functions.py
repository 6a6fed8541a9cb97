"""The function mode: handlers in place of functions of torch, while a context lasts."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

Handler = Callable[[Callable, tuple, dict[str, Any]], Any]  # (function, args, kwargs) -> its result


class FunctionMode(TorchFunctionMode):
    """Context in which functions of torch go to handlers. A handler may call the function, past this mode.

    Args:
        table: function to its handler.
        every: handler of all other functions; None leaves them as they are.
    """

    def __init__(self, table: Mapping[Callable, Handler] = {}, every: Handler | None = None):
        super().__init__()
        self.table, self.every = table, every

    def __torch_function__(self, func, types, args=(), kwargs=None):
        handler = self.table.get(func, self.every)
        return func(*args, **(kwargs or {})) if handler is None else handler(func, args, kwargs or {})
