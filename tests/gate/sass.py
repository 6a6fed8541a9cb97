"""Parsed machine code of a kernel: its instructions, its loops, and the paths through them."""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property


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

    def following(self, at: int) -> list[int]:
        """Return the numbers of the instructions that may run next."""
        instruction = self.instructions[at]
        opcode = instruction.opcode
        if opcode.startswith("BRA"):
            target = self.target(instruction)
            always = not instruction.predicated and len(instruction.operands) == 1 and opcode in ("BRA", "BRA.U")
            return ([] if target is None else [target]) + ([] if always else [at + 1])
        if opcode.startswith(("EXIT", "RET")) and not instruction.predicated:
            return []
        return [at + 1]

    def path(self, start: int, ends: Collection[int], within: Collection[int] | None = None) -> list[int]:
        """Return the fewest instructions from after `start` up to one of `ends`, which `start` may be.

        Args:
            within: numbers of the only instructions that may run; all by default.

        Raises:
            ValueError: no path leads there.
        """
        before: dict[int, int] = {}
        waiting = deque([start])
        while waiting:
            at = waiting.popleft()
            for following in self._edges[0][at]:
                if following not in before and (within is None or following in within):
                    before[following] = at
                    waiting.append(following)
                if following in ends:
                    found = [following]
                    while before[found[-1]] != start:
                        found.append(before[found[-1]])
                    return found[::-1]
        raise ValueError(f"no path from {self.instructions[start]} to {', '.join(map(str, ends))}")

    def turn(self, points: Sequence[int], within: Collection[int]) -> list[int]:
        """Return the fewest instructions of one turn of a loop through all of these points, in their order."""
        return [at for a, b in zip(points, [*points[1:], points[0]], strict=True) for at in self.path(a, [b], within)]

    def loops_with(self, wanted: Callable[[Instruction], bool]) -> list[tuple[frozenset[int], list[int]]]:
        """Return the innermost loops around the wanted instructions, each with those of them that are in no loop in it.

        Loops are found by the paths, since the assembler puts blocks that rarely run behind the end of the kernel.
        """
        found: dict[frozenset[int], list[int]] = {}
        loop: frozenset[int] = frozenset()
        previous = None
        for at in [at for at, instruction in enumerate(self.instructions) if wanted(instruction)]:
            straight = previous is not None and all(
                self._edges[0][i] == [i + 1] and self._edges[1][i + 1] == [i] for i in range(previous, at)
            )
            loop = loop if straight else self._innermost_loop(at)
            previous = at
            if loop:
                found.setdefault(loop, []).append(at)
        return list(found.items())

    def _innermost_loop(self, at: int) -> frozenset[int]:
        forward, backward = self._edges
        loop: frozenset[int] = frozenset()
        inside: Collection[int] = range(len(self.instructions))
        while True:
            around = _reached(forward, at, inside) & _reached(backward, at, inside)
            if at not in around:
                return loop
            loop = frozenset(around)
            entry = min((i for i in loop if not loop.issuperset(backward[i])), default=min(loop))
            if entry == at:
                return loop
            inside = loop - {entry}  # without its entry, only loops in it are left

    @cached_property
    def _edges(self) -> tuple[list[list[int]], list[list[int]]]:
        """The instructions after and before each one."""
        count = len(self.instructions)
        forward = [[at for at in self.following(i) if at < count] for i in range(count)]
        backward: list[list[int]] = [[] for _ in range(count)]
        for at, following in enumerate(forward):
            for there in following:
                backward[there].append(at)
        return forward, backward


def _reached(edges: list[list[int]], start: int, inside: Collection[int]) -> set[int]:
    """Return the numbers that one or more edges lead to from the start."""
    found: set[int] = set()
    waiting = [start]
    while waiting:
        for there in edges[waiting.pop()]:
            if there in inside and there not in found:
                found.add(there)
                waiting.append(there)
    return found


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
