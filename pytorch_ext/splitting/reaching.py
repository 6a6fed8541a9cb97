"""Whether a module's code does more with a part of it than to call it: told by its source."""

import ast
import inspect
import textwrap

from torch import nn


def reached_into(module: nn.Module, name: str) -> bool:
    """Whether code of the module's class, but for its constructor, has `self.name.something`, or hands self.name on;
    also where there is no source to look at."""
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        return True
    (tree,) = ast.parse(textwrap.dedent(source)).body
    methods = [part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) and part.name != "__init__"]
    called: set[int] = set()
    mentioned: set[int] = set()
    for part in (node for method in methods for node in ast.walk(method)):
        if isinstance(part, ast.Call):
            called.add(id(part.func))
        if isinstance(part, ast.For | ast.comprehension):  # the parts of a list, each of which is looked at by itself
            called.add(id(part.iter))
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.attr == name:
            mentioned.add(id(part))
    return not mentioned <= called
