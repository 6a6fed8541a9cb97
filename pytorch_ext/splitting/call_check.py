"""Whether a plan holds for what a model is called with.

A plan is found, or checked, by one call. Others may compute something else: an argument of another number of
dimensions, whose dimension 1 is features and not a sequence; one that is None by default. So the first call of each
kind is followed too.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from weft.comm.communicator import Communicator
from weft.splitting.automatic import AutomaticPlan, conflict_in
from weft.splitting.hugging_face import is_transformers
from weft.splitting.inputs import calling
from weft.splitting.meeting import OwnPlan
from weft.splitting.trace import without_values

Conflict = Callable[[nn.Module, Callable, bool], str | None]  # of the unsplit model, a call, and whether it trains


def call_check(model: nn.Module, plan: AutomaticPlan | OwnPlan | None, ranks: Communicator | None):
    """The CallCheck of a model that is still unsplit. None where the plan splits nothing, where the model cannot be
    copied, and of transformers, whose further arguments (masks, caches, labels) are known."""
    if plan is None or ranks is None or is_transformers(model):
        return None
    if isinstance(plan, AutomaticPlan) and not plan.plan:
        return None
    try:
        twin = without_values(model)
    except Exception:  # what copying a user's objects raises
        return None
    if isinstance(plan, AutomaticPlan):
        return CallCheck(twin, partial(_automatic_conflict, plan, ranks.world), by_mode=False)
    return CallCheck(twin, lambda twin, call, training: plan.misuse(twin, [call], training), by_mode=True)


def _automatic_conflict(automatic: AutomaticPlan, world: int, twin: nn.Module, call: Callable, _) -> str | None:
    """Training and evaluation are both followed."""
    conflict = conflict_in(twin, world, automatic, call)
    return conflict and (
        f"{type(twin).__name__}: its automatic plan was found by another call than this, in which {conflict}. Find one "
        "by this call: plan=automatic_plan(model, world, example=...) of weft.splitting.automatic"
    )


class CallCheck:
    """A forward pre-hook, which raises ValueError before anything is communicated."""

    at_edge = True  # a model in stages can do without

    def __init__(self, twin: nn.Module, conflict: Conflict, by_mode: bool):
        self.model, self.conflict, self.by_mode = twin, conflict, by_mode
        self.known: set[tuple] = set()

    def __deepcopy__(self, memo):
        return self

    def __call__(self, module: nn.Module, args, kwargs) -> None:
        if torch.compiler.is_compiling():
            return
        kind = (self.by_mode and module.training, *_kind_of(args, kwargs))
        if kind in self.known:
            return
        conflict = self.conflict(self.model, calling(args, kwargs), module.training)
        if conflict is not None:
            raise ValueError(conflict)
        self.known.add(kind)


def _kind_of(args, kwargs) -> tuple:
    """Which arguments there are, dimensions and types of tensors, and whether these get a gradient."""
    leaves, structure = tree_flatten((args, kwargs))
    return str(structure), *map(_told, leaves)


def _told(x):
    if isinstance(x, torch.Tensor):
        return x.dim(), x.dtype, x.requires_grad
    return x if isinstance(x, bool | str | None) else type(x)
