"""Model checker for the flag protocols: every interleaving of a few small processes over shared memory.

`explore` runs every schedule of processes that do one atomic step at a time. It visits each state once.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """One process of a model. States and program counters (pc) are hashable values.

    Attributes:
        step: step(state, pc) returns (state, pc) after one atomic step, or None while the process is blocked.
        end: The pc at which the process is done.
    """

    step: Callable[[Hashable, int], tuple[Hashable, int] | None]
    end: int


class Violated(AssertionError):  # noqa: N818 (a verdict, not an error of the caller)
    """A schedule that breaks an invariant or cannot go on; the text has its steps."""


def explore(
    processes: Sequence[Process],
    state: Hashable,
    invariant: Callable[[Hashable, tuple[int, ...]], str | None],
) -> int:
    """Visit every reachable state and return their number.

    Args:
        processes: The processes of the model.
        state: Shared state at the start.
        invariant: invariant(shared state, program counters) returns a description of a fault, or None.

    Raises:
        Violated: The invariant fails in a state, or no process can go on while one is not done.
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
