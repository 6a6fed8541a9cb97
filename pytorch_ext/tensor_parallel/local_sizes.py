"""Numbers of heads or features in a module's own code, set to this rank's part."""

import contextlib
import copy
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.comm.communicator import Communicator
from weft.forward import ForwardChain, FunctionMode, step_of
from weft.forward.running import followed, running
from weft.metadata import metadata, set_metadata
from weft.nn import ShardedDropout
from weft.nn.dropout import PartDrops
from weft.rng import drops

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
        results: outputs to gather before the model returns them (attention weights; gather_outputs.py): index in the
            returned tuple or list to (dimension, every rank's size).
        numbers: attribute to its number on each rank. The attribute is "num_heads", or "config.num_heads" for an
            attribute of the module's `config`. "x.shape[-1]" is the width that the module's own code reads from its
            argument x; modules that it calls read the true width.

    Raises:
        ValueError: the attribute or argument does not exist or is no whole number, or there is not one number per rank.
    """
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    own: Any = vars(module).get("forward")
    if isinstance(own, ForwardChain) or getattr(own, "__self__", None) is module:
        ForwardChain.of(twin, copied_from=module)
    elif own is not None:
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
        OwnNumbers.of(twin).drops = PartDrops(group, invariant, drops)
    if results and group.world_size > 1:
        twin._forward_hooks = OrderedDict(module._forward_hooks)
        twin.register_forward_hook(InParts(results, group), prepend=True)
    return twin


def has_numbers(module: nn.Module | None) -> bool:
    return module is not None and metadata(module, "numbers") is not None


def draws_for_parts(module: nn.Module) -> bool:
    """Return whether a module draws random numbers of their own for parts."""
    step = step_of(module, "numbers")
    return isinstance(module, ShardedDropout) or (isinstance(step, OwnNumbers) and step.drops is not None)


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
        step = OwnNumbers.of(module)
        step.widths = {**step.widths, argument: number}  # a copy of the module has the same dict
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


class OwnNumbers:
    """Step of a forward in which the module's own code sees this rank's numbers.

    Attributes:
        arguments: names of the arguments of the module's forward, in their order.
        drops: the module's own dropout draws different random numbers for each part, as these say.
        widths: argument to the last size that the module's own code reads from it.
    """

    def __init__(self, module: nn.Module):
        self.arguments = arguments_of(module)
        self.drops: PartDrops | None = None
        self.widths: dict[str, int] = {}

    @classmethod
    def of(cls, module: nn.Module) -> "OwnNumbers":
        """Return the module's step; add it if there is none."""
        chain = ForwardChain.of(module)
        if "numbers" not in chain.steps:
            chain.add("numbers", cls(module))
        return chain.steps["numbers"]  # type: ignore[return-value]

    def __call__(self, forward: Callable, module: nn.Module, *args, **kwargs):
        drops = self.drops if module.training else None
        if drops is None and not self.widths:
            return forward(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(followed(module))
            if drops is not None:
                own = partial(_drop_own, drops)
                stack.enter_context(FunctionMode(dict.fromkeys((F.dropout, F.scaled_dot_product_attention), own)))
            if self.widths:
                given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
                widths = [(given[name], width) for name, width in self.widths.items() if name in given]
                stack.enter_context(FunctionMode(dict.fromkeys(SIZES, partial(_own_width, module, widths))))
            return forward(*args, **kwargs)


def _own_width(module: nn.Module, widths: Sequence[tuple[torch.Tensor, int]], func: Callable, args, kwargs):
    """Read a size of a tensor: the module's own code gets a given last size, modules that it calls the true one."""
    result = func(*args, **kwargs)
    width = next((width for tensor, width in widths if args and tensor is args[0]), None)
    if width is None or running() is not module:
        return result
    if isinstance(result, tuple):
        return torch.Size((*result[:-1], width))
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    return width if dim in (-1, args[0].dim() - 1) else result


def _drop_own(part_drops: PartDrops, func: Callable, args: tuple, kwargs: dict):
    """Call a function of a module's own code; if it drops elements, each part draws random numbers of its own."""
    own = drops(func, args, kwargs) and not (func is F.dropout and _drops_a_part(running()))
    return part_drops(func, args, kwargs) if own else func(*args, **kwargs)


def _drops_a_part(module: nn.Module | None) -> bool:
    """Return whether the module is an nn.Dropout, which decides by itself whether it drops a part."""
    return isinstance(module, ShardedDropout) or getattr(type(module), "forward", None) is nn.Dropout.forward
