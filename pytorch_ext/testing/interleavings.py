"""Every interleaving of a few small processes over shared memory: a model checker for the flag protocols.

`explore` runs every schedule of processes that each do one atomic step at a time, and takes schedules that reach the
same state as one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """One process of a model: `step(state, pc)` returns (state, pc) after one atomic step, or None while it is blocked;
    `end` is the pc at which it is done. States and program counters are hashable values."""

    step: Callable[[Hashable, int], tuple[Hashable, int] | None]
    end: int


class Violated(AssertionError):  # noqa: N818 (a verdict, not an error of the caller)
    """A schedule breaks an invariant or cannot go on; the text has its steps."""


def explore(
    processes: Sequence[Process],
    state: Hashable,
    invariant: Callable[[Hashable, tuple[int, ...]], str | None],
) -> int:
    """Visits every reachable state; returns how many there are.

    Args:
        invariant: given the shared state and every process's program counter, what is wrong with it, or None.

    Raises:
        Violated: the invariant fails somewhere, or a state is reached in which nobody can go on and somebody is not
            done.
    """
    start = (state, tuple(0 for _ in processes))
    seen = {start}
    came_from: dict[Hashable, tuple[int, Hashable]] = {}
    frontier = [start]
    while frontier:
        here = frontier.pop()
        shared, counters = here
        fault = invariant(shared, counters)
        if fault:
            raise Violated(f"{fault}\n{_schedule(here, came_from)}")
        moves = []
        for number, process in enumerate(processes):
            if counters[number] >= process.end:
                continue
            after = process.step(shared, counters[number])
            if after is not None:
                changed, counter = after
                moves.append((number, (changed, (*counters[:number], counter, *counters[number + 1 :]))))
        if not moves and any(counter < process.end for counter, process in zip(counters, processes, strict=True)):
            raise Violated(f"nobody can go on\n{_schedule(here, came_from)}")
        for number, there in moves:
            if there not in seen:
                seen.add(there)
                came_from[there] = (number, here)
                frontier.append(there)
    return len(seen)


def _schedule(state, came_from) -> str:
    steps = []
    while state in came_from:
        number, before = came_from[state]
        steps.append(f"process {number}: {before} -> {state}")
        state = before
    return "\n".join(reversed(steps))
