"""Parsed machine code of a kernel: its instructions, and the loops that hold no other loop."""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    """One line of machine code: its place, opcode, operands, and True if a predicate may skip it."""

    address: str
    opcode: str
    operands: list[str]
    predicated: bool

    def __str__(self) -> str:
        return f"at {self.address}, {self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel.

    Attributes:
        instructions: in the order of their addresses.
        targets: the number of the instruction at each label.
    """

    instructions: list[Instruction] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)

    def target(self, instruction: Instruction) -> int | None:
        """Return the number of the instruction that a branch goes to; None if it is no branch to a label."""
        label = re.search(r"\.L_\w+", ",".join(instruction.operands)) if instruction.opcode.startswith("BRA") else None
        return self.targets.get(label[0]) if label else None

    def inner_loops(self) -> list[list[Instruction]]:
        """Return the instructions of each loop that holds no other loop."""
        branches = [(self.target(instruction), at) for at, instruction in enumerate(self.instructions)]
        loops = {(first, last) for first, last in branches if first is not None and first <= last}
        return [
            self.instructions[first : last + 1]
            for first, last in sorted(loops)
            if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
        ]


def parsed(text: str) -> Code:
    """Parse what `nvdisasm -c` prints."""
    code = Code()
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            code.targets[label[1]] = len(code.instructions)
        elif found := re.search(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\S+)\s*([^;]*);", line):
            operands = [operand.strip() for operand in found[4].split(",")]
            code.instructions.append(Instruction(found[1], found[3], operands, found[2] is not None))
    return code
