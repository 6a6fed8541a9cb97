"""The first module at which two runs of a model have different bits, for `weft.verify(..., bitwise=True)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from weft.data_parallel.batch_units import one_unit_at_a_time
from weft.invariant.unit_outputs import same_bits
from weft.sharding.shard import Shard, shard_of
from weft.tools.compare.recorder import RunRecorder
from weft.tools.compare.seen import Key

T = TypeVar("T")
_DIRECTIONS = {"output": "forward of", "gradient of output": "backward to the output of"}


@contextmanager
def recording() -> Iterator[RunRecorder]:
    """Record the outputs of modules and their gradients inside the context, one unit of the batch after another."""
    recorder = RunRecorder(steps=(0,), drops=True, kinds=_DIRECTIONS)
    recorder.start()
    try:
        with one_unit_at_a_time():
            yield recorder
    finally:
        recorder.stop()


def first_difference(found: RunRecorder, expected: RunRecorder, model: nn.Module, reference: nn.Module) -> str | None:
    """Return the first tensor of the reference's step that has other bits on some rank. A collective call.

    Tensors that are not comparable are passed over: a part of the features that is not a split layer's output.
    """
    here = {seen.key: seen.tensor for seen in found.seen(model)}
    shards = {
        name.removeprefix("module."): shard_of(module.weight)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    }
    first: tuple[int, str] | None = None
    for order, seen in enumerate(expected.seen(reference)):
        own = here.get(seen.key)
        part = None if own is None else _part_of(seen.tensor, own.shape, shards.get(seen.key.module))
        if own is not None and part is not None and not same_bits(own, part):
            differ = f"{(own != part).sum().item()} of {own.numel()} elements differ"
            first = order, f"{_words(seen.key, expected.in_units)}: {differ}"
            break
    numbered = [(*of_rank, rank) for rank, of_rank in enumerate(from_all_ranks(first)) if of_rank is not None]
    if not numbered:
        return None
    _, text, rank = min(numbered, key=lambda entry: (entry[0], entry[2]))
    return f"{text} on rank {rank}"


def _words(key: Key, in_units: bool) -> str:
    positions = str(key.item).partition(".")[2]
    unit = f", unit {key.root}" if in_units else ""
    unit += f", unit {positions} of the sequence" if positions else ""
    call = f", call {key.call}" if key.call else ""
    return f"{_DIRECTIONS[key.kind]} {key.module or 'the model'}{unit}{call}"


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
