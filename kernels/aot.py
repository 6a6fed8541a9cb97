"""Compiles recorded launches to machine code, without a GPU: a cubin and what was said about it."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels import launch

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Compiled:
    """One variant's machine code."""

    cubin: bytes
    shared_bytes: int
    ttir: str  # Triton's own intermediate text


def compile_launch(recorded: launch.Launch, architecture: str) -> Compiled:
    """The variant that the launch would run on that architecture ("sm_90", say).

    Raises:
        RuntimeError: the kernels were imported for the interpreter, so there is nothing to compile.
    """
    if launch.INTERPRETED:
        raise RuntimeError(
            "TRITON_INTERPRET=1 is set: kernels imported for the interpreter cannot be compiled; unset it"
        )
    signature, constants, attributes = specialise(recorded)
    source = ASTSource(recorded.kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    options = {"num_warps": recorded.warps, "num_stages": recorded.stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=target, options=options)
    return Compiled(built.asm["cubin"], built.metadata.shared, built.asm["ttir"])


def specialise(recorded: launch.Launch) -> tuple[dict[str, str], dict[str, Any], dict]:
    """Triton's own rules: an argument of 1 or None is a constant, one that 16 divides is known to be."""
    names = recorded.kernel.arg_names
    unspecialised = {parameter.name for parameter in recorded.kernel.params if parameter.do_not_specialize}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(recorded.constants)
    attributes: dict[tuple[int, ...], list] = {}
    for place, (name, value) in enumerate(zip(names, recorded.arguments, strict=False)):
        special = name not in unspecialised
        if value is None or (special and isinstance(value, int) and value == 1):
            constants[name] = value
            continue
        signature[name] = _type_of(name, value)
        if special and _divisible_by_16(value):
            attributes[(place,)] = [["tt.divisibility", 16]]
    for name in constants:
        signature[name] = "constexpr"
    return {name: signature[name] for name in names}, constants, attributes


def _type_of(name: str, value) -> str:
    if isinstance(value, TensorDescriptor):
        block = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_TYPES[value.base.dtype]}[{block}]>"
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel's argument {name} is a {type(value).__name__}, which no kernel takes")


def _divisible_by_16(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0
