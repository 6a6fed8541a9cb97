"""Dry run: a check that a model's code, with one rank's part of each layer, computes that rank's part of all tensors.

A model may count heads or features in its own code, `view(..., self.num_heads, self.head_dim)`. So each rank's part is
rehearsed without values. The rehearsal must run the same operations on the same tensors, with this rank's shapes and
unchanged numbers. If it fails, a module's attribute that counts split units is set to this rank's number, if that
helps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from weft.tensor_parallel.auto.propagation import Propagation
from weft.tensor_parallel.auto.trace import MismatchError, Node, Trace, TraceRun, UntraceableError, Value, trace
from weft.tensor_parallel.local_sizes import argument_of, set_number, width_of

Numbers = dict[tuple[str, str], tuple[int, ...]]  # (module, attribute) to its number on each rank
_REPEATING = ("slice", "unsqueeze", "expand", "view")
_BY_SHAPE = {"view", "expand", "split", "split_with_sizes", "layer", "closed"}


class Rehearsal(TraceRun):
    """Run with one rank's widths that is compared with the whole model's trace."""

    def __init__(self, whole: Trace, found: Propagation, rank: int):
        super().__init__()
        self.whole, self.found, self.rank, self.step = whole, found, rank, 0
        self.skips = _repetitions(whole, found, rank)
        self.as_repeated: dict[Value, Value] = {}

    def width_of(self, name: str, whole: int) -> int:
        axis = self.found.columns.get(name, self.found.norms.get(name))
        return whole if axis is None else self.found.local_size(axis)[self.rank]

    def check_input(self, layer: nn.Module, *inputs) -> None:
        """Do nothing: a tensor's shape is compared when an operation makes it."""

    def take(self, node: Node) -> None:
        expected = self._next(node)
        step, self.step = self.step, self.step + 1
        if (node.op, node.layer, len(node.outputs)) != (expected.op, expected.layer, len(expected.outputs)):
            raise MismatchError(step, f"{node.op} in {node.where} stands in the place of {expected.op}")
        for given, value in zip(node.inputs, expected.inputs, strict=True):
            if given.twin is not None and value not in (given.twin, self.as_repeated.get(given.twin)):
                raise MismatchError(step, f"{node.op} in {node.where} takes another tensor")
            if given.content != value.content:
                raise MismatchError(step, f"{node.op} in {node.where} takes another constant")
        for made, whole in zip(node.outputs, expected.outputs, strict=True):
            if made is None or whole is None:
                continue
            shape = self.found.local_shapes(whole)[self.rank]
            if made.shape != shape:
                raise MismatchError(step, f"{node.op} in {node.where} gives {made.shape}, where {shape} is its part")
            made.twin = whole
        self._check_numbers(step, node, expected)

    def _next(self, node: Node) -> Node:
        nodes = self.whole.nodes
        while self.step < len(nodes) and self.step in self.skips and nodes[self.step].op != node.op:
            self.step, once, repeated = self.skips[self.step]
            self.as_repeated[once] = repeated
        if self.step >= len(nodes):
            raise MismatchError(self.step, f"{node.op} in {node.where} is one operation more than the whole model's")
        return nodes[self.step]

    def _check_numbers(self, step: int, node: Node, expected: Node) -> None:
        if node.op in _BY_SHAPE:
            return
        numbers, whole = (list(_numbers((one.args, _compared_options(one)))) for one in (node, expected))
        if node.op == "slice" and expected.inputs[0] in self.found.layouts:
            numbers, whole = self._starts(node, expected)
        if numbers != whole:
            raise MismatchError(step, f"{node.op} in {node.where} has the numbers {numbers}, not {whole}")

    def _starts(self, node: Node, expected: Node):
        """Return the actual and the expected start, on this rank, of a slice that takes a piece of a fused layer."""
        layout, piece = self.found.layouts[expected.inputs[0]], self.found.layouts[expected.output].axis
        axis = layout.axis
        if axis is piece:
            return [], []
        each = axis.size // layout.extent  # features of a head
        size = self.found.local_size(axis)[self.rank] // each
        start = node.args[2] or 0
        before = [part for _, part in sorted(axis.pieces.items()) if part.start < piece.start]
        expected_start = sum(self.found.local_size(part)[self.rank] for part in before) // each
        return [start if start >= 0 else size + start], [expected_start]


