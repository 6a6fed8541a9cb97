"""Contents of a checkpoint: the model's tensors under the plain model's names, and optimizer state by parameter."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from weft.checkpoint.boxes import Extent, TensorPart, parts_of, whole_shape
from weft.checkpoint.on_all_ranks import CheckpointError
from weft.checkpoint.safetensors_io import StoredTensor, dtype_of
from weft.data_parallel.data_parallel import DataParallel
from weft.data_parallel.sharded_optimizer import piece_of
from weft.sharding.optimizer_check import SAVED_BY
from weft.sharding.quantized import is_quantized, numbers_in, stored_name
from weft.sharding.shard import shard_of

Optimizers = Optimizer | Sequence[Optimizer] | None
# A sharded optimizer may step wider copies of the parameters. Their values are stored as a state of this name.
MASTER = "weft_master"
_WRAPPERS = (DataParallel, DistributedDataParallel, nn.DataParallel)
_UNKNOWN_CUT = (
    ", which is neither its parameter's nor a scalar's: this rank has a part of the parameter, and it is unknown which "
    "part of such a state belongs to it"
)
# Parts of names that torch.compile and activation checkpointing add.
_INNER_NAMES = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class HeldTensor:
    """A tensor, with the parts of it that this rank holds.

    Attributes:
        names: all its names; tied parameters have several.
        shape: shape of the whole.
        dtype: type of the elements.
        parts: this rank's parts.
        own: ranks with the same part may have different values (a running mean). The first rank's values are stored.
    """

    names: tuple[str, ...]
    shape: Extent
    dtype: torch.dtype
    parts: tuple[TensorPart, ...]
    own: bool = False


@dataclass
class Tensors:
    """A model's tensors.

    Attributes:
        held: the tensors by their first name.
        name_of: first name by the tensor's id().
    """

    held: dict[str, HeldTensor]
    name_of: dict[int, str]


def refuse_quantized(model: nn.Module) -> None:
    """Raise TypeError if the model has quantised weights, which no file here has a form for."""
    for name, parameter in model.named_parameters():
        if is_quantized(parameter):
            raise TypeError(
                f"{name} is quantised ({type(parameter).__name__}), and has no form in these files: save its adapter "
                "(save_pretrained), or the whole quantised model before weft.parallelize"
            )


def plain(model: nn.Module) -> nn.Module:
    """Return the model without its wrappers."""
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif (inner := dict(model.named_children()).get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def of_model(model: nn.Module, stored: Mapping[str, StoredTensor] | None = None, *, counted: bool = False) -> Tensors:
    """Return the model's tensors; raise TypeError or ValueError for one that cannot be stored.

    Args:
        model: the model, or a wrapper of it.
        stored: the stored tensors, which tell how many columns have one scale in the whole of a quantised weight.
        counted: as in `parts_of`, to save them.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    reached = parameters | {id(buffer) for buffer in model.buffers()}
    names: dict[int, list[str]] = {}
    named: set[str] = set()
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in plain(model).state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} of the state_dict is {type(tensor).__name__}, not a tensor: store it in `extras`")
        if isinstance(tensor, DTensor) and piece_of(tensor) is None:
            raise TypeError(f"{name} is a DTensor: store such models with torch.distributed.checkpoint")
        if id(tensor) not in reached:
            raise TypeError(
                f"{name} of the state_dict is neither a parameter nor a buffer (get_extra_state and hooks make such), "
                "so a load would not reach the model: store it in `extras`"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: give the model memory first, model.to_empty(device=...)")
        name = _INNER_NAMES.sub("", name)
        if name in named:
            raise ValueError(f"two tensors of the model are called {name} without their wrappers: rename one")
        if name == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"safetensors files cannot have the name {name!r}: rename it")
        named.add(name)
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    held: dict[str, HeldTensor] = {}
    for key, tensor in tensors.items():
        known = tuple(names[key])
        if is_quantized(tensor):
            held |= {numbers.names[0]: numbers for numbers in _in_quantized(known, tensor, stored or {})}
        else:
            parts = tuple(parts_of(tensor, _base(tensor), piece_of(tensor), counted=counted))
            held[known[0]] = HeldTensor(known, whole_shape(tensor), tensor.dtype, parts, key not in parameters)
    return Tensors(held, {id(_base(tensor)): names[key][0] for key, tensor in tensors.items()})


