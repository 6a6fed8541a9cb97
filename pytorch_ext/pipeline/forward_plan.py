"""What the layers of a model's forward give, and which values cross between its stages."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from weft.pipeline.stage_boundary import Made

# What makes a value: a layer, by the number of its call; or the code between layers, by the number of layers that were
# called before, the name of a function, and how often it had called that function since the last layer.
Maker = tuple[int, str, int]
Root = tuple[Maker, int]  # a value: its maker, and the place of a tensor in the result
Call = tuple[tuple, dict]  # arguments of the model


@dataclass(frozen=True)
class Argument:
    """A part of a layer's result that is one of its arguments."""

    number: int


@dataclass(frozen=True)
class Repeated:
    """A part of a layer's result that is an earlier part."""

    place: int


@dataclass(frozen=True)
class Opaque:
    """A part of a layer's result that cannot cross: an object that may hold tensors."""

    kind: str


@dataclass(frozen=True)
class LayerResult:
    """Structure of a layer's result.

    Attributes:
        parts: an Argument, a Repeated, a Made, an Opaque or a constant each.
        structure: the pytree of the parts.
    """

    parts: tuple
    structure: TreeSpec

    def __reduce__(self):
        # A pickled TreeSpec warns when it is read; a result with its parts' numbers does not.
        return _sent, (self.parts, tree_unflatten(range(len(self.parts)), self.structure))

    @cached_property
    def is_tensor(self) -> bool:
        """Whether the result is one tensor that the layer made."""
        return self.structure.num_nodes == 1 and isinstance(self.parts[0], Made)


@dataclass(frozen=True)
class Offer:
    """A value that the code between layers has made on a stage, and that is in use at the stage's end.

    Attributes:
        stage: its number.
    """

    stage: int
    made: Made


@dataclass
class ForwardPlan:
    """What each layer gives, and the values that cross.

    Attributes:
        results: structure of the result of each call.
        names, stages: layer and stage of each call, up to the one that ended the last stage.
        whole: whether the forward ended on the last stage.
        offers: values of the code between layers that can cross.
        needed: values of other stages that each stage needs.
        written: values that the code between layers changes in place; every stage changes a copy.
        draws: whether the code between layers draws random numbers.
    """

    results: dict[int, LayerResult] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    whole: bool = False
    offers: dict[Root, Offer] = field(default_factory=dict)
    needed: list[set[Root]] = field(default_factory=list)
    written: set[Root] = field(default_factory=set)
    draws: bool = False

    def made(self, root: Root) -> Made:
        (number, *_), place = root
        return self.offers[root].made if root in self.offers else self.results[number].parts[place]

    def maker_of(self, root: Root) -> int:
        """Return the stage that makes a value."""
        return self.offers[root].stage if root in self.offers else self.stages[root[0][0]]

    def leaving(self, stage: int) -> list[Root]:
        """Return the values that a stage sends to the next one."""
        later = set().union(*self.needed[stage + 1 :])
        return sorted(root for root in later if self.maker_of(root) <= stage)

    def add(self, found: "ForwardPlan", needed: set[Root]) -> None:
        """Add what a trial of the next stage has found, and what it has needed for that."""
        self.results |= found.results
        self.offers = found.offers | self.offers
        self.written |= found.written
        self.draws |= found.draws
        self.names, self.stages, self.whole = found.names, found.stages, found.whole
        self.needed.append(needed)


def layer_root(number: int, place: int = 0) -> Root:
    """Return a tensor in the result of a layer's call, as a value."""
    return (number, "", 0), place


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, slice, range)


def result_of(parts: list, structure: TreeSpec, arguments: list) -> LayerResult:
    """Return the structure of what a layer gave.

    Args:
        arguments: the leaves of its arguments before it ran.
    """
    arguments_by_id = {id(x): number for number, x in reversed([*enumerate(arguments)]) if isinstance(x, torch.Tensor)}
    seen: dict[int, int] = {}

    def kind_of(place: int, part: Any):
        if isinstance(part, torch.Tensor):
            if id(part) in arguments_by_id:
                return Argument(arguments_by_id[id(part)])
            first = seen.setdefault(id(part), place)
            return Made.of(part) if first == place else Repeated(first)
        return part if isinstance(part, _PLAIN) else Opaque(type(part).__name__)

    return LayerResult(tuple(kind_of(*numbered) for numbered in enumerate(parts)), structure)


def _sent(parts: tuple, numbered) -> LayerResult:
    return LayerResult(parts, tree_flatten(numbered)[1])
