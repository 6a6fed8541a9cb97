"""Whether an automatic plan holds for what a model is called with.

A plan is found by one call. Others may compute something else: an argument of another number of dimensions, whose
dimension 1 is features and not a sequence; one that is None by default. So the first call of each kind is followed too.
"""

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from weft.comm.communicator import Communicator
from weft.splitting.automatic import AutomaticPlan, conflict_in
from weft.splitting.hugging_face import is_transformers
from weft.splitting.inputs import calling
from weft.splitting.trace import without_values


def call_check(model: nn.Module, automatic: AutomaticPlan, ranks: Communicator) -> "CallCheck | None":
    """The check of a model that is still unsplit. None where the plan splits nothing, where the model cannot be copied,
    and of transformers, whose further arguments (masks, caches, labels) are known."""
    if not automatic.plan or is_transformers(model):
        return None
    try:
        return CallCheck(without_values(model), automatic, ranks.world)
    except Exception:  # what copying a user's objects raises
        return None


class CallCheck:
    """A forward pre-hook, which raises ValueError before anything is communicated."""

    at_edge = True  # a model in stages can do without

    def __init__(self, twin: nn.Module, automatic: AutomaticPlan, world: int):
        self.model, self.automatic, self.world = twin, automatic, world
        self.known: set[tuple] = set()

    def __deepcopy__(self, memo):
        return self

    def __call__(self, module: nn.Module, args, kwargs) -> None:
        if torch.compiler.is_compiling():
            return
        kind = _kind_of(args, kwargs)
        if kind in self.known:
            return
        conflict = conflict_in(self.model, self.world, self.automatic, calling(args, kwargs))
        if conflict is not None:
            raise ValueError(
                f"{type(self.model).__name__}: its automatic plan was found by another call than this, in which "
                f"{conflict}. Find one by this call: plan=automatic_plan(model, world, example=...) of "
                "weft.splitting.automatic"
            )
        self.known.add(kind)


def _kind_of(args, kwargs) -> tuple:
    """Which arguments there are, dimensions and types of tensors, and whether these get a gradient."""
    leaves, structure = tree_flatten((args, kwargs))
    return str(structure), *map(_told, leaves)


def _told(x):
    if isinstance(x, torch.Tensor):
        return x.dim(), x.dtype, x.requires_grad
    return x if isinstance(x, bool | str | None) else type(x)
