"""`python -m weft.kernels.check`: the static gate. Compiles every listed variant, without a GPU, and reads its machine
code.

A fault, and a non-zero exit: a variant that does not compile, registers spilled to local memory, more shared memory
than a program may have, a dot that is not on the tensor cores of its architecture.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial

import triton

from weft.kernels import aot, launch

OPS = (
    "matmul",
    "attention",
    "cross_entropy",
    "bucket",
    "signal",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "all_reduce",
)
# What a dot must have become; wgmma on Hopper, where plain HMMA would be half as fast.
TENSOR_CORE_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}


@dataclass(frozen=True)
class Row:
    """One variant's machine code."""

    kernel: str
    architecture: str
    configuration: str
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    tensor_cores: str = "-"  # the instruction, or why there is none
    cubin_bytes: int = 0
    fault: str = ""


def check(
    ops: Sequence[str] = OPS, architectures: Sequence[str] = launch.ARCHITECTURES, processes: int | None = None
) -> list[Row]:
    """A row for each variant of the ops. An op is a module with a function `variants(architecture)`, by name."""
    work = [(op, architecture) for op in ops for architecture in architectures]
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0))) as pool:
        counts = pool.map(count_variants, *zip(*work, strict=True))
        tasks = [(*pair, number) for pair, count in zip(work, counts, strict=True) for number in range(count)]
        return list(pool.map(check_one, *zip(*tasks, strict=True)))


@lru_cache
def record(op: str, architecture: str) -> list[launch.Launch]:
    """The launches of the op's variants. `op` is one of OPS, or the name of another module."""
    module = importlib.import_module(f"weft.kernels.{op}" if op in OPS else op)
    with launch.recording(architecture) as launches:
        module.variants(architecture)
    return launches


def count_variants(op: str, architecture: str) -> int:
    return len(record(op, architecture))


def check_one(op: str, architecture: str, number: int) -> Row:
    recorded = record(op, architecture)[number]
    row = partial(Row, recorded.kernel.__name__, architecture, describe(recorded))
    try:
        compiled = aot.compile_launch(recorded, architecture)
    except Exception as error:  # whatever the compiler raises is the verdict on this variant, not on the gate
        return row(fault=f"does not compile: {str(error).strip().splitlines()[-1]}")
    usage, instructions = _disassemble(compiled.cubin)
    spilled = usage["STACK"] + usage["LOCAL"]
    wanted = TENSOR_CORE_INSTRUCTION[architecture]
    found = wanted if re.search(rf"\b{wanted}\b", instructions) else "-"
    faults = []
    if spilled:
        faults.append(f"{spilled} bytes of registers spilled")
    allowed = launch.SHARED_LIMIT_BYTES[architecture]
    if compiled.shared_bytes > allowed:
        faults.append(f"{compiled.shared_bytes} bytes of shared memory, {allowed} allowed")
    if needs_tensor_cores(compiled.ttir) and found == "-":
        faults.append(f"a dot without {wanted}")
    return row(usage["REG"], spilled, compiled.shared_bytes, found, len(compiled.cubin), fault="; ".join(faults))


def needs_tensor_cores(ttir: str) -> bool:
    """Whether a dot is of a type that tensor cores take: any but fp32 in ieee precision."""
    dots = [line for line in ttir.splitlines() if "tt.dot " in line]
    return any("xf32> *" not in dot or "inputPrecision = tf32" in dot for dot in dots)


def describe(recorded: launch.Launch) -> str:
    """The variant in a few words: operand types, then the compile-time switches that are on."""
    types = dict.fromkeys(
        aot._type_of("", argument).removeprefix("*").removeprefix("tensordesc<").split("[")[0]
        for argument in recorded.arguments
        if launch._is_memory(argument)
    )
    blocks = "x".join(str(value) for name, value in recorded.constants.items() if name.startswith("BLOCK"))
    switches = [
        name.lower() if value is True else f"{name.lower()}={value}"
        for name, value in recorded.constants.items()
        if not name.startswith("BLOCK") and value not in (False, None, "none")
    ]
    return " ".join([",".join(types), blocks, f"{recorded.warps}w {recorded.stages}s", *switches])


def _disassemble(cubin: bytes) -> tuple[dict[str, int], str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        instructions = _tool(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}, instructions


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.kernels.check", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "ops",
        nargs="*",
        default=OPS,
        metavar="OP",
        help=f"of {', '.join(OPS)}, or a module with variants(architecture); all by default",
    )
    parser.add_argument("--architecture", action="append", choices=launch.ARCHITECTURES, help="all by default")
    parser.add_argument("--json", metavar="FILE", help="also save the table there")
    options = parser.parse_args(arguments)
    if launch.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: there is no machine code to check; unset it")
    rows = check(options.ops, options.architecture or launch.ARCHITECTURES)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"triton": triton.__version__, "rows": [asdict(row) for row in rows]}, file, indent=1)
    print(f"{'kernel':<28} {'arch':<7} {'regs':>4} {'spill':>5} {'shared':>7} {'cores':<8} {'cubin':>7}  configuration")
    for row in rows:
        print(
            f"{row.kernel:<28} {row.architecture:<7} {row.registers:>4} {row.spilled_bytes:>5} {row.shared_bytes:>7} "
            f"{row.tensor_cores:<8} {row.cubin_bytes:>7}  {row.configuration}"
            + (f"\n    FAULT: {row.fault}" if row.fault else "")
        )
    faults = sum(bool(row.fault) for row in rows)
    print(f"{len(rows)} variants, {faults} with a fault, triton {triton.__version__}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
