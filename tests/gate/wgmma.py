"""Checks that nothing touches the registers of a Hopper product (wgmma, HGMMA in machine code) before it has ended.

These products run asynchronously, in groups. A program waits until at most N groups are unfinished
(`wgmma.wait_group N`; in machine code `gsb0` ends a group and `WARPGROUP.DEPBAR.LE gsb0, N` waits). Until then, no
instruction may write a product's operand, or read or write its sum (PTX ISA, asynchronous warpgroup-level matrix
instructions).
"""

import re

from sass import Code, Instruction

_MOST_GROUPS = 8  # as many unfinished groups as one wait can name
_NO_DESTINATION = re.compile(r"ST[GSL]?\b|RED|[IFHD]?SET?P\b|ISETP|FSETP|HSETP|DSETP|PLOP3|VOTE|R2P|BAR|BRA|EXIT|WARP")


def early_access(code: Code) -> str:
    """Return the first instruction that touches the registers of an unfinished product, or "".

    Follows every path of the machine code until the sets of unfinished registers grow no more.
    """
    before: dict[int, tuple[frozenset[str], ...]] = {0: (frozenset(),)}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        if at >= len(code.instructions):
            continue
        fault, after = _step(code.instructions[at], before[at])
        if fault:
            return fault
        for following in code.following(at):
            old = before.get(following)
            new = after if old is None else _joined(old, after)
            if new != old:
                before[following] = new
                waiting.append(following)
    return ""


def _step(instruction: Instruction, state: tuple[frozenset[str], ...]) -> tuple[str, tuple[frozenset[str], ...]]:
    """Return the fault of one instruction, if any, and the state after it.

    The state has the registers of the group that is being formed, then those of the unfinished groups, newest first.
    Read operands have a "<" before their name.
    """
    opcode, operands = instruction.opcode, instruction.operands
    forming, *unfinished = state
    if "DEPBAR" in opcode and operands[0] == "gsb0":
        return "", (forming, *unfinished[: int(operands[1], 16)])
    if "GMMA" in opcode:
        forming = forming | _product_registers(opcode, operands)
        if "gsb0" in operands:
            groups = [forming, *unfinished]
            return "", (frozenset(), *groups[: _MOST_GROUPS - 1], *[frozenset().union(*groups[_MOST_GROUPS - 1 :])])
        return "", (forming, *unfinished)
    busy = forming.union(*unfinished)
    if busy:
        written, read = _registers(opcode, operands)
        if written & {name.lstrip("<") for name in busy} or read & busy:
            return f"{instruction} touches registers of an unfinished HGMMA", state
    return "", state


def _product_registers(opcode: str, operands: list[str]) -> frozenset[str]:
    """Return the registers of an HGMMA: those of its sum, and its left operand's with a "<"."""
    columns = re.search(r"64x(\d+)x", opcode)
    assert columns, opcode
    count = int(columns[1]) // (2 if ".F32" in opcode else 4)
    registers = set(_run(operands[0], count))
    if re.fullmatch(r"R\d+", operands[1]):
        registers |= {"<" + name for name in _run(operands[1], 4)}
    return frozenset(registers)


def _registers(opcode: str, operands: list[str]) -> tuple[set[str], set[str]]:
    """Return the registers that an instruction writes and those that it reads."""
    given = [operand for operand in operands if not re.fullmatch(r"!?U?P[T\d]", operand)]
    written: set[str] = set()
    if given and re.fullmatch(r"R\d+", given[0]) and not _NO_DESTINATION.match(opcode):
        width = 4 if re.search(r"\.128|\.M88\.4", opcode) else 2 if re.search(r"\.64|\.WIDE|\.M88\.2", opcode) else 1
        written = set(_run(given[0], width))
        given = given[1:]
    return written, {name for operand in given for name in re.findall(r"\bR\d+\b", operand)}


def _run(first: str, count: int) -> list[str]:
    return [f"R{int(first[1:]) + i}" for i in range(count)]


def _joined(old: tuple[frozenset[str], ...], new: tuple[frozenset[str], ...]) -> tuple[frozenset[str], ...]:
    longest = max(len(old), len(new))
    padded = [state + (frozenset(),) * (longest - len(state)) for state in (old, new)]
    return tuple(a | b for a, b in zip(*padded, strict=True))
