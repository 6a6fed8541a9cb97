"""Matching of a plan's patterns with module names."""

import re
from collections.abc import Mapping

from torch import nn

from weft.tensor_parallel.styles import Plan


def match(plan: Plan, model: nn.Module) -> dict[str, str | Mapping]:
    """Return the plan entry of each module that a pattern names. Only one pattern may name a module."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    matched: dict[str, str | Mapping] = {}
    by: dict[str, str] = {}
    for pattern, entry in plan.items():
        expression = re.compile(as_regex(pattern))
        hits = [name for name in names if expression.fullmatch(name)]
        if not hits:
            raise ValueError(
                f"parallelize: the plan names {pattern!r}, and no module is called that. "
                f"Linear and embedding layers of the model: {', '.join(layers) or 'none'}"
            )
        for name in hits:
            if name in by:
                raise ValueError(f"parallelize: {name} is named by both {by[name]!r} and {pattern!r}; keep one of them")
            matched[name], by[name] = entry, pattern
    return matched


def as_regex(pattern: str) -> str:
    pieces = re.split(r"(\*\*\.|\*\*|\*)", pattern)
    wild = {"**.": r"(?:.+\.)?", "**": ".*", "*": r"[^.]+"}
    return "".join(wild.get(piece) or re.escape(piece) for piece in pieces)