def _in_quantized(
    names: tuple[str, ...], tensor: torch.Tensor, stored: Mapping[str, StoredTensor]
) -> Iterator[HeldTensor]:
    """Yield the numbers and scales in a quantised tensor, under the names that torchao gives them in files."""
    shard = shard_of(tensor)
    for key, part in numbers_in(tensor):
        known = tuple(stored_name(name, key) for name in names)
        whole = next((stored[name].shape for name in known if name in stored), tuple(part.shape))
        parts = [TensorPart((0,) * part.dim(), part)]
        if shard is not None and whole != tuple(part.shape):  # equal for scales that every rank has whole
            parts, dim, size = [], shard.dim, shard.global_shape[shard.dim]
            for place, own in shard.cut.places(shard.communicator.rank).items():
                (begin, _), (start, stop) = ([edge * whole[dim] // size for edge in edges] for edges in (place, own))
                offset = tuple(begin if other == dim else 0 for other in range(part.dim()))
                parts.append(TensorPart(offset, part.narrow(dim, start, stop - start)))
        yield HeldTensor(known, whole, part.dtype, tuple(parts))


def optimizers_in(given: Optimizers) -> list[Optimizer]:
    """Return the optimizers, each followed by its `inner` one if it has one."""
    listed: list = [given] if isinstance(given, Optimizer) else list(given or [])
    found = []
    for optimizer in listed:
        while optimizer is not None:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"an optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
            found.append(optimizer)
            optimizer = getattr(optimizer, "inner", None)
    return found


@dataclass
class State:
    """An optimizer's state in its stored form.

    Attributes:
        groups: options of each parameter group; "params" has the names of its parameters.
        values: by parameter and key, the name of a tensor, or [value] for a value that JSON can hold.
    """

    groups: list[dict]
    values: dict[str, dict[str, Any]]


def of_optimizer(number: int, optimizer: Optimizer, name_of: Mapping[int, str]) -> tuple[State, dict[str, HeldTensor]]:
    """Return an optimizer's state and its tensors by name.

    Raises:
        TypeError, ValueError: a value cannot be stored.
    """
    state, tensors = State([], {}), dict[str, HeldTensor]()
    for group in optimizer.param_groups:
        options = {key: _as_json(value, key) for key, value in group.items() if key not in ("params", SAVED_BY)}
        state.groups.append({**options, "params": [name for name, _ in _named(group["params"], name_of)]})
        for name, parameter in _named(group["params"], name_of):
            held: dict[str, Any] = dict(optimizer.state.get(parameter, {}))
            if parameter.dtype != _base(parameter).dtype:
                held[MASTER] = parameter
            for key, value in held.items():
                if isinstance(value, torch.Tensor):
                    tensor = f"optimizers/{number}/{name}/{key}"
                    tensors[tensor] = _state_tensor(tensor, value, parameter)
                    state.values.setdefault(name, {})[key] = tensor
                else:
                    state.values.setdefault(name, {})[key] = [_as_json(value, f"{name}: {key}")]
    return state, tensors


def of_training(
    model: nn.Module, optimizer: Optimizers, weights: bool = True
) -> tuple[dict[str, dict[str, HeldTensor]], list[State]]:
    """Return the tensors of the sections "model" and "training" by name, and the state of each optimizer.

    Args:
        weights: False leaves out the model's tensors.

    Raises:
        TypeError, ValueError: a value cannot be stored.
    """
    if weights:
        refuse_quantized(model)
    tensors, states, training = of_model(model, counted=True), list[State](), dict[str, HeldTensor]()
    for number, single in enumerate(optimizers_in(optimizer)):
        state, of_state = of_optimizer(number, single, tensors.name_of)
        states.append(state)
        training |= of_state
    return {"model": tensors.held if weights else {}, "training": training}, states


def _base(parameter: torch.Tensor) -> torch.Tensor:
    """Return the model's parameter of an optimizer's parameter, which may be a piece of it."""
    piece = piece_of(parameter)
    return parameter if piece is None else piece.parameter


def _trains(parameter: torch.Tensor) -> bool:
    return (parameter if isinstance(parameter, DTensor) else _base(parameter)).requires_grad


def _is_whole(parameter: torch.Tensor) -> bool:
    return parameter is _base(parameter) and whole_shape(parameter) == tuple(parameter.shape)


def _named(parameters: Iterable[torch.Tensor], name_of: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, parameter in enumerate(parameters):
        name = name_of.get(id(_base(parameter)))
        if name is None:
            raise ValueError(
                f"parameter {number} {tuple(parameter.shape)} of the optimizer is not a parameter of the model: make "
                "the optimizer after weft.parallelize and the wrapper, of the parameters of this model"
            )
        yield name, parameter


def whole(name: str, tensor: torch.Tensor) -> HeldTensor:
    """Return a tensor that this rank holds whole."""
    return HeldTensor((name,), tuple(tensor.shape), tensor.dtype, (TensorPart((0,) * tensor.dim(), tensor),))


def _state_tensor(name: str, value: torch.Tensor, parameter: torch.Tensor) -> HeldTensor:
    if value.shape == parameter.shape:
        base = _base(parameter)
        parts = parts_of(value, base, piece_of(parameter), counted=True)
        return HeldTensor((name,), whole_shape(base), value.dtype, tuple(parts))
    if value.dim() == 0 or _is_whole(parameter):
        return whole(name, value)
    raise ValueError(f"{name} has shape {tuple(value.shape)}{_UNKNOWN_CUT}")


def _as_json(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()  # a learning rate for captured graphs
    if isinstance(value, list | tuple):
        return [_as_json(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the optimizer has {name}={value!r}, which is neither a tensor nor a number, a text or a list")


def merged(states: Sequence[Sequence[State]]) -> list[dict]:
    """Merge the ranks' states into one for each optimizer.

    The options are the first rank's; the parameters are those of all ranks.

    Raises:
        CheckpointError: ranks have different numbers of optimizers or groups. Every rank raises the same error.
    """
    found = []
    for number, of_ranks in enumerate(_aligned(states, "optimizers")):
        groups = [
            {**first, "params": list(dict.fromkeys(name for group in (first, *others) for name in group["params"]))}
            for first, *others in _aligned([state.groups for state in of_ranks], f"groups in optimizer {number}")
        ]
        values: dict[str, dict] = {}
        for state in of_ranks:
            for name, by_key in state.values.items():
                values[name] = {**by_key, **values.get(name, {})}
        found.append({"groups": groups, "state": values})
    return found


def _aligned(lists: Sequence[Sequence], content: str) -> list[tuple]:
    if len({len(items) for items in lists}) > 1:
        counts = ", ".join(str(len(items)) for items in lists)
        raise CheckpointError(f"the ranks have different numbers of {content}: {counts}")
    return list(zip(*lists, strict=True))


def check_optimizers(optimizers: Sequence[Optimizer], stored: Sequence[dict], name_of: Mapping[int, str]) -> None:
    """Raise CheckpointError if the stored groups do not match those of the optimizers."""
    if optimizers and len(stored) != len(optimizers):
        raise CheckpointError(f"{len(stored)} optimizers are stored, and {len(optimizers)} are to be loaded")
    for optimizer, state in zip(optimizers, stored, strict=False):
        kind, groups = type(optimizer).__name__, optimizer.param_groups
        if len(groups) != len(state["groups"]):
            raise CheckpointError(f"{kind} has {len(groups)} parameter groups, the stored one {len(state['groups'])}")
        for number, (group, known) in enumerate(zip(groups, state["groups"], strict=True)):
            trained = {name for name, parameter in _named(group["params"], name_of) if _trains(parameter)}
            more = sorted(trained - set(known["params"]))  # a sharded optimizer has no frozen parameters
            if more:
                raise CheckpointError(f"{', '.join(more)} of group {number} of {kind} is not of the stored group")
            lacking, strange = sorted(set(optimizer.defaults) - set(known)), sorted(set(known) - set(group))
            if lacking and strange:  # another version of torch, or a schedule, gives only one of the two
                raise CheckpointError(
                    f"group {number} is stored with {', '.join(strange)} and without {', '.join(lacking)}, so it is "
                    f"not of {kind}: load with the class that was saved, or None for the optimizer"
                )


def restored(
    optimizer: Optimizer, values: Mapping[str, Mapping], entries: Mapping[str, StoredTensor], name_of: Mapping[int, str]
) -> tuple[dict[torch.Tensor, dict], list[tuple[TensorPart, StoredTensor]]]:
    """Return empty state for this rank's parameters, and the parts of it to fill with their stored tensors.

    Raises:
        CheckpointError: a state has another shape than its parameter, and this rank has only a part of the parameter.
    """
    state: dict[torch.Tensor, dict] = {}
    fills: list[tuple[TensorPart, StoredTensor]] = []
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")  # torch then keeps counts of steps there
        for name, parameter in _named(group["params"], name_of):
            base, piece = _base(parameter), piece_of(parameter)
            for key, value in values.get(name, {}).items():
                if key == MASTER:
                    if parameter.dtype != base.dtype:
                        fills += [(part, entries[value]) for part in parts_of(parameter.detach(), base, piece)]
                    continue
                if isinstance(value, list):
                    state.setdefault(parameter, {})[key] = value[0]
                    continue
                entry = entries[value]
                dtype = dtype_of(entry.code)
                if entry.shape == whole_shape(base) and not (key == "step" and not entry.shape):
                    tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    parts = parts_of(tensor, base, piece)
                elif entry.shape and not _is_whole(parameter):
                    raise CheckpointError(f"{value} has shape {entry.shape}{_UNKNOWN_CUT}")
                else:
                    device = parameter.device if entry.shape or on_device else "cpu"
                    tensor = torch.empty(entry.shape, dtype=dtype, device=device)
                    parts = [TensorPart((0,) * tensor.dim(), tensor)]
                state.setdefault(parameter, {})[key] = tensor
                fills += [(part, entry) for part in parts]
    return state, fills


def adopt(optimizer: Optimizer, state: dict[torch.Tensor, dict], groups: list[dict]) -> None:
    """Replace the optimizer's state and options by these."""
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for key, value in stored.items():
            if key == "params":
                continue
            if isinstance(now := group.get(key), torch.Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
