"""The numbers that a module's own code counts with, of heads or features, where this rank has a part of them."""

import copy
import sys
from collections.abc import Sequence
from types import FrameType

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.comm.communicator import Communicator
from weft.ops.random_numbers import own_random_numbers as random_numbers_of


def with_numbers(
    module: nn.Module, *, group: Communicator, own_random_numbers: bool = False, **numbers: Sequence[int]
) -> nn.Module:
    """A module that shares all that it holds with this one, and has this rank's numbers.

    A parameter of its own that a split layer has as well becomes that layer's part.

    Args:
        own_random_numbers: what its own code drops at random, not through an nn.Dropout, is this rank's part.
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
    if own_random_numbers and group.world > 1:
        vars(twin)["forward"] = _Forward(twin, group)
    return twin


def has_numbers(module: nn.Module | None) -> bool:
    return module is not None and "_weft_numbers" in vars(module)


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
