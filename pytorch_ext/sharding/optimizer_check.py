"""Checks before an optimizer's first step on shards: it updates element by element, and its state is this rank's.

An optimizer that works on whole matrices (Muon, Adafactor, LAMB) would see this rank's part of each matrix. A state
that another rank saved has the right shapes and the wrong numbers. Neither raises by itself.
"""

import copy
import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from weft.sharding import sharded_grad
from weft.sharding.owners import owners_of
from weft.sharding.ruled_tensor import RuledTensor
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import GradientPlace, is_elsewhere, place_for

# torch's optimizers that update each element by itself. They step a part exactly as within the whole.
ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
}
SAVED_BY = "weft_saved_by"  # in a parameter group: the rank whose shards its state belongs to
_STEPS = 3
# Optimizer to its numbers of parameters by group, to the number of watched parameters at the check, and to this rank's
# place, by group, among the ranks that share the parameters.
_checked: "weakref.WeakKeyDictionary[Optimizer, tuple[list[int], int, list[str]]]" = weakref.WeakKeyDictionary()
# Optimizer to the gradients that are plain tensors while it steps.
_stepping: "weakref.WeakKeyDictionary[Optimizer, list[tuple]]" = weakref.WeakKeyDictionary()
_probing = False


def is_elementwise(kind: type) -> bool:
    """Return whether this is a torch optimizer that is known to update each element by itself."""
    return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE


_hooks: list = []


def check_every_optimizer() -> None:
    """Check every optimizer from now on, by torch's hook for all of them."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(check_optimizer))


sharded_grad.when_watched.append(check_every_optimizer)


def check_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer before each of its steps. Without shards the check does nothing.

    Raises:
        TypeError: the optimizer has shards, and its update of a matrix differs from that of the two halves. The
            attribute `elementwise = True` on the optimizer skips this check.
        ValueError: its state belongs to another rank, or to the whole parameters.
    """
    if _probing:
        return
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
            (x, gradient, gradient.as_subclass(torch.Tensor))
            for group in groups
            for x in group["params"]
            if type(gradient := x.grad) is RuledTensor and type(gradient.rule) is GradientPlace
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
    places = {
        (len(shard.global_shape), shard.dim) if shard is not None else None
        for parameter in group["params"]
        if (shard := shard_of(parameter)) is not None or owners_of(parameter) is not None
    }
    for place in sorted(places, key=str):
        if problem := _difference(optimizer, group, place):
            raise TypeError(
                f"{kind.__name__}: {problem}, and a rank has a part of the model. Use an optimizer that updates each "
                "element by itself (torch.optim.AdamW), or weft.LAMB or weft.LARS, which sum norms over the ranks; or "
                "say that it does so: optimizer.elementwise = True"
            )


def _difference(optimizer: Optimizer, group: dict, place: tuple[int, int] | None) -> str:
    """Describe how steps on parts of a small tensor differ from steps on the whole; "" if they are equal.

    Args:
        place: (number of dimensions of the tensor, dimension to cut). None steps two tensors together and alone.
    """
    global _probing
    generator = torch.Generator().manual_seed(0)
    device = group["params"][0].device
    shape = (4, 6, 2, 2)[: place[0]] if place is not None else (4, 6)
    tensors = [torch.randn(2, *shape, generator=generator) for _ in range(1 + _STEPS)]  # start values, then gradients
    parts = [x.unbind() if place is None else x[0].chunk(2, place[1]) for x in tensors]
    _probing = True
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            apart = [_stepped(optimizer, group, [[x] for x in part], device)[0] for part in zip(*parts, strict=True)]
            together = [list(x) for x in parts] if place is None else [[x[0]] for x in tensors]
            whole = _stepped(optimizer, group, together, device)
    except Exception as error:  # an optimizer may require anything of its parameters
        return f"whether it updates each element by itself cannot be tried ({type(error).__name__}: {error})"
    finally:
        _probing = False
    expected = torch.stack(whole) if place is None else whole[0]
    found = torch.stack(apart) if place is None else torch.cat(apart, place[1])
    moved = (expected - torch.stack(together[0]).reshape(expected.shape)).abs().max()
    if not moved:
        return "whether it updates each element by itself cannot be tried (it leaves parameters as they are)"
    if (found - expected).abs().max() <= 1e-4 * moved:
        return ""
    if place is None:
        return "it steps two parameters otherwise than each alone"
    return f"it steps a {'x'.join(map(str, shape))} tensor otherwise than its halves along dimension {place[1]}"


def _stepped(optimizer: Optimizer, group: dict, values: list[list[torch.Tensor]], device) -> list[torch.Tensor]:
    """Step a copy of the optimizer and return the parameters.

    Args:
        values: for each parameter its start value, then the gradients of each step.
    """
    twin = copy.copy(optimizer)
    hooks = {name: value for name, value in vars(twin).items() if name.startswith("_optimizer_")}
    own = {name: copy.copy(x) if isinstance(x, dict | list | set) else x for name, x in vars(optimizer).items()}
    own.pop("step", None)  # bound to the optimizer itself, as a learning rate schedule leaves it
    vars(twin).update(own | hooks)
    starts, *steps = values
    parameters = [torch.nn.Parameter(start.clone().to(device)) for start in starts]
    options = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
    if isinstance(rate := options.get("lr"), float | torch.Tensor):
        options["lr"] = torch.full_like(rate, 0.1) if isinstance(rate, torch.Tensor) else 0.1  # 0 before a warm-up
    twin.param_groups = [{**options, "params": parameters}]
    twin.state = defaultdict(dict)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone().to(device)
        twin.step()
    return [parameter.detach().cpu() for parameter in parameters]