def _repetitions(whole: Trace, found: Propagation, rank: int) -> dict[int, tuple[int, Value, Value]]:
    """Find the operations that repeat KV heads and that a rank with one KV head for each query head may skip.

    Returns:
        First operation to (the operation after the last, the tensor before the repetition, the repeated tensor).
    """
    made = {output: step for step, node in enumerate(whole.nodes) for output in node.outputs if output is not None}
    skips = {}
    for step, node in enumerate(whole.nodes):
        layout = found.layouts.get(node.outputs[0]) if node.outputs and node.outputs[0] is not None else None
        system = found.systems.get(layout.axis) if layout is not None else None
        if layout is None or system is None or not system.kv_units:
            continue
        if layout.copies == 1 or node.op not in _REPEATING:
            continue
        fine, coarse = system.shares(found.world_size)[rank]
        if fine != coarse:
            continue
        first, once = step, node.inputs[0]
        while once in made and whole.nodes[made[once]].op in _REPEATING and made[once] == first - 1:
            if len(once.shape) == len(node.output.shape) and whole.nodes[made[once]].op != "slice":
                break
            first, once = first - 1, whole.nodes[first - 1].inputs[0]
        if found.layouts[once].copies == 1:
            skips[first] = (step + 1, once, node.output)
    return skips


def _compared_options(node: Node) -> dict:
    """Return the named arguments without enable_gqa, which follows from the shapes."""
    return {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}


def _numbers(tree) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _numbers(part)
    elif isinstance(tree, dict):
        for key in sorted(tree):
            yield from _numbers(tree[key])
    elif isinstance(tree, (int, float, str, torch.dtype)):
        yield tree


def rehearse(
    twin: nn.Module, call: Callable, whole: Trace, found: Propagation, known: Numbers | None = None
) -> tuple[Numbers, MismatchError | None]:
    """Rehearse every rank's part and find the numbers that modules need.

    Args:
        twin, call, whole: the model, the call and the trace of the whole model.
        known: numbers that modules have already.

    Returns:
        The numbers, and the mismatch that remains; None if there is none.
    """
    numbers: Numbers = dict(known or {})
    ranks = _unlike_ranks(found)

    def reached(more: Numbers, past: int = -1) -> MismatchError | None:
        """Return the earliest mismatch of all ranks; stop at the first one that is not past step `past`."""
        earliest = None
        for rank in ranks:
            mismatch = _wrong(twin, call, whole, found, rank, {**numbers, **more})
            if mismatch is not None and (earliest is None or mismatch.step < earliest.step):
                earliest = mismatch
                if mismatch.step <= past:
                    break
        return earliest

    mismatch = reached({})
    while mismatch is not None:
        helps = _help(twin, whole, found, mismatch, numbers, reached)
        if helps is None:
            return numbers, mismatch
        numbers |= helps
        mismatch = reached({})
    return numbers, None


def _help(
    twin, whole: Trace, found: Propagation, mismatch: MismatchError, numbers: Numbers, reached: Callable
) -> Numbers | None:
    """Return the candidate numbers with which the rehearsals get furthest; None if they get no further.

    The search stops at the first candidate with which the rehearsals leave the module.
    """
    best, furthest = None, mismatch.step
    where = whole.nodes[min(mismatch.step, len(whole.nodes) - 1)].where
    candidates = list(_candidates(twin, whole, found, where, numbers))
    # Code that divides one number by another needs both: a width by heads, heads by KV heads.
    first = [one for one in candidates if any(name == where or argument_of(number) for name, number in one)]
    pairs = ({**one, **other} for other in first for one in candidates if one.keys() != other.keys())
    for candidate in chain(candidates, pairs):
        after = reached(candidate, mismatch.step)
        if after is not None and after.step <= furthest:
            continue
        if after is None or not f"{whole.nodes[min(after.step, len(whole.nodes) - 1)].where}.".startswith(f"{where}."):
            return candidate
        best, furthest = candidate, after.step
    return best


def _wrong(twin, call, whole, found, rank, numbers) -> MismatchError | None:
    rehearsal = Rehearsal(whole, found, rank)
    try:
        with _with_numbers(twin, numbers, rank):
            trace(twin, call, whole.closed, rehearsal)
    except MismatchError as mismatch:
        return mismatch
    except UntraceableError as error:
        return MismatchError(rehearsal.step, f"{error.module or 'the model'} raises {error}")
    if rehearsal.step != len(whole.nodes):
        return MismatchError(rehearsal.step, "the model does less than with whole layers")
    return None


