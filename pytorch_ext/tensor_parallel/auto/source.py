"""Whether a module's code does more with a part of it than to call it: told by its source."""

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn

_ALL_PARTS = {"parameters", "modules", "children", "_parameters", "_modules", "state_dict"}
_ALL_PARTS |= {"get_submodule", "get_parameter"}
_ITERATES = ("enumerate", "iter", "len", "reversed", "super", "zip")


def reached_into(module: nn.Module, name: str) -> bool:
    """Whether the module's forward, or a method that it uses, has `self.name.something`, hands self.name or self on, or
    takes all parts or parameters; also where there is no source to look at."""
    if "forward" in vars(module):
        return True
    try:
        return any(_reaches(method, name) for method in _methods(type(module)))
    except (OSError, TypeError, SyntaxError):
        return True


def _methods(kind: type) -> Iterator[ast.AST]:
    """Of a class: forward, and the methods and properties that it mentions, and so on."""
    left, seen = [("forward", 0)], set()
    while left:
        method, first = left.pop()
        found = ((place, vars(owner)[method]) for place, owner in enumerate(kind.__mro__) if method in vars(owner))
        place, function = next((one for one in found if one[0] >= first), (0, None))
        function = getattr(function, "fget", getattr(function, "__func__", function))
        if (method, place) in seen or not inspect.isroutine(function) or kind.__mro__[place] is nn.Module:
            continue
        seen.add((method, place))
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        yield tree
        for part in (part for part in ast.walk(tree) if isinstance(part, ast.Attribute)):
            if _is_self(part.value):
                left.append((part.attr, 0))
            elif isinstance(part.value, ast.Call) and _name_of(part.value.func) == "super":
                left.append((part.attr, place + 1))


def _reaches(method: ast.AST, name: str) -> bool:
    allowed: set[int] = set()
    used: set[int] = set()
    for part in ast.walk(method):
        if isinstance(part, ast.Call):
            allowed.add(id(part.func))
            if _name_of(part.func) in _ITERATES:
                allowed |= set(map(id, part.args))
        elif isinstance(part, ast.For | ast.comprehension):  # the parts of a list, each of which is looked at by itself
            allowed.add(id(part.iter))
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            allowed.add(id(part.value))
            if part.attr == name:
                used.add(id(part))
            elif _is_self(part.value) and part.attr.removeprefix("named_") in _ALL_PARTS:
                return True
        elif _is_self(part):
            used.add(id(part))
    return not used <= allowed


def _is_self(part: ast.AST) -> bool:
    return _name_of(part) == "self"


def _name_of(part: ast.AST) -> str | None:
    return part.id if isinstance(part, ast.Name) else None
