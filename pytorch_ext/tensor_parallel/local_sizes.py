"""Numbers of heads or features in a module's own code, set to this rank's part."""

import contextlib
import copy
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata
from weft.nn import ShardedDropout
from weft.nn.dropout import attend_in_units, drop_in_units
from weft.ops.invariant import Units
from weft.rng import device_of, drops
from weft.rng import own_random_numbers as random_numbers_of
from weft.running import followed, running

_WIDTH = re.compile(r"(\w+)\.shape\[-1\]")
SIZES = (torch.Tensor.size, torch.Tensor.shape.__get__)  # type: ignore[attr-defined]


def with_numbers(
    module: nn.Module,
    *,
    group: Communicator,
    own_random_numbers: bool = False,
    invariant: int | None = None,
    drops: tuple[int, int] | None = None,
    summed: bool = False,
    results: Mapping[int, Sequence[int]] | None = None,
    **numbers: Sequence[int],
) -> nn.Module:
    """Return a copy of the module with this rank's numbers. It shares everything else with the module.

    If a split layer also has one of the module's own parameters, that parameter becomes the layer's part.

    Args:
        own_random_numbers: the module's own code drops parts at random, not through an nn.Dropout, so each rank draws
            different random numbers there.
        invariant: each of so many units of the heads draws its own, on any number of ranks.
        drops: with `invariant`, where the split heads are in what is dropped; see `drop_in_units`.
        summed: sum the gradients of the module's parameters over the ranks, as with the style "sequence";
            parallelize does that.
        results: outputs that are this rank's part and that no other module computes with (attention weights): index
            in the returned tuple or list, to the dimension and every rank's size. Models return them whole
            (gather_outputs.py).
        numbers: attribute to its number on each rank. The attribute is "num_heads", or "config.num_heads" for an
            attribute of the module's `config`. "x.shape[-1]" is the width that the module's own code reads from its
            argument x; modules that it calls read the true width.

    Raises:
        ValueError: the attribute or argument does not exist or is no whole number, or there is not one number per rank.
    """
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    own: Any = vars(module).get("forward")
    if getattr(own, "__self__", None) is module:
        vars(twin)["forward"] = MethodType(own.__func__, twin)
    elif own is not None and not isinstance(own, Forward):
        raise ValueError(
            f"{type(module).__name__} has a forward of its own, which may know the module with the numbers of the "
            "whole: set it as types.MethodType(function, module), or after weft.parallelize"
        )
    for name, of_ranks in numbers.items():
        argument = argument_of(name)
        holder, attribute = (module, name) if argument else holder_of(module, name)
        if argument and argument not in arguments_of(module):
            raise ValueError(
                f"{type(module).__name__} is not called with {argument!r}, but with {arguments_of(module)}"
            )
        if not argument and type(vars(holder).get(attribute)) is not int:
            had = ", ".join(key for key, value in vars(holder).items() if type(value) is int)
            raise ValueError(f"{type(module).__name__} has no whole number called {name!r}; it has {had or 'none'}")
        if len(of_ranks) != group.world_size:
            raise ValueError(f"{name}={tuple(of_ranks)} must be {group.world_size} numbers, one for each rank")
        set_number(twin, name, of_ranks[group.rank])
    set_metadata(twin, "numbers", {name: tuple(of_ranks) for name, of_ranks in numbers.items()})
    set_metadata(twin, "summed", summed)
    if own_random_numbers and (invariant is not None or group.world_size > 1):
        Forward.of(twin).drops = _OwnDrops(group, None if invariant is None else Units(invariant), drops)
    if results and group.world_size > 1:
        twin._forward_hooks = OrderedDict(module._forward_hooks)
        twin.register_forward_hook(InParts(results, group), prepend=True)
    return twin


def has_numbers(module: nn.Module | None) -> bool:
    return module is not None and metadata(module, "numbers") is not None


def draws_for_parts(module: nn.Module) -> bool:
    """Return whether a module draws random numbers of their own for parts."""
    own = vars(module).get("forward")
    return isinstance(module, ShardedDropout) or (isinstance(own, Forward) and own.drops is not None)


def is_summed(module: nn.Module) -> bool:
    return bool(metadata(module, "summed"))


def width_of(argument: str) -> str:
    """Return the name under which `with_numbers` takes the width of an argument."""
    return f"{argument}.shape[-1]"


def argument_of(name: str) -> str | None:
    """Return the argument behind a width's name; None if the name is an attribute."""
    found = _WIDTH.fullmatch(name)
    return found and found[1]


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward, in their order."""
    return [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def holder_of(module: nn.Module, name: str) -> tuple[object, str]:
    """Return the object that has the attribute, the module or its `config`, and the attribute's name there."""
    first, _, attribute = name.rpartition(".")
    if not first:
        return module, name
    if first != "config" or not hasattr(vars(module).get("config"), "__dict__"):
        raise ValueError(f"{type(module).__name__} holds nothing called {first!r} that has {attribute!r}")
    return vars(module)["config"], attribute


