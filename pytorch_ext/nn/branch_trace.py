"""Trace of a block with branches side by side: all take the same input; their outputs are joined or summed."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn


@dataclass(frozen=True)
class BranchValue:
    """The result of the step `name`, or the block's input where the name is ""."""

    name: str = ""


@dataclass(frozen=True)
class BranchStep:
    """One call in a branch: of a module (by its name in the block), of a method, or of a function."""

    name: str
    called: str | Callable
    is_module: bool
    args: tuple
    kwargs: dict[str, Any]

    def run(self, block: nn.Module, values: dict[str, torch.Tensor]) -> Any:
        args, kwargs = (_filled(given, values) for given in (self.args, self.kwargs))
        if self.is_module:
            return block.get_submodule(str(self.called))(*args, **kwargs)
        if isinstance(self.called, str):
            return getattr(args[0], self.called)(*args[1:], **kwargs)
        return self.called(*args, **kwargs)


@dataclass(frozen=True)
class Branch:
    """Steps in order; the last one gives the output. A branch without steps returns its input."""

    steps: tuple[BranchStep, ...]

    @property
    def modules(self) -> set[str]:
        return {str(step.called) for step in self.steps if step.is_module}

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        values = {"": x}
        out = x
        for step in self.steps:
            out = values[step.name] = step.run(block, values)
        return out


@dataclass(frozen=True)
class SideBySide:
    """The branches of a block.

    Attributes:
        dim: the dimension along which the outputs are joined; None where they are summed.
    """

    branches: tuple[Branch, ...]
    dim: int | None


def of_modules(names: Sequence[str], dim: int | None) -> SideBySide:
    """Return branches of one named module each."""
    calls = (BranchStep(name, name, True, (BranchValue(),), {}) for name in names)
    return SideBySide(tuple(Branch((call,)) for call in calls), dim)


def of_block(block: nn.Module) -> SideBySide:
    """Return the branches of a block, read from its forward by torch.fx.

    The forward must be cat([f(x), g(x), ...], dim) or f(x) + g(x) + ...

    Raises:
        ValueError: the forward is something else or cannot be traced, or two branches share a module.
    """
    nodes = list(_read(block).nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (last,) = nodes[-1].args
    outputs, dim = _joined(last)
    if len(inputs) != 1 or len(outputs) < 2:
        raise ValueError(
            f"{type(block).__name__} is not made of branches side by side: its forward must take one input and return "
            "torch.cat([f(x), g(x), ...], dim) or f(x) + g(x) + ..."
        )
    branches = tuple(_branch(block, output, inputs[0], nodes) for output in outputs)
    _check_apart(branches)
    return SideBySide(branches, dim)


class _Calls(fx.Tracer):
    """Tracer that records each call of a module as one step."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _read(block: nn.Module) -> fx.Graph:
    kept, graphs = block.training, []
    try:
        for block.training in (not kept, kept):
            graphs.append(_Calls().trace(block))
    except Exception as error:  # a forward that depends on its input may raise anything on a symbol
        raise ValueError(
            f"the forward of {type(block).__name__} cannot be read ({type(error).__name__}: {error}): build the block "
            "of weft.nn.Branches instead"
        ) from error
    finally:
        block.training = kept
    if str(graphs[0]) != str(graphs[1]):
        raise ValueError(
            f"the forward of {type(block).__name__} differs in eval mode: use modules for the parts that depend on it "
            "(nn.Dropout instead of F.dropout)"
        )
    return graphs[1]


def _joined(node: Any) -> tuple[list, int | None]:
    """Return the nodes that this node joins or sums, and the dimension; an empty list where it does neither."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return [], None
    if node.target in (torch.cat, torch.concat, torch.concatenate):
        tensors = node.args[0] if node.args else node.kwargs["tensors"]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return (list(tensors), dim) if isinstance(dim, int) and isinstance(tensors, list | tuple) else ([], None)
    return _terms(node) if _is_sum(node) else [], None


def _is_sum(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in (operator.add, operator.iadd, torch.add) and not node.kwargs


def _terms(node: Any) -> list:
    """Return the terms of a sum in order, without the 0 that sum() begins with."""
    if _is_sum(node) and (len(node.users) == 1):
        return [term for given in node.args for term in _terms(given)]
    return [] if isinstance(node, int) and node == 0 else [node]


def _branch(block: nn.Module, output: Any, x: fx.Node, nodes: list[fx.Node]) -> Branch:
    needed: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node.op in ("get_attr", "output"):
            raise ValueError(
                f"{type(block).__name__} uses {getattr(node, 'target', node)} in a branch, and not a module: its "
                "parameters must be those of modules"
            )
        if node is not x and node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return Branch(tuple(_step(node, x) for node in nodes if node in needed))


def _step(node: fx.Node, x: fx.Node) -> BranchStep:
    def value(other: fx.Node) -> Any:
        return BranchValue("" if other is x else other.name)

    args, kwargs = (cast(Any, fx.map_arg(given, value)) for given in (node.args, node.kwargs))
    return BranchStep(node.name, node.target, node.op == "call_module", args, dict(kwargs))


def _filled(given: Any, values: dict[str, torch.Tensor]) -> Any:
    if isinstance(given, BranchValue):
        return values[given.name]
    if isinstance(given, dict):
        return {key: _filled(value, values) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(_filled(value, values) for value in given)
    return given


def _check_apart(branches: Sequence[Branch]) -> None:
    seen: dict[str, int] = {}
    for number, branch in enumerate(branches):
        for name in branch.modules:
            if seen.setdefault(name, number) != number:
                raise ValueError(f"{name} is in two branches, {seen[name]} and {number}; each has modules of its own")
