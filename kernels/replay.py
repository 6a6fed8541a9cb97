"""Replay of an op's launches, for calls whose arguments differ from those of an earlier call only in their memory.

An op checks its arguments, chooses a tile configuration and computes what a launch takes: most of the host's time of a
small call. All of it follows from the arguments' kinds: shapes, strides, types, devices, 16-byte alignment, which
tensors are the same memory, and every other value. So the second call of a kind keeps its launches, with places for
memory, and later calls only allocate, fill in the places and launch.

Tests: tests/kernels/test_replay.py.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from weft.kernels import dispatch, launch
from weft.kernels.language import TensorDescriptor
from weft.kernels.signature import Launch, is_memory, memory_of

P = ParamSpec("P")
R = TypeVar("R")
_MOST = 4096  # kinds of calls of an op to keep


class _ArgumentMemory(NamedTuple):
    """An argument that is memory: its place, the number of its tensor, and the other fields of a descriptor."""

    argument: int
    tensor: int
    descriptor: dict[str, Any] | None


class _Result(NamedTuple):
    tensor: int
    shape: torch.Size | None  # None for the tensor itself, else of a view
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Replay:
    """The launches of a kind of call.

    Attributes:
        new: shape, strides, type and device of each tensor that the op allocates.
        launches: each as it was recorded, with the places of its memory.
        results: the returned tensors, None for a None. `single` if the op returns one tensor and no tuple.
    """

    new: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]]
    launches: list[tuple[Launch, list[_ArgumentMemory]]]
    results: list[_Result | None]
    single: bool

    def run(self, tensors: list[torch.Tensor]) -> Any:
        for shape, strides, dtype, device in self.new:  # torch.empty takes twice as long
            tensors.append(launch.allocated(torch.empty_strided(shape, strides, dtype=dtype, device=device)))
        for recorded, places in self.launches:
            arguments = list(recorded.arguments)
            for place, number, descriptor in places:
                tensor = tensors[number]
                arguments[place] = tensor if descriptor is None else _described(tensor, descriptor)
            launch.run(recorded, tuple(arguments))
        results = [
            None
            if result is None
            else tensors[result.tensor]
            if result.shape is None
            else tensors[result.tensor].as_strided(result.shape, result.stride)
            for result in self.results
        ]
        return results[0] if self.single else tuple(results)


def replayed(op: Callable[P, R]) -> Callable[P, R]:
    """Decorate an op so that it replays its launches.

    The op may read no element of its arguments. It allocates by `launch.empty`, and returns tensors that it was given
    or allocated, or views of them from their first element on. Calls of other ops run as they are.
    """
    known: OrderedDict[bytes, _Replay | bool] = OrderedDict()  # True after one call of the kind; False cannot be kept

    @functools.wraps(op)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if launch.is_recording():
            return op(*args, **options)
        tensors: list[torch.Tensor] = []
        kind = dispatch.kind(args, options, tensors)
        if kind is None:
            return op(*args, **options)
        kept = known.get(kind)
        if isinstance(kept, _Replay):
            return kept.run(tensors)
        if kept is None:
            known[kind] = True
            if len(known) > _MOST:
                known.popitem(last=False)
        elif kept:
            with launch.observing() as observed:
                result = op(*args, **options)
            known[kind] = _replay_of(observed, tensors, result) or False
            return result
        return op(*args, **options)

    call.kinds = known  # type: ignore[attr-defined]
    return call


def _replay_of(observed: launch.Observed, given: Sequence[torch.Tensor], result: Any) -> _Replay | None:
    """Return the replay of the call, or None if one cannot be made of it."""
    tensors = [*given, *observed.allocated]
    if any(tensor.numel() == 0 for tensor in tensors):
        return None  # no address
    numbers: dict[tuple[int, torch.dtype], int] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault((tensor.data_ptr(), tensor.dtype), number)
    launches = []
    for recorded in observed.launches:
        places = []
        kept = list(recorded.arguments)
        for place, argument in enumerate(recorded.arguments):
            if not is_memory(argument):
                continue
            memory, fields = memory_of(argument), None
            if memory is not argument:
                fields = {name: value for name, value in vars(argument).items() if name != "base"}
            of_memory = numbers.get((memory.data_ptr(), memory.dtype))
            if of_memory is None:
                return None
            places.append(_ArgumentMemory(place, of_memory, fields))
            kept[place] = None
        launches.append((replace(recorded, arguments=tuple(kept)), places))
    single = not isinstance(result, tuple)
    results: list[_Result | None] = []
    for tensor in (result,) if single else result:
        if tensor is None:
            results.append(None)
            continue
        of_result = numbers.get((tensor.data_ptr(), tensor.dtype))
        if of_result is None:
            return None
        whole = tensors[of_result]
        same = whole.shape == tensor.shape and whole.stride() == tensor.stride()
        results.append(_Result(of_result, None if same else tensor.shape, tensor.stride()))
    new = [(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device) for tensor in observed.allocated]
    return _Replay(new, launches, results, single)


def _described(tensor: torch.Tensor, fields: dict[str, Any]) -> TensorDescriptor:
    """Return a descriptor without the checks of Triton's constructor, which the first call has made."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__ = {**fields, "base": tensor}
    return descriptor