def _unlike_ranks(found: Propagation) -> list[int]:
    """Return one rank of each kind, because ranks with the same shares do the same."""
    systems = list({id(system): system for system in found.systems.values()}.values())
    first: dict[tuple, int] = {}
    for rank in range(found.world_size):
        first.setdefault(tuple(system.shares(found.world_size)[rank] for system in systems), rank)
    return list(first.values())


def _candidates(twin: nn.Module, whole: Trace, found: Propagation, where: str, numbers: Numbers) -> Iterator[Numbers]:
    """Yield numbers that the modules around `where` might need, the same in all modules of a class.

    The numbers are attributes of the modules, attributes of their configurations, and widths of their arguments.
    """
    parts = where.split(".")
    around = list(filter(None, (".".join(parts[:end]) for end in range(len(parts), 0, -1))))  # without the model itself
    modules = dict(twin.named_modules())
    known: dict[str, dict[int, set]] = {}
    for counts in (_attributes, _of_config, partial(_widths, whole, found)):
        for name in around[:1] if counts is _of_config else around:
            alike = [other for other, module in modules.items() if type(module) is type(modules[name])]
            for attribute, value in counts(name, modules[name]).items():
                if (name, attribute) in numbers:
                    continue
                for local in sorted(_sizes_within(name, whole, found, known).get(value, ())):
                    yield {
                        (other, attribute): local
                        for other in alike
                        if counts(other, modules[other]).get(attribute) == value
                        and local in _sizes_within(other, whole, found, known).get(value, ())
                    }


def _attributes(name: str, holder: object) -> dict[str, int]:
    """Return the positive whole numbers among an object's attributes."""
    values = vars(holder) if hasattr(holder, "__dict__") else {}
    return {name: value for name, value in values.items() if type(value) is int and value > 0}


def _of_config(name: str, module: nn.Module) -> dict[str, int]:
    """Return the positive whole numbers in a module's configuration."""
    return {f"config.{key}": value for key, value in _attributes(name, vars(module).get("config")).items()}


def _widths(whole: Trace, found: Propagation, name: str, module: nn.Module) -> dict[str, int]:
    """Return the widths of whole tensors that a module's code may read from its arguments."""
    widths = {}
    for (owner, argument), values in whole.arguments.items():
        sizes = {value.shape[-1] if value.shape and value not in found.layouts else 0 for value in values}
        if owner == name and len(sizes) == 1 and 0 not in sizes:
            widths[width_of(argument)] = sizes.pop()
    return widths


def _sizes_within(name: str, whole: Trace, found: Propagation, known: dict[str, dict[int, set]]) -> dict[int, set]:
    """Return the sizes in a module that differ between ranks: whole size to each rank's sizes.

    These are sizes of split dimensions, numbers of heads, and the number of query heads that use a KV head.
    """
    if name in known:
        return known[name]
    sizes: dict[int, set] = {}
    for node in whole.nodes:
        if name and not (node.where + ".").startswith(name + "."):
            continue
        for value in [*node.inputs, *(output for output in node.outputs if output is not None)]:
            layout = found.layouts.get(value)
            if layout is None:
                continue
            for dim, local in enumerate(zip(*found.local_shapes(value), strict=True)):
                if set(local) != {value.shape[dim]}:
                    sizes.setdefault(value.shape[dim], set()).add(local)
            system = found.systems.get(layout.axis)
            if system is not None and system.kv_units:
                each = tuple(fine // coarse for fine, coarse in system.shares(found.world_size))
                sizes.setdefault(system.copies, set()).add(each)
                sizes.setdefault(system.units, set()).add(tuple(fine for fine, _ in system.shares(found.world_size)))
                sizes.setdefault(system.kv_units, set()).add(
                    tuple(coarse for _, coarse in system.shares(found.world_size))
                )
    known[name] = sizes
    return sizes


@contextmanager
def _with_numbers(twin: nn.Module, numbers: Mapping[tuple[str, str], tuple[int, ...]], rank: int):
    modules = [twin.get_submodule(name) for name, _ in numbers]
    before = [dict(vars(module)) for module in modules]
    try:
        for (name, attribute), local in numbers.items():
            set_number(twin.get_submodule(name), attribute, local[rank])
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(own)
