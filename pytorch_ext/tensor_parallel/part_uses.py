"""Checks that a model uses its split weights only inside the parts that were followed.

This is for a model that could not be followed as a whole. Its parts were followed one by one, and the code around them
is unknown. That code may do more than call the parts: it may add up a weight that is split over ranks, or call a layer
of a part by itself. The check finds this when the model runs.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from weft.forward import FunctionMode
from weft.forward.running import followed, is_running
from weft.nn.sharded import ShardHolder
from weft.tensor_parallel.auto.trace import tensors_in
from weft.tensor_parallel.call_check import MOST_NUMBERS, kind_of_call
from weft.tensor_parallel.local_sizes import SIZES


class PartUses:
    """Check of a model's first calls. A use of a split weight outside of its part raises ValueError on every rank.

    The object is the model's forward pre-hook, and its `leave` is a forward hook.

    Args:
        parts: names of the modules that were followed.
    """

    def __init__(self, parts: Sequence[str]):
        self.parts = parts
        self.known: set[tuple] = set()
        self.under_way: list[ExitStack] = []

    def __deepcopy__(self, memo):
        return PartUses(self.parts)

    def install(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self, with_kwargs=True)
        model.register_forward_hook(self.leave, always_call=True)

    def __call__(self, model: nn.Module, args, kwargs) -> None:
        uses = ExitStack()
        self.under_way.append(uses)
        kind = (model.training, *kind_of_call(args, kwargs))
        if torch.compiler.is_compiling() or kind in self.known or len(self.known) > MOST_NUMBERS:
            return
        self.known.add(kind)
        uses.enter_context(followed(model))
        uses.enter_context(FunctionMode(every=_UseCheck(model, self.parts)))

    def leave(self, model: nn.Module, args, output) -> None:
        if self.under_way:  # empty if another pre-hook has refused the call
            self.under_way.pop().close()


class _UseCheck:
    """Handler of all functions."""

    def __init__(self, model: nn.Module, parts: Sequence[str]):
        self.kind = type(model).__name__
        self.weights: dict[int, tuple[str, nn.Module]] = {}  # tensor id to (name, the part that has it)
        for name in parts:
            part = model.get_submodule(name)
            for inner, layer in part.named_modules(prefix=name):
                if isinstance(layer, ShardHolder):
                    self.weights |= {id(getattr(layer, own)): (f"{inner}.{own}", part) for own in layer.shards}

    def __call__(self, func, args: tuple, kwargs: dict):
        for tensor in tensors_in((args, kwargs)):
            name, part = self.weights.get(id(tensor), ("", None))
            if part is not None and not is_running(part) and not _asks_for_a_property(func):
                raise ValueError(
                    f"{self.kind}: {name} is used by {getattr(func, '__name__', func)} outside of "
                    f"{type(part).__name__}, and each rank has a part of it: automatic_plan could not follow the "
                    "model, and followed that module alone. Give it an example of the model's inputs, "
                    "plan=automatic_plan(model, world, example=...) of weft.tensor_parallel.auto; or a plan of your "
                    f"own that leaves {name} whole"
                )
        return func(*args, **kwargs)


_PROPERTIES = ("device", "dtype", "layout", "requires_grad", "is_cuda", "is_meta", "is_leaf", "is_sparse", "ndim")


def _asks_for_a_property(func) -> bool:
    """Return whether the function reads a property that is equal for a part and the whole tensor."""
    getter = getattr(func, "__self__", None)
    return func not in SIZES and getattr(getter, "__name__", getattr(func, "__name__", "")) in (
        *_PROPERTIES,
        "is_floating_point",
        "is_complex",
        "dim",
    )
