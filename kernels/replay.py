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

from weft.kernels import launch
from weft.kernels.attention_rules import Rules
from weft.kernels.config import AttentionConfig, MatmulConfig
from weft.kernels.language import TensorDescriptor
from weft.kernels.signature import Launch, is_memory, memory_of

P = ParamSpec("P")
R = TypeVar("R")
_MOST = 4096  # kinds of calls of an op to keep
_PLAIN = (type(None), bool, int, float, str, torch.dtype, MatmulConfig, AttentionConfig, Rules)


class _ArgumentMemory(NamedTuple):
    """An argument that is memory: the number of its tensor, and the other fields of a descriptor."""

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
        new: shape, type and device of each tensor that the op allocates.
        launches: each as it was recorded, with the memory by the place of the argument.
        results: the returned tensors, None for a None. `single` if the op returns one tensor and no tuple.
    """

    new: list[tuple[torch.Size, torch.dtype, torch.device]]
    launches: list[tuple[Launch, list[tuple[int, _ArgumentMemory]]]]
    results: list[_Result | None]
    single: bool

    def run(self, tensors: list[torch.Tensor]) -> Any:
        tensors += [launch.empty(shape, dtype, device) for shape, dtype, device in self.new]
        for recorded, places in self.launches:
            arguments = list(recorded.arguments)
            for place, (number, descriptor) in places:
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
    known: OrderedDict[tuple, _Replay | bool] = OrderedDict()  # True after one call of the kind; False cannot be kept

    @functools.wraps(op)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if launch.is_recording():
            return op(*args, **options)
        tensors: list[torch.Tensor] = []
        pointers: list[int] = []
        try:
            key = (_kind(args, tensors, pointers), *options, _kind(options.values(), tensors, pointers))
        except TypeError:
            return op(*args, **options)
        kept = known.get(key)
        if isinstance(kept, _Replay):
            return kept.run(tensors)
        if kept is None:
            known[key] = True
            if len(known) > _MOST:
                known.popitem(last=False)
        elif kept:
            with launch.observing() as observed:
                result = op(*args, **options)
            known[key] = _replay_of(observed, tensors, result) or False
            return result
        return op(*args, **options)

    call.kinds = known  # type: ignore[attr-defined]
    return call


def _kind(values, tensors: list[torch.Tensor], pointers: list[int]) -> tuple:
    """Return a hashable description of arguments, and append their tensors and addresses.

    Raises:
        TypeError: an argument holds more than numbers, texts and tensors.
    """
    described: list = []
    for value in values:
        if isinstance(value, torch.Tensor):
            pointer = value.data_ptr()
            pointers.append(pointer)
            tensors.append(value)
            same = pointers.index(pointer)
            described.append((value.shape, value.stride(), value.dtype, value.get_device(), pointer % 16 == 0, same))
        elif isinstance(value, tuple):
            described.append(_kind(value, tensors, pointers))
        elif isinstance(value, _PLAIN):
            described.append((type(value), value))  # 1, 1.0 and True are equal
        else:
            raise TypeError(f"{type(value).__name__} is not described")
    return tuple(described)


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
            places.append((place, _ArgumentMemory(of_memory, fields)))
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
    new = [(tensor.shape, tensor.dtype, tensor.device) for tensor in observed.allocated]
    return _Replay(new, launches, results, single)


def _described(tensor: torch.Tensor, fields: dict[str, Any]) -> TensorDescriptor:
    """Return a descriptor without the checks of Triton's constructor, which the first call has made."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=tensor)
    return descriptor
