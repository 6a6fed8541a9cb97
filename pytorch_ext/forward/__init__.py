"""The way into a module's forward, and into the functions that it calls (docs/forward.md)."""

from weft.forward.chain import ORDER, ForwardChain, chains_in, step_of, steps_of
from weft.forward.functions import FunctionMode, Handler
from weft.forward.members import Members, remove_hooks

__all__ = [
    "ORDER",
    "ForwardChain",
    "FunctionMode",
    "Handler",
    "Members",
    "chains_in",
    "remove_hooks",
    "step_of",
    "steps_of",
]
