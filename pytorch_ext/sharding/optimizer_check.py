"""Checks before an optimizer's first step: its parameters are the model's, and it can step this rank's parts of them.

An optimizer that works on whole matrices (Muon, Adafactor, LAMB) would see this rank's part of each matrix. A state
that another rank saved has the right shapes and the wrong numbers. Neither raises by itself. Optimizers are known by
name: what another one does cannot be seen from outside.
"""

import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from weft.metadata import metadata, set_metadata
from weft.sharding import sharded_grad
from weft.sharding.owners import owners_of
from weft.sharding.ruled_tensor import RuledDTensor, RuledTensor, in_dtensor
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import GradientPlace, is_elsewhere, place_for

# torch's optimizers that update each element by itself. They step a part exactly as within the whole.
ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
# They step each parameter by itself, so a pipeline's stage may have some of the model's.
_EACH_BY_ITSELF = frozenset(("Adafactor", "Muon", "SparseAdam"))
SAVED_BY = "weft_saved_by"  # in a parameter group: the rank whose shards its state belongs to
# Optimizer to its numbers of parameters by group, to the number of watched parameters at the check, and to this rank's
# place, by group, among the ranks that share the parameters.
_checked: "weakref.WeakKeyDictionary[Optimizer, tuple[list[int], int, list[str]]]" = weakref.WeakKeyDictionary()
# Optimizer to the gradients that are plain tensors while it steps.
_stepping: "weakref.WeakKeyDictionary[Optimizer, list[tuple]]" = weakref.WeakKeyDictionary()


def is_elementwise(kind: type) -> bool:
    """Return whether this is a torch optimizer that is known to update each element by itself, or steps as one does."""
    return _steps_as(kind, ELEMENTWISE)


@functools.cache
def _steps_as(kind: type, names: frozenset[str]) -> bool:
    step = _step_of(kind)
    return step is not None and any(step is _step_of(getattr(torch.optim, name, None)) for name in names)


def _step_of(kind: object) -> Any:
    """Return a class's own step, without the wrapper that torch puts around it when the first optimizer is made."""
    step: Any = getattr(kind, "step", None)
    return step.__wrapped__ if getattr(step, "hooked", False) else step


@functools.cache
def check_every_optimizer() -> None:
    """Check every optimizer from now on, by torch's hook for all of them."""
    register_optimizer_step_pre_hook(check_optimizer)


sharded_grad.when_watched.append(check_every_optimizer)


def refuse_replaced(before: Sequence[torch.Tensor], after: torch.nn.Module, call: str) -> None:
    """Let no optimizer step parameters that a call has replaced: it would train nothing, and keep them alive.

    Args:
        before: the model's parameters before the call.
        after: what the call has made of the model.
    """
    kept = set(map(id, after.parameters()))
    replaced = [parameter for parameter in before if id(parameter) not in kept]
    for parameter in replaced:
        set_metadata(parameter, "replaced_by", call)
    if replaced:
        check_every_optimizer()
        _checked.clear()  # also those that have stepped already


