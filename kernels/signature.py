"""Recorded launches, and descriptions of their arguments: Triton's type names, and a short text for people."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weft.kernels.language import TensorDescriptor

_ELEMENT_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "u1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Launch:
    """A launch: kernel, grid, arguments, constants and options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]
    warps: int
    stages: int

    @cached_property
    def key_constants(self) -> tuple[tuple[str, Any], ...]:
        """The compile-time constants in the form of a variant's key."""
        return (*self.constants.items(), ("warps", self.warps), ("stages", self.stages))

    @property
    def options(self) -> dict[str, Any]:
        """The options that Triton compiles it with."""
        # enable_fp_fusion is explicit, since its default differs between versions of Triton.
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def __str__(self) -> str:
        return describe(self.arguments, self.constants, self.warps, self.stages)


def is_memory(argument: object) -> bool:
    return isinstance(argument, torch.Tensor | TensorDescriptor)


def memory_of(argument) -> torch.Tensor:
    return argument.base if isinstance(argument, TensorDescriptor) else argument


def same_memory(recorded: Launch) -> list[list[str]]:
    """Return the names of the arguments that are one tensor, for each tensor that is several."""
    names = [name for name in recorded.kernel.arg_names if name not in recorded.constants]
    groups: dict[int, list[str]] = {}
    for name, argument in zip(names, recorded.arguments, strict=False):
        if is_memory(argument):
            groups.setdefault(memory_of(argument).untyped_storage()._cdata, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def type_of(name: str, value) -> str:
    """Return the argument's type in a signature of Triton.

    Raises:
        TypeError: no kernel takes such an argument.
    """
    if isinstance(value, TensorDescriptor):
        block = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_ELEMENT_TYPES[value.base.dtype]}[{block}]>"
    if isinstance(value, torch.Tensor):
        return "*" + _ELEMENT_TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return "i32"
        return "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel's argument {name} is a {type(value).__name__}, which no kernel takes")


def describe(arguments: tuple, constants: dict[str, Any], warps: int, stages: int) -> str:
    """Return a short text for the variant: types of its memory, tile sizes, and compile-time switches that are on."""
    types = dict.fromkeys(_ELEMENT_TYPES[memory_of(argument).dtype] for argument in arguments if is_memory(argument))
    blocks = "x".join(str(value) for name, value in constants.items() if name.startswith("BLOCK"))
    switches = [
        name.lower() if value is True else f"{name.lower()}={value}"
        for name, value in constants.items()
        if not name.startswith("BLOCK") and value not in (False, None, "none")
    ]
    return " ".join(filter(None, [",".join(types), blocks, f"{warps}w {stages}s", *switches]))


def specialise(recorded: Launch) -> tuple[dict[str, str], dict[str, Any], dict]:
    """Return types, constants and attributes of a launch's arguments, by Triton's own rules (`native_specialize_impl`).

    An argument of 1 or None is a constant. An argument that 16 divides has an attribute for that. Booleans get neither.
    """
    names = recorded.kernel.arg_names
    given = [(place, name) for place, name in enumerate(names) if name not in recorded.constants]
    unspecialised = {parameter.name for parameter in recorded.kernel.params if parameter.do_not_specialize}
    types: dict[str, str] = {}
    constants: dict[str, Any] = dict(recorded.constants)
    attributes: dict[tuple[int, ...], list] = {}
    for (place, name), value in zip(given, recorded.arguments, strict=False):
        special = name not in unspecialised and not isinstance(value, bool)
        if value is None or (special and isinstance(value, int) and value == 1):
            constants[name] = value
            continue
        types[name] = type_of(name, value)
        if special and _divisible_by_16(value):
            attributes[(place,)] = [["tt.divisibility", 16]]
    for name in constants:
        types[name] = "constexpr"
    return {name: types[name] for name in names}, constants, attributes


def _divisible_by_16(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0
