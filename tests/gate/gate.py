"""`make gate`, or `python tests/gate/gate.py OP ...`: compile every listed variant without a GPU and check its machine code.

These are faults and make the exit status non-zero: a variant that does not compile, spilled registers that an innermost
loop reloads or more than 256 bytes of them, more shared memory than a program may have, a dot that is not on the tensor
cores of its architecture, products of Hopper that the assembler serialises or whose registers are touched before they
end, floating-point numbers that are added in memory in any order, a store that may overtake another thread's load of
the same memory, a tensor load that does not follow the fence behind a wait, and a flag function without its memory
order.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import triton

from weft.kernels import launch, machine_code
from weft.kernels.variants import OPS, on_each, places, record

sys.path.insert(0, str(Path(__file__).parent))
import memory_orders
import sass
import wgmma

CHECKED = (*OPS, "memory_orders")
MOST_SPILLED_BYTES = 256  # outside of the innermost loops, where a load and a store a tile cost next to nothing
# The instruction of a dot; on Hopper that of wgmma, since plain HMMA is half as fast.
TENSOR_CORE_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA"}

_ADDS_IN_ANY_ORDER = re.compile(  # RED.E.ADD.F32.FTZ.RN.STRONG.GPU; sums by the copy engine have no type in the opcode
    r"UTMAREDG|UBLKRED|(RED|REDG|REDS|ATOM|ATOMG|ATOMS)\.(.*\.)?ADD\..*F(16|32|64)"
)


@dataclass(frozen=True)
class CheckedVariant:
    """Result of the check of one variant."""

    kernel: str
    architecture: str
    configuration: str
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    tensor_cores: str = "-"  # the instruction, "-" where there is none
    cubin_bytes: int = 0
    fault: str = ""


def check(
    ops: Sequence[str] = CHECKED,
    architectures: Sequence[str] = launch.ARCHITECTURES,
    every: int = 1,
    cache: Path | None = None,
) -> list[CheckedVariant]:
    """Return a row for each variant of the ops.

    Variants that `aot` has compiled into the cache are not compiled again.

    Args:
        ops: names of modules with a function `variants(architecture)`; "memory_orders" stands for the flag functions of
            `signal`, each compiled alone.
        every: check only each `every`-th variant.
        cache: folder of the cache; the default one if None.
    """
    cache = cache or machine_code.default_cache()
    compiled = [op for op in ops if op != "memory_orders"]
    rows = on_each(partial(check_one, cache), places(compiled, architectures)[::every])
    if "memory_orders" in ops:
        rows += on_each(check_order, places([memory_orders.__name__], architectures))
    return rows


def check_one(cache: Path, op: str, architecture: str, number: int) -> CheckedVariant:
    recorded = record(op, architecture)[number]
    row = partial(CheckedVariant, recorded.kernel.__name__, architecture, str(recorded))
    try:
        compiled, _ = machine_code.cached(recorded, architecture, cache)
    except Exception as error:  # any error of the compiler is a fault of this variant and does not end the check
        return row(fault=f"does not compile: {str(error).strip().splitlines()[-1]}")
    machine = compiled.machine
    code = sass.parsed(machine_code.disassembled(machine.cubin, "nvdisasm", "-c"))
    wanted = TENSOR_CORE_INSTRUCTION[architecture]
    found = wanted if any(wanted in instruction.opcode for instruction in code.instructions) else "-"
    faults = [*compiled.serialised]
    if compiled.overtakes:
        faults.append(compiled.overtakes)
    if found == "HGMMA" and (early := wgmma.early_access(code)):
        faults.append(early)
    if spill := spills(code, compiled.spilled_bytes):
        faults.append(spill)
    opcodes = {instruction.opcode for instruction in code.instructions}
    if unfenced := memory_orders.unfenced(code):
        faults.append(unfenced)
    faults += [f"{opcode} adds in any order" for opcode in sorted(opcodes) if _ADDS_IN_ANY_ORDER.match(opcode)]
    allowed = launch.SHARED_LIMIT_BYTES[architecture]
    if machine.shared_bytes > allowed:
        faults.append(f"{machine.shared_bytes} bytes of shared memory, {allowed} allowed")
    if compiled.needs_tensor_cores and found == "-":
        faults.append(f"a dot without {wanted}")
    numbers = machine.registers, compiled.spilled_bytes, machine.shared_bytes
    return row(*numbers, found, len(machine.cubin), fault="; ".join(faults))


def spills(code: sass.Code, spilled_bytes: int) -> str:
    """Return what is wrong with the spilled registers, or ""."""
    if not spilled_bytes:
        return ""
    if spilled_bytes > MOST_SPILLED_BYTES:
        return f"{spilled_bytes} bytes of registers spilled"
    local = [i for loop in code.inner_loops() for i in loop if i.opcode.startswith(("LDL", "STL"))]
    return f"{local[0]} reloads spilled registers in an innermost loop" if local else ""


def check_order(op: str, architecture: str, number: int) -> CheckedVariant:
    recorded = record(op, architecture)[number]
    function = recorded.kernel.__name__
    built, _ = machine_code.assemble(recorded, architecture)
    sass = machine_code.disassembled(built.asm["cubin"], "nvdisasm", "-c")
    fault = memory_orders.fault(function, built.asm["ptx"], sass)
    return CheckedVariant(function, architecture, "memory order", cubin_bytes=len(built.asm["cubin"]), fault=fault)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/gate/gate.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "ops",
        nargs="*",
        default=CHECKED,
        metavar="OP",
        help=f"of {', '.join(CHECKED)}, or a module with variants(architecture); all by default",
    )
    parser.add_argument("--architecture", action="append", choices=launch.ARCHITECTURES, help="all by default")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th variant")
    parser.add_argument("--json", metavar="FILE", help="also save the table there")
    options = parser.parse_args(arguments)
    if launch.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: there is no machine code to check; unset it")
    rows = check(options.ops, options.architecture or launch.ARCHITECTURES, every=options.every)
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
