"""memory_orders: the memory order of each flag function of `signal`, in PTX and in machine code.

The interpreter runs one instruction after another, so no result there depends on an order. On a GPU a flag that is set
too early, or data that is read too early, causes errors, and only rarely. So the gate compiles each
function alone and looks for the instructions that order its accesses:

    release    MEMBAR before the store or the atomic: earlier writes become visible first
    acquire    CCTL.IVALL after the load or the atomic: later reads do not come from an old cache line
    barrier    BAR between thread 0, which sets or reads the flag, and the other threads of the program
"""

import re
from dataclasses import dataclass

import sass
import torch

from weft.kernels import launch, signal
from weft.kernels.language import tl, triton


@dataclass(frozen=True)
class Order:
    """Patterns of the instructions that a function's assembly must have, in this order."""

    ptx: str
    sass: tuple[str, ...]


ORDERS = {
    "wait": Order(r"ld\.acquire\.sys\.global\.u32", ("LDG.E.STRONG.SYS", "CCTL.IVALL", "BAR.RED")),
    "put": Order(
        r"st\.release\.sys\.global\.u32",
        ("LDG.E.STRONG.SYS", "MEMBAR.ALL.SYS", "STG.E.STRONG.SYS", "BAR.RED"),
    ),
    "post": Order(r"st\.release\.sys\.global\.u32", ("BAR.SYNC", "MEMBAR.ALL.SYS", "STG.E.STRONG.SYS")),
    "last": Order(
        r"atom\.global\.gpu\.acq_rel\.add\.u32",
        ("BAR.SYNC", "MEMBAR.ALL.GPU", "ATOMG.E.ADD.STRONG.GPU", "CCTL.IVALL", "BAR.SYNC"),
    ),
}  # fmt: skip
# Instructions that set an order; the first ones in the code are the function's own.
_ORDERING = re.compile(r"\b((?:LDG|STG|ATOMG?|RED)\.[\w.]*STRONG[\w.]*|MEMBAR[\w.]*|CCTL[\w.]*|BAR\.(?:SYNC|RED))")


def fault(function: str, ptx: str, sass: str) -> str:
    """Return the fault in the assembly of a function of `signal`, or "" if there is none."""
    order = ORDERS[function]
    if not re.search(order.ptx, ptx):
        return f"signal.{function}: no {order.ptx.replace(chr(92), '')} in its PTX"
    found = [instruction for instruction in _ORDERING.findall(sass) if not instruction.startswith("LDG.E.64")]
    if tuple(found[: len(order.sass)]) != order.sass:
        return f"signal.{function}: {', '.join(found[: len(order.sass)])} instead of {', '.join(order.sass)}"
    return ""


@triton.jit
def wait(flag, out, spoiled, record, timeout_us):
    tl.store(out, signal.wait(flag, 1, spoiled, record, timeout_us, 0, 1, signal.ALL_GATHER_MATMUL, signal.ARRIVED))


@triton.jit
def put(flag, out, spoiled, record, timeout_us):
    tl.store(out, signal.put(flag, 1, spoiled, record, timeout_us, 0, 1, signal.ALL_GATHER_MATMUL, signal.ARRIVED))


@triton.jit
def post(flag, out):
    tl.store(out, 1)
    signal.post(flag, 1)


@triton.jit
def last(counter, out):
    tl.store(out, 1)
    if signal.last(counter, 4):
        tl.store(out + 1, tl.load(out + 2))


def variants(architecture: str) -> None:
    """Call the launcher once for each function; use inside `launch.recording`."""
    words = torch.empty(signal.RECORD_WORDS, dtype=torch.int32, device="meta")
    for kernel in (wait, put):
        launch.launch(kernel, (1,), words, words, words, words.long(), 1000)
    for kernel in (post, last):
        launch.launch(kernel, (1,), words, words)


def unfenced(code: sass.Code) -> str:
    """Return the tensor load that a wait does not order, in a kernel that waits, or "".

    The copy engine does not see what the waiting threads have acquired: on every path from the kernel's start, and from
    a wait, the first tensor load comes behind the fence of `signal.to_copy_engine`.
    """
    opcodes = [instruction.opcode for instruction in code.instructions]
    waits = [
        at for at, opcode in enumerate(opcodes) if opcode == "LDG.E.STRONG.SYS" and "CCTL.IVALL" in opcodes[at : at + 8]
    ]
    left, seen = [0, *waits] if waits else [], set[int]()
    while left:
        at = left.pop()
        if opcodes[at].startswith("UTMALDG"):
            return f"{code.instructions[at]} is not behind FENCE.VIEW.ASYNC.G"
        if at not in seen and opcodes[at] != "FENCE.VIEW.ASYNC.G":
            left += [following for following in code.following(at) if following < len(opcodes)]
        seen.add(at)
    return ""
