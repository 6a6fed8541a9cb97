"""The way into a module's forward and into the functions that it calls."""

from weft.forward.functions import FunctionMode

__all__ = ["FunctionMode"]