def set_number(module: nn.Module, name: str, number: int) -> None:
    """Set a number of this module only. A configuration that it shares with other modules is copied first."""
    argument = argument_of(name)
    if argument:
        Forward.of(module).widths[argument] = number
        return
    holder, attribute = holder_of(module, name)
    if holder is not module:
        holder = vars(module)["config"] = copy.copy(holder)
    vars(holder)[attribute] = number


class InParts:
    """Forward hook of a module that marks its outputs as parts. They are gathered only if a model returns them."""

    def __init__(self, results: Mapping[int, Sequence[int]], ranks: Communicator):
        self.results, self.ranks = results, ranks

    def __call__(self, module: nn.Module, args, output) -> None:
        for place, (dim, *sizes) in self.results.items():
            part = output[place] if isinstance(output, (tuple, list)) and place < len(output) else None
            if isinstance(part, torch.Tensor) and part.dim() > dim and part.size(dim) == sizes[self.ranks.rank]:
                set_metadata(part, "part", (dim, sizes, self.ranks))


class Forward:
    """Forward of a module in which the module's own code sees this rank's numbers.

    Attributes:
        own: the forward that the module had of its own; None if it has that of its class.
        drops: mode in which the module's own dropout draws different random numbers for each part.
        widths: argument to the last size that the module's own code reads from it.
        around: returns a context for the whole call, of the modules inside too.
    """

    def __init__(self, module: nn.Module):
        own: Any = vars(module).get("forward")
        own = own.own if isinstance(own, Forward) else own
        if getattr(own, "__self__", module) is not module:  # of what the module is a copy of
            own = MethodType(own.__func__, module)
        self.own: Callable | None = own
        self.module, self.arguments = module, arguments_of(module)
        self.__signature__ = inspect.signature(module.forward)
        self.around: Callable[[], AbstractContextManager] = nullcontext
        self.drops: _OwnDrops | None = None
        self.widths: dict[str, int] = {}

    @classmethod
    def of(cls, module: nn.Module) -> "Forward":
        """Return the module's Forward. Install one if it has none."""
        own = vars(module).get("forward")
        if not isinstance(own, Forward) or own.module is not module:
            own = vars(module)["forward"] = cls(module)
        return own

    def __call__(self, *args, **kwargs):
        with contextlib.ExitStack() as stack:
            stack.enter_context(followed(self.module))
            stack.enter_context(self.around())
            if self.drops is not None and self.module.training:
                stack.enter_context(self.drops)
            if self.widths:
                given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
                widths = [(given[name], width) for name, width in self.widths.items() if name in given]
                stack.enter_context(_OwnWidths(self.module, widths))
            if self.own is not None:
                return self.own(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)


class _OwnWidths(TorchFunctionMode):
    """Mode in which a module's own code reads given last sizes of tensors. Modules that it calls read true sizes."""

    def __init__(self, module: nn.Module, widths: Sequence[tuple[torch.Tensor, int]]):
        super().__init__()
        self.module, self.widths = module, widths

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in SIZES or not args:
            return result
        width = next((width for tensor, width in self.widths if tensor is args[0]), None)
        if width is None or running() is not self.module:
            return result
        if isinstance(result, tuple):
            return torch.Size((*result[:-1], width))
        dim = args[1] if len(args) > 1 else (kwargs or {})["dim"]
        return width if dim in (-1, args[0].dim() - 1) else result


class _OwnDrops(TorchFunctionMode):
    """Mode in which a module's own dropouts and attentions draw different random numbers for each part."""

    def __init__(self, ranks: Communicator, units: Units | None, drops: tuple[int, int] | None):
        super().__init__()
        self.ranks, self.units, self.drops = ranks, units, drops

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        attends = func is F.scaled_dot_product_attention
        own = attends or (func is F.dropout and not _drops_a_part(running()))
        if not own or not drops(func, args, kwargs):
            return func(*args, **kwargs)
        if self.units is not None:
            if attends:
                return attend_in_units(self.ranks, self.units, self.drops, *args, **kwargs)
            return drop_in_units(self.ranks, self.units, self.drops, *args, **kwargs)
        with random_numbers_of(self.ranks, device_of(args, kwargs)):
            return func(*args, **kwargs)


def _drops_a_part(module: nn.Module | None) -> bool:
    """Return whether the module is an nn.Dropout, which decides by itself whether it drops a part."""
    return isinstance(module, ShardedDropout) or getattr(type(module), "forward", None) is nn.Dropout.forward
