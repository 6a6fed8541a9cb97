"""Calls of a function that can run on several units of the batch at once, learnt from the first of each kind.

A first call runs unit by unit. Then a trial runs on copies of its arguments, all units at once, and the outputs and the
gradients of both are compared, bit by bit. Later calls of that kind run as the trial did.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from weft.comm.communicator import Communicator
from weft.forward.running import followed
from weft.invariant.at_once import NUMBERS, AtOnce, FunctionStep, PathChangedError, joined
from weft.invariant.trial import Trial
from weft.invariant.unit_outputs import ATOMS, leaves_of, same, same_bits, tensors_of
from weft.invariant.unit_sums import UnitBatch

_log = logging.getLogger("weft")
_MOST_TRIALS = 16  # of a model: each takes three times as long as the call itself
_MOST_CHANGES, _MOST_FAILED = 5, 3  # after which fewer trials are made


@dataclass(frozen=True)
class _Learnt:
    """How calls of a kind run on several units at once.

    Attributes:
        path: the functions that it calls.
        cuts: how each tensor of its output is cut into units.
        draws: it drops elements.
    """

    path: list[FunctionStep]
    cuts: list[int]
    draws: bool


@dataclass
class UnitCalls:
    """Calls of a function on each unit alone.

    Attributes:
        arguments: by unit.
        outputs: by unit.
        parameters: by unit; each unit has its own.
    """

    arguments: Sequence
    outputs: list
    parameters: list[Sequence[torch.Tensor]]


class KnownCalls:
    """What is known of calls with a module.

    Args:
        module: the module.
        units: numbers of the units here.
        beside: ranks that split the module, which must all run it in one way.
    """

    def __init__(self, module: nn.Module, units: range, beside: Sequence[Communicator]):
        self._module, self._units, self._beside = module, units, beside
        self._learnt: dict[tuple, _Learnt | None] = {}  # None: unit by unit
        self._trials = self._failed = 0
        self._changes = 0  # times that a forward has left its path

    def forget(self) -> None:
        """Forget all kinds, after a change of the module."""
        self._learnt.clear()

    def kind_of(self, function: Callable, arguments: Any, flags: Sequence[bool]) -> tuple | None:
        """Return the kind of a call: calls of one kind run alike. None if it has arguments or code of unknown kinds."""
        code = self._module if function is self._module else getattr(function, "__code__", None)
        leaves, structure = tree_flatten(arguments)
        if code is None or any(type(leaf) not in ATOMS and not isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        forms = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves]
        return code, str(structure), torch.is_grad_enabled(), *forms, *flags

    def is_tried(self, kind: tuple) -> bool:
        """Return whether the next call of this kind is to be tried at once."""
        return kind not in self._learnt and self._trials < _MOST_TRIALS

    def run(
        self, kind: tuple, make_batch: Callable[[], UnitBatch | None], function: Callable, arguments: Any, seed: int
    ) -> tuple[Any, list[int]] | None:
        """Run a call on all units at once; return its output, and how each tensor in that is cut into units.

        Returns:
            None if calls of its kind do not run so, or if it called other functions than in its trial.
        """
        learnt = self._learnt.get(kind)
        if learnt is None:
            return None
        functions = AtOnce(learnt.path, self._units, seed)
        try:
            return self._call(functions, make_batch(), function, arguments, learnt.draws)[0], learnt.cuts
        except PathChangedError:
            self._changes += 1
            del self._learnt[kind]
            return None

    def _call(
        self, functions: AtOnce, batch: UnitBatch | None, function: Callable, arguments: Any, draws: bool
    ) -> tuple[Any, Sequence[torch.Tensor]]:
        """Return the output, and the parameters that the module had."""
        args, kwargs = arguments
        with ExitStack() as stack:
            parameters = () if batch is None else stack.enter_context(batch.parameters_at_once())
            if draws:
                stack.enter_context(followed(self._module))
            with functions:
                output = function(*args, **kwargs)
        functions.end()
        return output, parameters

    def learn(
        self,
        kind: tuple,
        batch: UnitBatch | None,
        function: Callable,
        arguments: Any,
        size: int,
        seed: int,
        units: UnitCalls,
    ) -> None:
        """Try a call on all units at once, after it has run unit by unit. A collective call of the ranks beside.

        Args:
            arguments: copies of those of the whole, a batch of this size.
            units: the calls unit by unit.
        """
        learnt = None
        self._trials += 1
        if self._changes < _MOST_CHANGES:
            with torch.random.fork_rng([]):
                try:
                    learnt = self._tried(batch, function, arguments, size, seed, units)
                except Exception as error:  # a module's code may raise anything with other sizes; alone, it did not
                    _log.debug("units of %s run one by one: %r", type(self._module).__name__, error)
        for ranks in self._beside:
            found = ranks.all_gather_object(learnt is not None)
            learnt = learnt if all(found) else None
        self._failed += learnt is None
        if learnt is not None or self._failed >= _MOST_FAILED or self._changes >= _MOST_CHANGES:
            self._learnt[kind] = learnt

    def _tried(
        self, batch: UnitBatch | None, function: Callable, arguments: Any, size: int, seed: int, units: UnitCalls
    ) -> _Learnt | None:
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        of_batch: list[torch.Tensor] = []
        others = [*self._module.parameters(), *self._module.buffers()]
        for x in tensors:
            (of_batch if x.dim() and x.size(0) == size else others).append(x)
        trial = Trial(self._units, seed, of_batch, others)
        output, parameters = self._call(trial, batch, function, arguments, True)
        found = tensors_of(output)
        cuts = [trial.cut_of(x) for x in found]
        by_unit = [tensors_of(of_unit) for of_unit in units.outputs]
        if not _same_form(output, units.outputs):
            return None
        for x, *parts in zip(found, *by_unit, strict=True):
            if not same_bits(x, joined(parts)):
                return None
        if batch is not None and any(x.requires_grad for x in found):
            inputs = [x for x in of_batch if x.requires_grad]
            generator = torch.Generator().manual_seed(0)
            dys = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found]
            own = _gradients(found, dys, [*parameters, *inputs])
            of_units = []
            for unit, outputs in enumerate(by_unit):
                targets = [*units.parameters[unit], *_trained_in(units.arguments[unit])]
                pairs = zip(dys, cuts, strict=True)
                dys_here = [dy[unit] if cut == NUMBERS else dy.chunk(len(by_unit))[unit] for dy, cut in pairs]
                of_units.append(_gradients(outputs, dys_here, targets))
            if not _same_gradients(batch, own, list(zip(*of_units, strict=True))):
                return None
        return _Learnt(trial.path, cuts, trial.drew)


def _same_form(output: Any, of_units: list) -> bool:
    """Return whether an output of all units has the same structure, numbers and texts as that of each unit."""
    plain = [[leaf for leaf in leaves_of(x) if not isinstance(leaf, torch.Tensor)] for x in (output, *of_units)]
    return all(
        len(leaves) == len(plain[0])
        and all(same(x, y) or _are_caches(x, y) for x, y in zip(leaves, plain[0], strict=True))
        for leaves in plain
    )


def _are_caches(x: object, y: object) -> bool:
    """Return whether these are the caches of keys and values that models of transformers return."""
    return type(x) is type(y) and hasattr(x, "get_seq_length")


def _trained_in(arguments: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.requires_grad]


def _gradients(
    outputs: Sequence[torch.Tensor], dys: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of the targets for gradients dys of the outputs."""
    pairs = [(x, dy) for x, dy in zip(outputs, dys, strict=True) if x.requires_grad]
    outputs, dys = [x for x, _ in pairs], [dy for _, dy in pairs]
    return torch.autograd.grad(outputs, targets, dys, retain_graph=True, allow_unused=True)


def _same_gradients(batch: UnitBatch, own: Sequence[torch.Tensor | None], of_units: Sequence) -> bool:
    """Return whether the gradients of parameters and arguments of all units are those of the units' own calls.

    Args:
        own: gradients that came to parameters of all units together, and those of arguments.
        of_units: gradients of parameters and arguments, each by unit.
    """
    count = len(batch.of_units)
    if own[:count].count(None) < count:
        return False
    for of_parameter, by_unit in zip(batch.of_units, of_units[:count], strict=True):
        sums, _ = of_parameter.take()
        if not all(map(_same_or_none, sums, of_parameter.sums_of(by_unit))):
            return False
    joined = [None if None in by_unit else torch.cat(by_unit) for by_unit in of_units[count:]]
    return all(map(_same_or_none, own[count:], joined))


def _same_or_none(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    return x is y if x is None or y is None else same_bits(x.view(y.shape), y)
