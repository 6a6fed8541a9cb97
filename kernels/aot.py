"""`python -m weft.kernels.aot`: compile every variant of every op ahead of time into one archive for each architecture.

No GPU is needed. Variants that have not changed since the last run come from the cache. The same sources and the same
Triton, at the same paths, give the same bytes.
"""

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import triton

from weft.kernels import archive, dispatch, launch, machine_code, variants
from weft.kernels.archive import Machine


def build(
    ops: Sequence[str], architectures: Sequence[str], out: Path, cache: Path, processes: int | None = None
) -> None:
    """Write the archives of the architectures; print the size of each and the number of variants compiled for it."""
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
        archive.write(path, architecture, triton.__version__, machine_code.assembler_version(architecture), entries)
        counts = f"{len(entries)} variants of {len({entry[0] for entry in entries})} kernels"
        megabytes = path.stat().st_size / 1e6
        print(f"{path}: {counts}, {fresh[True]} compiled and {fresh[False]} unchanged, {megabytes:.2f} MB")
    print(f"triton {triton.__version__}, {time.monotonic() - began:.0f} s")


def _recorded(op: str, architecture: str, number: int) -> launch.Launch:
    return variants.record(op, architecture)[number]


def _compile(cache: Path, op: str, architecture: str, number: int) -> tuple[Machine, bool]:
    """Return the variant's machine code, and True if it was compiled now."""
    recorded = _recorded(op, architecture, number)
    try:
        compiled, fresh = machine_code.cached(recorded, architecture, cache)
    except Exception as error:  # the compiler may raise anything
        name = f"{dispatch.full_name(recorded.kernel)} ({recorded}) for {architecture}"
        raise RuntimeError(f"{name} does not compile: {str(error).strip()}") from None
    return compiled.machine, fresh


def _key(op: str, architecture: str, number: int) -> tuple[str, str, bytes]:
    """Return the variant's key: architecture, kernel, and the launcher's own key."""
    recorded = _recorded(op, architecture, number)
    key = dispatch.dispatcher(recorded.kernel).key(recorded.arguments, recorded.key_constants)
    return architecture, dispatch.full_name(recorded.kernel), key


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.kernels.aot", description=__doc__)
    known = launch.ARCHITECTURES
    parser.add_argument("--architecture", nargs="+", action="extend", choices=known, help="all by default")
    parser.add_argument("--op", nargs="+", action="extend", choices=variants.OPS, help="all by default")
    parser.add_argument(
        "--out", type=Path, default=archive.COMPILED, metavar="FOLDER", help="here by default: %(default)s"
    )
    cache = machine_code.default_cache()
    parser.add_argument("--cache", type=Path, default=cache, metavar="FOLDER", help="by default %(default)s")
    options = parser.parse_args(arguments)
    if launch.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: there is no machine code to compile; unset it")
    if not archive.launches_as(triton.__version__):
        parser.error(
            f"triton {triton.__version__} is installed; install {archive.TRITON}, whose kernels weft knows to launch"
        )
    # weft.kernels imports no extension, but this tool needs the extension's keys: a launch looks them up.
    launch.use(importlib.import_module("weft._C").launch)
    build(options.op or variants.OPS, options.architecture or known, options.out, options.cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
