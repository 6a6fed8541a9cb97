"""A variant's machine code: compiled by Triton for an architecture, without a GPU, and kept in a cache.

The same sources and the same Triton, at the same paths, give the same bytes.
"""

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.cache import get_cache_key

from weft.kernels import archive, launch, signature, variants
from weft.kernels.archive import Machine


@dataclass(frozen=True)
class CompiledVariant:
    """A variant's machine code, and what the compiler and the disassembler said about it."""

    machine: Machine
    spilled_bytes: int
    needs_tensor_cores: bool


def compile_launch(recorded: launch.Launch, architecture: str) -> CompiledVariant:
    """The variant that the launch would run on that architecture ("sm_90", say).

    Raises:
        RuntimeError: the kernels were imported for the interpreter, so there is nothing to compile.
    """
    built = assemble(recorded, architecture)
    said = built.metadata
    registers, spilled_bytes = _registers(built.asm["cubin"])
    machine = Machine(
        entry=said.name,
        arguments=_arguments(built.src.signature, getattr(said, "tensordesc_meta", None) or []),
        shared_bytes=said.shared,
        warps=said.num_warps,
        registers=registers,
        clusters=(said.num_ctas, 1, 1) if said.num_ctas > 1 else None,
        cooperative=said.launch_cooperative_grid,
        pdl=said.launch_pdl,
        global_scratch_bytes=said.global_scratch_size,
        global_scratch_align=said.global_scratch_align,
        profile_scratch_bytes=said.profile_scratch_size,
        cubin=built.asm["cubin"],
    )
    return CompiledVariant(machine, spilled_bytes, needs_tensor_cores(built.asm["ttir"]))


def assemble(recorded: launch.Launch, architecture: str) -> CompiledKernel:
    """Triton's own result for the variant, whose `asm` holds the text of each stage."""
    source, target, options = _to_compile(recorded, architecture)
    with _without_lines():
        return triton.compile(source, target=target, options=options)


def cached(recorded: launch.Launch, architecture: str, cache: Path) -> tuple[CompiledVariant, bool]:
    """`compile_launch` of what the folder does not hold from a time before; and whether it had to be compiled now."""
    stem = cache / _cache_key(recorded, architecture)
    try:
        fields = json.loads(stem.with_suffix(".json").read_text())
        machine = archive.unpacked(fields["machine"], stem.with_suffix(".cubin").read_bytes())
        return CompiledVariant(machine, fields["spilled_bytes"], fields["needs_tensor_cores"]), False
    except FileNotFoundError:
        pass
    if not fix_addresses():
        print("addresses are random here: ptxas may give other bytes next time", file=sys.stderr)
    # Triton's own cache is no help here: it may hold what was compiled with line information.
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        compiled = compile_launch(recorded, architecture)
    fields = {**vars(compiled), "machine": archive.packed(compiled.machine)}
    archive.write_whole(stem.with_suffix(".cubin"), compiled.machine.cubin)
    archive.write_whole(stem.with_suffix(".json"), json.dumps(fields).encode())
    return compiled, True


def default_cache() -> Path:
    tree = archive.SOURCES.parent
    if (tree / "setup.py").exists():
        return tree / "build" / "cubins"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "cubins"


def needs_tensor_cores(ttir: str) -> bool:
    """Whether Triton's text has a dot of a type that tensor cores take: any but fp32 in ieee precision."""
    dots = [line for line in ttir.splitlines() if "tt.dot " in line]
    return any("xf32> *" not in dot or "inputPrecision = tf32" in dot for dot in dots)


@lru_cache
def fix_addresses() -> bool:
    """From now on, the programs that this process starts have their memory at the same addresses every time, if the
    system permits.

    ptxas decides by addresses of its own: that of CUDA 13.1 makes of one PTX for sm_100 one of two cubins, which differ
    in the registers that they name. The lengths of paths move its memory too.
    """
    libc = ctypes.CDLL(None)
    only_asked, no_randomising = ctypes.c_ulong(0xFFFFFFFF), 0x0040000  # personality(2): ADDR_NO_RANDOMIZE
    current = libc.personality(only_asked)
    return current != -1 and libc.personality(ctypes.c_ulong(current | no_randomising)) != -1


def _cache_key(recorded: launch.Launch, architecture: str) -> str:
    """Triton's own: the kernel's source and whatever it refers to, signature, constants, options, and Triton itself."""
    _hash_in_order()
    source, target, options = _to_compile(recorded, architecture)
    backend = make_backend(target)
    with _without_lines():
        settings = get_cache_invalidating_env_vars()
        key = get_cache_key(source, backend, backend.parse_options(dict(options)), settings)
    return hashlib.sha256(key.encode()).hexdigest()


@lru_cache
def _hash_in_order() -> None:
    """Triton's hash of a function also depends on which of the functions that it calls were hashed before it, so all
    are hashed here in one order, whichever variants a process compiles. And on the function's line, which is nothing to
    machine code without lines."""
    for op in variants.OPS:
        importlib.import_module(f"weft.kernels.{op}")
    modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith("weft.kernels.")]
    functions = [one for module in modules for one in vars(module).values() if isinstance(one, triton.JITFunction)]
    for function in functions:
        function.starting_line_number = 0
    for function in functions:
        _ = function.cache_key


def _to_compile(recorded: launch.Launch, architecture: str) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    if launch.INTERPRETED:
        raise RuntimeError(
            "TRITON_INTERPRET=1 is set: kernels imported for the interpreter cannot be compiled; unset it"
        )
    types, constants, attributes = signature.specialise(recorded)
    source = ASTSource(recorded.kernel, types, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    # Contraction to fused multiply-adds is named, since its default differs between versions of Triton.
    return source, target, {"num_warps": recorded.warps, "num_stages": recorded.stages, "enable_fp_fusion": True}


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
    """Machine code without the lines of its source: smaller, and the same wherever the source lies."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        yield


def _arguments(types: dict[str, str], maps: Sequence[dict]) -> tuple[str, ...]:
    """The C types of what is passed. The launcher knows that a descriptor's shape and strides follow its map."""
    left = iter(maps)
    given = []
    for name in types.values():
        if name.startswith("tensordesc"):
            given.append("tensordesc:" + json.dumps(next(left), sort_keys=True))
        elif name != "constexpr":
            given.append("ptr" if name.startswith("*") else name)
    return tuple(given)


def _registers(cubin: bytes) -> tuple[int, int]:
    """How many registers a thread has, and how many bytes of memory stand in for those that it has not."""
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", disassembled(cubin, "cuobjdump", "-res-usage")))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def disassembled(cubin: bytes, tool: str, *options: str) -> str:
    """What one of NVIDIA's tools in Triton's wheel says of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
