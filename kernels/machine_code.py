"""Machine code of variants: Triton compiles it for an architecture without a GPU, and a cache keeps it.

The same sources and the same Triton, at the same paths, give the same bytes.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib
import io
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
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.cache import get_cache_key

from weft.kernels import archive, launch, signature, variants, write_after_read
from weft.kernels.archive import Machine

_CHECK = archive.source_hash("weft.kernels.write_after_read")  # a verdict of another one does not count
# Fields of Triton's metadata that csrc/launch does not serve, with the values that ask for nothing.
_NOT_SERVED = {
    "num_ctas": 1,  # clusters
    "launch_cooperative_grid": False,
    "launch_pdl": False,  # a start before the previous launch has ended
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}


@dataclass(frozen=True)
class CompiledVariant:
    """A variant's machine code, with results of the compiler and the disassembler."""

    machine: Machine
    spilled_bytes: int
    needs_tensor_cores: bool
    serialised: list[str]  # the assembler's warnings of wgmma that wait for one another
    overtakes: str  # the stores that may overtake a load of the same memory; see `write_after_read`


def compile_launch(recorded: launch.Launch, architecture: str) -> CompiledVariant:
    """Compile the variant that the launch would run on that architecture ("sm_90", say).

    Raises:
        RuntimeError: the kernels were imported for the interpreter, so there is nothing to compile; or the variant
            needs a feature that weft's launcher lacks.
    """
    built, serialised = assemble(recorded, architecture)
    metadata = built.metadata
    needs = {name: getattr(metadata, name) for name, none in _NOT_SERVED.items() if getattr(metadata, name) != none}
    if needs:
        raise RuntimeError(f"kernel {metadata.name} was compiled with {needs}, which weft's launcher does not serve")
    registers, spilled_bytes = registers_of(built.asm["cubin"])
    machine = Machine(
        entry=metadata.name,
        arguments=_arguments(built.src.signature, getattr(metadata, "tensordesc_meta", None) or []),
        shared_bytes=metadata.shared,
        warps=metadata.num_warps,
        registers=registers,
        cubin=built.asm["cubin"],
    )
    overtakes = write_after_read.fault(built.asm["ttgir"], signature.same_memory(recorded))
    return CompiledVariant(machine, spilled_bytes, needs_tensor_cores(built.asm["ttir"]), serialised, overtakes)


def assemble(recorded: launch.Launch, architecture: str) -> tuple[CompiledKernel, list[str]]:
    """Return Triton's own result for the variant, and the assembler's warnings that wgmma are serialised.

    The `asm` of the result holds the text of each stage.
    """
    source, target, options = _to_compile(recorded, architecture)
    log = io.StringIO()
    with _settings(architecture), contextlib.redirect_stdout(log):
        built = triton.compile(source, target=target, options=options)
    return built, sorted(set(re.findall(r"\(C75\d\d\).*", log.getvalue())))


def assembler_version(architecture: str) -> str:
    """Return the release of ptxas that assembles for the architecture ("13.1", say)."""
    with _settings(architecture):
        nvidia = triton.knobs.nvidia
        return (nvidia.ptxas_blackwell if architecture in ("sm_100", "sm_120") else nvidia.ptxas).version


def cached(recorded: launch.Launch, architecture: str, cache: Path) -> tuple[CompiledVariant, bool]:
    """Return the variant from the cache folder, or compile it and store it there; with True if it was compiled now."""
    stem = cache / _cache_key(recorded, architecture)
    try:
        fields = json.loads(stem.with_suffix(".json").read_text())
        machine = archive.unpacked(fields["machine"], stem.with_suffix(".cubin").read_bytes())
        return CompiledVariant(machine, **{name: fields[name] for name in fields if name != "machine"}), False
    except FileNotFoundError:
        pass
    if not fix_addresses():
        print("addresses are random here: ptxas may give other bytes next time", file=sys.stderr)
    # Triton's own cache is not used here: it may hold code that was compiled with line information.
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
    """Return True if Triton's text has a dot for tensor cores: of any type but fp32 in ieee precision."""
    dots = [line for line in ttir.splitlines() if "tt.dot " in line]
    return any("xf32> *" not in dot or "inputPrecision = tf32" in dot for dot in dots)


