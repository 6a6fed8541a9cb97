"""write_after_read: memory that one thread overwrites while another thread of its program may not have read it yet.

Triton puts no barrier between accesses of device memory. A scalar is loaded by every thread, and a tile may be loaded
and stored in different layouts, that is, by different threads. So where a kernel works in place, the threads that have
loaded can store before others load. This looks for such pairs in the text of Triton's last stage before threads.

A load is ordered before a store of the same memory by

    a barrier between the two
    a change of layout, a reduction or a scan of the loaded value between the two, if no two threads loaded one element:
    the threads that own it exchange it
    one layout for both, without replicas: each element's own thread loads it, then stores it
    shared memory, for a store by the copy engine of what was computed from the load

The text has no addresses. Two different places of one memory count as the same, but one layout is taken for one place.
An argument's memory is that of its tensor: arguments that are one tensor in the recorded launch share it. Only
structured control flow is followed; a return in the middle of a kernel is a fault.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_VALUE = re.compile(r"%[\w$]+(?:#\d+)?")
_ASSIGNED = re.compile(r"\s*(%[\w$]+)(?::\d+)? = (.*)")
_BLOCKED = re.compile(
    r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], threadsPerWarp = \[([\d, ]+)\], "
    r"warpsPerCTA = \[([\d, ]+)\]"
)
_BARRIERS = ("ttg.barrier", "ttg.local_barrier", "gpu.barrier")
_BARRIER_IN_ASSEMBLY = re.compile(r"\bbar(rier)?(\.cta)?\.(sync|red)\b")
_EXCHANGES = ("ttg.convert_layout", "tt.reduce", '"tt.reduce"', "tt.scan", '"tt.scan"')
_LOADS = ("tt.load", "ttg.async_copy_global_to_local")
_COPIES_OUT = ("ttng.async_tma_copy_local_to_global", "tt.descriptor_store")
_WRITES = ("tt.store", "tt.atomic_rmw", "tt.atomic_cas", *_COPIES_OUT)
_REPLICAS = "", "replicas"  # layouts in which several threads have an element; that of a scalar is ""


@dataclass
class _Program:
    """What is known while the text is read.

    Attributes:
        memory: of each pointer, the arguments that it may point into.
        loaded: of each value, the numbers of the loads that it was computed from.
        widths: of each blocked layout, the elements that its threads have along each dimension.
    """

    memory: dict[str, frozenset[str]]
    widths: dict[str, list[int]]
    loaded: dict[str, frozenset[int]] = field(default_factory=dict)
    loads: list[tuple[frozenset[str], str, str]] = field(default_factory=list)  # memory, layout, text
    found: set[str] = field(default_factory=set)

    def of(self, table: dict, names: Sequence[str]) -> frozenset:
        return frozenset().union(*(table.get(name, table.get(name.split("#")[0], ())) for name in names))


def fault(ttgir: str, same: Sequence[Sequence[str]] = ()) -> str:
    """Return the stores that may overtake a load of the same memory, or "".

    Args:
        ttgir: the text of a kernel in Triton's GPU dialect.
        same: groups of arguments' names that are one tensor.
    """
    lines = [re.sub(r" loc\(.*?\)(?=[,) ]|$)", "", line).rstrip() for line in ttgir.splitlines()]
    begin = next(at for at, line in enumerate(lines) if "tt.func public" in line)
    lead = {name: group[0] for group in same for name in group}
    pointers = re.findall(r"%(\w+): !tt\.(?:ptr|tensordesc)", lines[begin])
    widths = {name: _widths(*numbers) for name, *numbers in _BLOCKED.findall(ttgir)}
    program = _Program({f"%{name}": frozenset([lead.get(name, name)]) for name in pointers}, widths)
    _block(lines, begin + 1, frozenset(), program, "")
    return "; ".join(sorted(program.found))


def _widths(*numbers: str) -> list[int]:
    return [a * b * c for a, b, c in zip(*([int(n) for n in text.split(",")] for text in numbers), strict=True)]


def _block(
    lines: list[str], at: int, pending: frozenset[int], program: _Program, result: str, carried: Sequence[str] = ()
):
    """Read lines up to the block's end; return the number of the line there and the loads that are not ordered yet.

    Args:
        pending: loads before the block that no barrier has ordered.
        result: name of the value that the block's operation gives, "" without one.
        carried: names of the values that a turn of the block's loop leaves to the next.
    """
    while not lines[at].lstrip().startswith("}"):
        line = lines[at]
        assigned = _ASSIGNED.match(line)
        name, text = (assigned[1], assigned[2]) if assigned else ("", line.strip())
        operation = text.split(" ")[0].split("(")[0]
        if not line.endswith("{"):
            pending = _step(name, operation, text, pending, program)
            if (
                operation == "scf.yield"
            ):  # its values add to those of the operation's other blocks, and to the next turn
                for given in (*([result] if result else ()), *carried):
                    _derive(given, [given, *_VALUE.findall(text)], program)
            at += 1
            continue
        own = re.findall(r"(%[\w$]+) = (%[\w$]+(?:#\d+)?)", text)  # a loop's own values, and those that they begin with
        for inner, outer in own:
            _derive(inner, [outer], program)
        _derive(name, _VALUE.findall(text), program)
        before, after = pending, frozenset[int]()
        for _ in range(2 if operation in ("scf.for", "scf.while") else 1):  # a load may meet the next turn's store
            end, after = _block(lines, at + 1, pending, program, name, [inner for inner, _ in own])
            pending = pending | after
        ways = [after]
        while lines[end].endswith("{"):  # } else {, } do {
            end, other = _block(lines, end + 1, before if "else" in lines[end] else after, program, name)
            ways.append(other)
        if len(ways) == 1 or operation in ("scf.for", "scf.while"):
            ways.append(before)  # the block may not run at all
        pending = frozenset().union(*ways)
        if operation in _EXCHANGES:
            pending -= _owned(program.of(program.loaded, _VALUE.findall(text)), program)
        at = end + 1
    return at, pending


def _step(name: str, operation: str, text: str, pending: frozenset[int], program: _Program) -> frozenset[int]:
    """Read one operation; return the loads that are not ordered behind it."""
    values = _VALUE.findall(text)
    if operation in _BARRIERS or (operation == "tt.elementwise_inline_asm" and _BARRIER_IN_ASSEMBLY.search(text)):
        return frozenset()
    if operation.startswith("cf."):
        program.found.add(f"{operation}, a branch that is not followed")
    if operation == "ttg.local_store":  # the memory now holds what the value was computed from
        _derive(values[1], values, program)
    if operation in _WRITES:
        memory, layout = program.of(program.memory, values[:1]), _layout(text, program)
        # Threads meet between writing shared memory and the copy engine's reading it.
        ordered = program.of(program.loaded, values[1:]) if operation in _COPIES_OUT else frozenset[int]()
        pending -= ordered
        for number in pending:
            of_load, load_layout, load = program.loads[number]
            if memory & of_load and (layout != load_layout or layout in _REPLICAS):
                both = ", ".join(sorted(memory & of_load))
                program.found.add(f"{both} is stored before all threads have loaded it ({load})")
    _derive(name, values, program)
    if operation == "tt.addptr":  # an offset may come from an address too
        program.memory[name] = program.of(program.memory, values[:1])
    if operation == "tt.int_to_ptr" and not program.memory[name]:
        program.memory[name] = frozenset(["memory at a loaded address"])
    if operation in _EXCHANGES:
        return pending - _owned(program.of(program.loaded, values), program)
    if operation in _LOADS and (memory := program.of(program.memory, values[:1])):
        program.memory[name] = frozenset()
        program.loads.append((memory, _layout(text, program), text.rpartition(" : ")[2]))
        number = len(program.loads) - 1
        program.loaded[name] |= {number}
        return pending | {number}
    return pending


def _derive(name: str, values: Sequence[str], program: _Program) -> None:
    """Note what a value is computed from; blocks beside each other use the same names for different values."""
    if name:
        for table in (program.memory, program.loaded):
            table[name] = program.of(table, values)  # type: ignore[assignment]


def _owned(loads: frozenset[int], program: _Program) -> frozenset[int]:
    """Return the loads in which each element has one thread."""
    return frozenset(number for number in loads if program.loads[number][1] not in _REPLICAS)


def _layout(text: str, program: _Program) -> str:
    """Return the layout of an access: "" for a scalar, "replicas" if several threads have the same element."""
    tensor = re.search(r"tensor<([\dx]+)x!tt\.ptr<[^>]*>, (#[^>]+)>", text)
    if tensor is None:
        return ""
    widths = program.widths.get(tensor[2])  # of other layouts than blocked ones it is not known
    if widths is None or any(w > int(n) for w, n in zip(widths, tensor[1].split("x"), strict=True)):
        return "replicas"
    return tensor[2]
