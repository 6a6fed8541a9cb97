"""`python -m weft.kernels.aot`: compiles every variant of every op ahead of time, without a GPU, into one archive for
each architecture.

What has not changed since the last time is taken from the cache. The same sources and the same Triton, at the same
paths, give the same bytes.
"""

import argparse
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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key

from weft.kernels import archive, dispatch, launch, signature, variants
from weft.kernels.archive import Machine


@dataclass(frozen=True)
class Compiled:
    """A variant's machine code, and what the compiler and the disassembler said about it."""

    machine: Machine
    spilled_bytes: int
    ttir: str  # Triton's own intermediate text


def compile_launch(recorded: launch.Launch, architecture: str) -> Compiled:
    """The variant that the launch would run on that architecture ("sm_90", say).

    Raises:
        RuntimeError: the kernels were imported for the interpreter, so there is nothing to compile.
    """
    source, target, options = _to_compile(recorded, architecture)
    with _without_lines():
        built = triton.compile(source, target=target, options=options)
    said = built.metadata
    registers, spilled_bytes = _registers(built.asm["cubin"])
    machine = Machine(
        entry=said.name,
        arguments=_arguments(source.signature, getattr(said, "tensordesc_meta", None) or []),
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
    return Compiled(machine, spilled_bytes, built.asm["ttir"])


def build(
    ops: Sequence[str], architectures: Sequence[str], out: Path, cache: Path, processes: int | None = None
) -> None:
    """Writes the archives of the architectures, and says how large each is and how much was compiled for it."""
    began = time.monotonic()
    where = {_key(*place): place for place in variants.places(ops, architectures)}  # two ops may share a variant
    built = variants.on_each(partial(_compile, cache), list(where.values()), processes)
    for architecture in architectures:
        entries, fresh = [], Counter[bool]()
        for (_, kernel, key), place, (machine, was_compiled) in zip(where, where.values(), built, strict=True):
            if place[1] == architecture:
                entries.append((kernel, key, str(_recorded(*place)), machine))
                fresh[was_compiled] += 1
        path = out / f"{architecture}.weft"
        archive.write(path, architecture, triton.__version__, entries)
        counts = f"{len(entries)} variants of {len({entry[0] for entry in entries})} kernels"
        megabytes = path.stat().st_size / 1e6
        print(f"{path}: {counts}, {fresh[True]} compiled and {fresh[False]} unchanged, {megabytes:.2f} MB")
    print(f"triton {triton.__version__}, {time.monotonic() - began:.0f} s")


def _recorded(op: str, architecture: str, number: int) -> launch.Launch:
    return variants.record(op, architecture)[number]


def _key(op: str, architecture: str, number: int) -> tuple[str, str, bytes]:
    """What the variant is found by: architecture, kernel, and the launcher's own key."""
    recorded = _recorded(op, architecture, number)
    constants = dispatch.constants_of(recorded.constants, recorded.warps, recorded.stages)
    key = dispatch.dispatcher(recorded.kernel).key(recorded.arguments, constants)
    return architecture, dispatch.full_name(recorded.kernel), key


def _compile(cache: Path, op: str, architecture: str, number: int) -> tuple[Machine, bool]:
    """The variant's machine code, and whether it had to be compiled now."""
    recorded = _recorded(op, architecture, number)
    stem = cache / _cache_key(recorded, architecture)
    try:
        fields = json.loads(stem.with_suffix(".json").read_text())
        return archive.unpacked(fields, stem.with_suffix(".cubin").read_bytes()), False
    except FileNotFoundError:
        pass
    if not fix_addresses():
        print("addresses are random here: ptxas may give other bytes next time", file=sys.stderr)
    # Triton's own cache is no help here: it may hold what was compiled with line information.
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        try:
            machine = compile_launch(recorded, architecture).machine
        except Exception as error:  # whatever the compiler raises
            name = f"{dispatch.full_name(recorded.kernel)} ({recorded}) for {architecture}"
            raise RuntimeError(f"{name} does not compile: {str(error).strip()}") from None
    archive.write_whole(stem.with_suffix(".cubin"), machine.cubin)
    archive.write_whole(stem.with_suffix(".json"), json.dumps(archive.packed(machine)).encode())
    return machine, True


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


def _default_cache() -> Path:
    tree = archive.SOURCES.parent
    if (tree / "setup.py").exists():
        return tree / "build" / "cubins"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "cubins"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.kernels.aot", description=__doc__)
    known = launch.ARCHITECTURES
    parser.add_argument("--architecture", nargs="+", action="extend", choices=known, help="all by default")
    parser.add_argument("--op", nargs="+", action="extend", choices=variants.OPS, help="all by default")
    parser.add_argument(
        "--out", type=Path, default=archive.COMPILED, metavar="FOLDER", help="here by default: %(default)s"
    )
    parser.add_argument("--cache", type=Path, default=_default_cache(), metavar="FOLDER", help="by default %(default)s")
    options = parser.parse_args(arguments)
    if launch.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: there is no machine code to compile; unset it")
    if not archive.launches_as(triton.__version__):
        parser.error(
            f"triton {triton.__version__} is installed; install {archive.TRITON}, whose kernels weft knows to launch"
        )
    # The package imports no extension; this tool needs its keys, which are those that a launch looks for.
    launch.use(importlib.import_module("weft._C").launch)
    build(options.op or variants.OPS, options.architecture or known, options.out, options.cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