def check_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer before each of its steps. Without shards the check does nothing.

    Raises:
        TypeError: the optimizer has shards, and is not known to update each element by itself. The attribute
            `elementwise = True` on the optimizer says that it does.
        ValueError: its parameters were replaced; its state belongs to another rank, or to the whole parameters.
    """
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in groups]
    known = _checked.get(optimizer)
    if known is None or known[:2] != (sizes, sharded_grad.watched):  # or parameters were split after the last check
        for group in groups:
            _check_group(optimizer, group)
        known = sizes, sharded_grad.watched, [_holder(group["params"]) for group in groups]
        _checked[optimizer] = known
    for group, holder in zip(groups, known[2], strict=True):
        if holder and group.get(SAVED_BY) != holder:
            _check_state(optimizer, group, holder)
    # Torch's optimizers need only each element, and are twice as fast on plain tensors. A user's hook may take a norm.
    hooks = {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}
    if is_elementwise(type(optimizer)) and not hooks:
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = [
            (x, gradient, gradient.as_subclass(torch.Tensor) if type(gradient) is RuledTensor else in_dtensor(gradient))
            for group in groups
            for x in group["params"]
            if type(gradient := x.grad) in (RuledTensor, RuledDTensor) and type(gradient.rule) is GradientPlace
        ]
        if found and not _marks_again(optimizer):
            return  # from its next step on
        _stepping[optimizer] = found
        for parameter, _gradient, part in found:
            parameter.grad = part


def _marks_again(optimizer: Optimizer) -> bool:
    """Let step() put back the split gradients when it ends, by an error too; return whether it did so already."""
    function = getattr(optimizer.step, "__func__", None)
    if function is None or hasattr(function, "marks_gradients_again"):
        return function is not None

    @functools.wraps(function)
    def step(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        try:
            return function(optimizer, *args, **options)
        finally:
            for parameter, gradient, part in _stepping.pop(optimizer, ()):
                if parameter.grad is part:
                    parameter.grad = gradient

    step.marks_gradients_again = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return False


def _holder(parameters: Sequence[torch.Tensor]) -> str:
    """Describe this rank's place among the ranks that share the parameters; "" if every rank has them whole."""
    for parameter in parameters:
        if groups := place_for(parameter).ranks:
            return ", ".join(f"rank {ranks.rank} of {ranks.world_size}" for ranks in groups)
    return ""


def _check_state(optimizer: Optimizer, group: dict, holder: str) -> None:
    """Check state that is new or was loaded."""
    saved_by, name = group.get(SAVED_BY), type(optimizer).__name__
    if saved_by is not None:
        raise ValueError(
            f"{name}: its state was saved by {saved_by} of those that share the parameters, and this is {holder}: let "
            "every rank save and load its own, or use weft.save_checkpoint and weft.load_checkpoint"
        )
    for parameter in group["params"]:
        shard = shard_of(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if shard is None or shard.shape == shard.global_shape:
                continue
            if isinstance(value, torch.Tensor) and value.shape == shard.global_shape:
                raise ValueError(
                    f"{name}: its state {key!r} is of the whole parameter {shard.global_shape}, and this rank has the "
                    f"part {shard.shape}: step after weft.parallelize only, or load the state with weft.load_checkpoint"
                )
    group[SAVED_BY] = holder


def _check_group(optimizer: Optimizer, group: dict) -> None:
    replaced = [call for parameter in group["params"] if (call := metadata(parameter, "replaced_by"))]
    if replaced:
        raise ValueError(
            f"{type(optimizer).__name__}: {len(replaced)} of {len(group['params'])} parameters are no longer the "
            f"model's, because the optimizer was made before {replaced[0]}, which has replaced them: make it after "
            "the call, of the parameters of what that returns"
        )
    if any(is_elsewhere(parameter.grad) for parameter in group["params"]):
        raise ValueError(
            f"{type(optimizer).__name__}: weft.DataParallel(shard_optimizer=True) has the gradients of its parameters "
            "in pieces: make the optimizer by model.optimizer(torch.optim.AdamW, lr=...)"
        )
    _check_kind(optimizer, group)


def _check_kind(optimizer: Optimizer, group: dict) -> None:
    kind = type(optimizer)
    known = getattr(optimizer, "elementwise", False) or getattr(kind, "sums_norms_of_pieces", False)
    around = any(isinstance(inner, Optimizer) for inner in vars(optimizer).values())  # inner ones are checked too
    if known or around or is_elementwise(kind):
        return
    if any(shard_of(x) is not None or (isinstance(x, DTensor) and metadata(x, "piece")) for x in group["params"]):
        problem = "update each element by itself, and this rank has parts of parameters"
    elif any(map(owners_of, group["params"])) and not _steps_as(kind, _EACH_BY_ITSELF):  # type: ignore[arg-type]
        problem = "step each parameter by itself, and this rank has some of the model's"
    else:
        return
    raise TypeError(
        f"{kind.__name__} is not known to {problem}. Use an optimizer that updates each element by itself "
        "(torch.optim.AdamW), or weft.LAMB or weft.LARS, which sum norms over the ranks; or say that it does so: "
        "optimizer.elementwise = True"
    )
