"""Shared parts of tests and benches: references, argument lists, the launcher of ranks, tolerances."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "compare_ranks":  # which imports this package
        return importlib.import_module("weft.tools.compare.on_ranks").compare_ranks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
