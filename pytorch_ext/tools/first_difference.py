"""The first module at which two runs of a model have different bits, for `weft.verify(..., bitwise=True)`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from weft.context_parallel.shared_sequence import parts_here
from weft.data_parallel.batch_units import one_unit_at_a_time, running_unit
from weft.data_parallel.data_parallel import DataParallel
from weft.invariant.unit_outputs import same_bits, tensors_of
from weft.sharding.shard import Shard, shard_of

T = TypeVar("T")


class Event(NamedTuple):
    """A tensor that a module gave, or whose gradient it got.

    Attributes:
        unit: unit of the batch; None if the whole batch runs at once.
        call: number of the module's call in this unit.
        place: number of the tensor in the module's output.
        positions: unit of the sequence; None if the sequence is whole.
    """

    module: str
    direction: str  # "forward" or "backward"
    unit: int | None
    call: int
    place: int
    positions: int | None

    def __str__(self) -> str:
        unit = "" if self.unit is None else f", unit {self.unit}"
        unit += "" if self.positions is None else f", unit {self.positions} of the sequence"
        call = "" if self.call == 0 else f", call {self.call}"
        part = "forward of" if self.direction == "forward" else "backward to the output of"
        return f"{part} {self.module or 'the model'}{unit}{call}"


class StepRecording:
    """Outputs of a model's modules and their gradients, in the order in which they come.

    Attributes:
        shards: place of a module's weight in the whole model's, where it is split.
    """

    def __init__(self) -> None:
        self.values: dict[Event, torch.Tensor] = {}
        self.shards: dict[str, Shard] = {}
        self._calls: Counter = Counter()

    def note(self, name: str, output) -> None:
        """Note an output of a module, and its gradient as soon as backward has it."""
        unit = running_unit()
        call = self._calls[name, unit]
        self._calls[name, unit] += 1
        for place, whole in enumerate(tensors_of(output)):
            for positions, x in parts_here(whole):
                self.values[Event(name, "forward", unit, call, place, positions)] = x.detach().clone()
                if x.requires_grad:
                    event = Event(name, "backward", unit, call, place, positions)
                    x.register_hook(lambda dx, event=event: self._note_gradient(event, dx))

    def _note_gradient(self, event: Event, dx: torch.Tensor) -> None:
        self.values[event] = dx.detach().clone()


@contextmanager
def recording(model: nn.Module) -> Iterator[StepRecording]:
    """Record a model's modules inside the context. Of a model in units, only what its units compute counts."""
    found, hooks = StepRecording(), []
    inner = model.module if isinstance(model, DataParallel) else model
    for name, module in inner.named_modules():
        shard = shard_of(module.weight) if isinstance(getattr(module, "weight", None), nn.Parameter) else None
        if shard is not None:
            found.shards[name] = shard
        hooks.append(module.register_forward_hook(lambda _, args, output, name=name: found.note(name, output)))
    try:
        with one_unit_at_a_time():
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(found: StepRecording, expected: StepRecording) -> str | None:
    """Return the first tensor of the reference's step that has other bits on some rank. A collective call.

    Tensors that are not comparable are passed over: a part of the features that is not a split layer's output.
    """
    first: tuple[int, str] | None = None
    for order, (event, whole) in enumerate(expected.values.items()):
        own = found.values.get(event)
        part = None if own is None else _part_of(whole, own.shape, found.shards.get(event.module))
        if own is not None and part is not None and not same_bits(own, part):
            elements = (own != part).sum().item()
            first = order, f"{event}: {elements} of {own.numel()} elements differ"
            break
    numbered = [(*of_rank, rank) for rank, of_rank in enumerate(from_all_ranks(first)) if of_rank is not None]
    if not numbered:
        return None
    _, text, rank = min(numbered, key=lambda entry: (entry[0], entry[2]))
    return f"{text} on rank {rank}"


def from_all_ranks(value: T) -> list[T]:
    """Return the value of every rank of the default group, in rank order. A collective call."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _part_of(whole: torch.Tensor, shape: torch.Size, shard: Shard | None) -> torch.Tensor | None:
    """Return the part of a module's output that a rank with this shape has, or None."""
    if whole.shape == shape:
        return whole
    if shard is None or shard.dim != 0 or whole.dim() == 0 or whole.size(-1) != shard.global_shape[0]:
        return None
    part = whole[..., [i for start, stop in shard.stretches for i in range(start, stop)]]
    return part if part.shape == shape else None