@lru_cache
def fix_addresses() -> bool:
    """Turn off random memory addresses for programs that this process starts; return False if the system forbids it.

    ptxas makes choices by its own addresses. That of CUDA 13.1 turns one PTX for sm_100 into one of two cubins with
    different registers. The lengths of paths move its memory too.
    """
    libc = ctypes.CDLL(None)
    only_asked, no_randomising = ctypes.c_ulong(0xFFFFFFFF), 0x0040000  # personality(2): ADDR_NO_RANDOMIZE
    current = libc.personality(only_asked)
    return current != -1 and libc.personality(ctypes.c_ulong(current | no_randomising)) != -1


def _cache_key(recorded: launch.Launch, architecture: str) -> str:
    """Return a key of Triton's own (source and all it refers to, signature, constants, options) and what is checked."""
    _hash_in_order()
    source, target, options = _to_compile(recorded, architecture)
    backend = make_backend(target)
    with _settings(architecture):
        settings = get_cache_invalidating_env_vars()
        key = get_cache_key(source, backend, backend.parse_options(dict(options)), settings)
    fields = " ".join(field.name for kind in (CompiledVariant, Machine) for field in dataclasses.fields(kind))
    given = f"{key} {assembler_version(architecture)} {fields} {signature.same_memory(recorded)} {_CHECK}"
    return hashlib.sha256(given.encode()).hexdigest()


@lru_cache
def _hash_in_order() -> None:
    """Hash all functions in one order, regardless of the variants that a process compiles.

    Triton's hash of a function also depends on the functions it calls that were hashed before it. It depends on the
    function's line too, which does not matter to machine code without lines.
    """
    for op in variants.OPS:
        importlib.import_module(f"weft.kernels.{op}")
    modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith("weft.kernels.")]
    functions = [item for module in modules for item in vars(module).values() if isinstance(item, triton.JITFunction)]
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
    return source, target, recorded.options


@contextlib.contextmanager
def _settings(architecture: str) -> Iterator[None]:
    """Compile inside without line information, and for sm_90 with the newest ptxas.

    Code without lines is smaller and does not depend on the source's place. The ptxas 12.8 that Triton takes for sm_90
    has miscompiled products with operands in registers (flash-linear-attention's issue 1262), a fault that ended with
    CUDA 13.3 (triton's issue 11781). WEFT_HOPPER_PTXAS names one; without it, it is the newer of the two in Triton's
    wheel. sm_100 keeps that: a newer one spills more.

    Triton compiles for sm_120a, whose code would not run on 12.1. Weft's kernels have nothing that sm_120 lacks.
    """
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), _plain_architecture(architecture):
        triton.knobs.compilation.disable_line_info = True
        triton.knobs.nvidia.dump_ptxas_log = True
        if architecture == "sm_90":
            given = os.environ.get("WEFT_HOPPER_PTXAS") or triton.knobs.nvidia.ptxas_blackwell.path
            triton.knobs.nvidia.ptxas = given
            if triton.knobs.nvidia.ptxas.path != given:  # Triton would take its oldest instead
                raise RuntimeError(f"WEFT_HOPPER_PTXAS={given} is no ptxas that runs; name one, or unset it")
        yield


@contextlib.contextmanager
def _plain_architecture(architecture: str) -> Iterator[None]:
    if architecture != "sm_120":
        yield
        return
    before = compiler.sm_arch_from_capability
    compiler.sm_arch_from_capability = lambda capability: f"sm_{capability}"
    try:
        yield
    finally:
        compiler.sm_arch_from_capability = before


def _arguments(types: dict[str, str], maps: Sequence[dict]) -> tuple[str, ...]:
    """Return the C types of the arguments. The launcher adds a descriptor's shape and strides after its map."""
    left = iter(maps)
    given = []
    for name in types.values():
        if name.startswith("tensordesc"):
            given.append("tensordesc:" + json.dumps(next(left), sort_keys=True))
        elif name != "constexpr":
            given.append("ptr" if name.startswith("*") else name)
    return tuple(given)


def registers_of(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of memory that replace missing registers."""
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", disassembled(cubin, "cuobjdump", "-res-usage")))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def disassembled(cubin: bytes, tool: str, *options: str) -> str:
    """Return the output of one of NVIDIA's tools in Triton's wheel for the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
