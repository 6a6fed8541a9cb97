"""The numbers that a module's own code counts with, of heads or features, where this rank has a part of them."""

import copy
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import FrameType

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.comm.communicator import Communicator
from weft.ops.random_numbers import own_random_numbers as random_numbers_of

PART = "_weft_part"  # of a tensor: (dimension, every rank's size, the ranks)


def with_numbers(
    module: nn.Module,
    *,
    group: Communicator,
    own_random_numbers: bool = False,
    summed: bool = False,
    results: Mapping[int, Sequence[int]] | None = None,
    **numbers: Sequence[int],
) -> nn.Module:
    """A module that shares all that it holds with this one, and has this rank's numbers.

    A parameter of its own that a split layer has as well becomes that layer's part.

    Args:
        own_random_numbers: what its own code drops at random, not through an nn.Dropout, is this rank's part.
        summed: its gradients are sums over the ranks, as with the style "sequence"; parallelize sees to it.
        results: of the tuple or list that it returns, what is this rank's part and only handed on (attention weights):
            the place to the dimension and every rank's size. Models return the whole of it (results.py).
        numbers: attribute ("num_heads", or "config.num_heads" of what it holds as `config`) to its number on each rank.

    Raises:
        ValueError: no such attribute, one that is no whole number, numbers of another count of ranks.
    """
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    for name, of_ranks in numbers.items():
        holder, attribute = holder_of(module, name)
        if type(vars(holder).get(attribute)) is not int:
            had = ", ".join(key for key, value in vars(holder).items() if type(value) is int)
            raise ValueError(f"{type(module).__name__} has no whole number called {name!r}; it has {had or 'none'}")
        if len(of_ranks) != group.world:
            raise ValueError(f"{name}={tuple(of_ranks)} must be {group.world} numbers, one for each rank")
        set_number(twin, name, of_ranks[group.rank])
    vars(twin)["_weft_numbers"] = {name: tuple(of_ranks) for name, of_ranks in numbers.items()}
    vars(twin)["_weft_summed"] = summed
    if own_random_numbers and group.world > 1:
        vars(twin)["forward"] = _Forward(twin, group)
    if results and group.world > 1:
        twin._forward_hooks = OrderedDict(module._forward_hooks)
        twin.register_forward_hook(InParts(results, group), prepend=True)
    return twin


def has_numbers(module: nn.Module | None) -> bool:
    return module is not None and "_weft_numbers" in vars(module)


def is_summed(module: nn.Module) -> bool:
    return vars(module).get("_weft_summed", False)


def holder_of(module: nn.Module, name: str) -> tuple[object, str]:
    """The module, or what it holds as `config`, and the attribute's name there."""
    first, _, attribute = name.rpartition(".")
    if not first:
        return module, name
    if first != "config" or not hasattr(vars(module).get("config"), "__dict__"):
        raise ValueError(f"{type(module).__name__} holds nothing called {first!r} that has {attribute!r}")
    return vars(module)["config"], attribute


def set_number(module: nn.Module, name: str, number: int) -> None:
    """Of the module alone: a configuration that it shares with others is copied first."""
    holder, attribute = holder_of(module, name)
    if holder is not module:
        holder = vars(module)["config"] = copy.copy(holder)
    vars(holder)[attribute] = number


class InParts:
    """A module's forward hook, which notes of its results that they are parts. Nothing is sent for what nobody asks."""

    def __init__(self, results: Mapping[int, Sequence[int]], ranks: Communicator):
        self.results, self.ranks = results, ranks

    def __call__(self, module: nn.Module, args, output) -> None:
        for place, (dim, *sizes) in self.results.items():
            part = output[place] if isinstance(output, (tuple, list)) and place < len(output) else None
            if isinstance(part, torch.Tensor) and part.dim() > dim and part.size(dim) == sizes[self.ranks.rank]:
                setattr(part, PART, (dim, sizes, self.ranks))


class _Forward:
    """A module's forward, in which its own dropout draws other numbers on every rank."""

    def __init__(self, module: nn.Module, ranks: Communicator):
        self.module, self.ranks = module, ranks

    def __call__(self, *args, **kwargs):
        forward = type(self.module).forward
        if not self.module.training:
            return forward(self.module, *args, **kwargs)
        with _OwnDrops(self.ranks):
            return forward(self.module, *args, **kwargs)


class _OwnDrops(TorchFunctionMode):
    def __init__(self, ranks: Communicator):
        super().__init__()
        self.ranks = ranks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        drops = func is F.scaled_dot_product_attention or (func is F.dropout and not _called_by_module())
        if not drops:
            return func(*args, **kwargs)
        with random_numbers_of(self.ranks, args[0].device if args else next(iter(kwargs.values())).device):
            return func(*args, **kwargs)


def _called_by_module() -> bool:
    """Whether an nn.Dropout called F.dropout: it knows by itself whether it drops a part."""
    frame: FrameType | None = sys._getframe()
    for _ in range(8):
        if frame is None or frame.f_code is nn.Dropout.forward.__code__:
            return frame is not None
        frame = frame.f_back
    return False
