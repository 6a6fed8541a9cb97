"""The minimum of Triton for importing the kernel files and preparing launches where Triton is not installed.

A function keeps its name and its parameters: the lookup of a compiled kernel needs both.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Parameter:
    name: str
    do_not_specialize: bool


class Function:
    """The result of `triton.jit` for a function."""

    def __init__(self, function: Callable, unspecialised: Iterable[int | str]) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        self.arg_names = list(inspect.signature(function).parameters)
        named = set(unspecialised)
        self.params = [Parameter(name, bool({place, name} & named)) for place, name in enumerate(self.arg_names)]

    def __getitem__(self, grid) -> Callable:
        raise RuntimeError(f"{self.__module__}.{self.__name__} cannot be compiled: triton is not installed")


def jit(function: Callable | None = None, *, do_not_specialize: Iterable[int | str] = ()):
    if function is None:
        return lambda decorated: Function(decorated, do_not_specialize)
    return Function(function, do_not_specialize)


class Type:
    """An element type; the key of a variant contains its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class constexpr:  # noqa: N801, Triton's name
    value: Any


class tensor:  # noqa: N801, Triton's name
    pass


@dataclass
class TensorDescriptor:
    """A tensor and the block of it that the copy engine moves at a time."""

    base: Any
    shape: Any
    strides: Any
    block_shape: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @staticmethod
    def from_tensor(tensor: Any, block_shape: list[int]) -> "TensorDescriptor":
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape)


triton = SimpleNamespace(jit=jit)
tl = SimpleNamespace(
    constexpr=constexpr,
    tensor=tensor,
    bfloat16=Type("bf16"),
    float16=Type("fp16"),
    float32=Type("fp32"),
)
