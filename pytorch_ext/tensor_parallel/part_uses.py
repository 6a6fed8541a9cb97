"""Of a model that could not be followed as a whole: its first calls use what is split inside of the split parts alone.

Its parts were followed one by one, so nobody knows what the code around them does. It may do more than call them: take
a weight, of which this rank has a part, into a sum, or call a layer of a part by itself, which uses its weight. That
shows when it runs.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.nn.sharded import ShardHolder
from weft.running import followed, is_running
from weft.tensor_parallel.auto.trace import tensors_in
from weft.tensor_parallel.call_check import MOST_NUMBERS, kind_of_call
from weft.tensor_parallel.local_sizes import SIZES


class PartUses:
    """A model's forward pre-hook, and, as `leave`, its forward hook. A use elsewhere raises ValueError on every rank.

    Args:
        parts: names of the modules that were followed.
    """

    at_edge = True  # a model in stages looks at its graph

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
        uses.enter_context(_UseCheck(model, self.parts))

    def leave(self, model: nn.Module, args, output) -> None:
        if self.under_way:  # else another pre-hook has refused the call
            self.under_way.pop().close()


class _UseCheck(TorchFunctionMode):
    def __init__(self, model: nn.Module, parts: Sequence[str]):
        super().__init__()
        self.kind = type(model).__name__
        self.weights: dict[int, tuple[str, nn.Module]] = {}  # name, and the part that it is in
        for name in parts:
            part = model.get_submodule(name)
            for inner, layer in part.named_modules(prefix=name):
                if isinstance(layer, ShardHolder):
                    self.weights |= {id(getattr(layer, own)): (f"{inner}.{own}", part) for own in layer.shards}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            name, part = self.weights.get(id(tensor), ("", None))
            if part is not None and not is_running(part) and not _asks_for_a_property(func):
                raise ValueError(
                    f"{self.kind}: {name} is used by {getattr(func, '__name__', func)} outside of "
                    f"{type(part).__name__}, and each rank has a part of it: automatic_plan could not follow the "
                    "model, and followed that module alone. Give it what the model is called with, "
                    "plan=automatic_plan(model, world, example=...) of weft.tensor_parallel.auto; or a plan of your "
                    f"own that leaves {name} whole"
                )
        return func(*args, **kwargs)


_PROPERTIES = ("device", "dtype", "layout", "requires_grad", "is_cuda", "is_meta", "is_leaf", "is_sparse", "ndim")


def _asks_for_a_property(func) -> bool:
    """Whether it reads of a tensor what its part and the whole have alike."""
    getter = getattr(func, "__self__", None)
    return func not in SIZES and getattr(getter, "__name__", getattr(func, "__name__", "")) in (
        *_PROPERTIES,
        "is_floating_point",
        "is_complex",
        "dim",
    )
