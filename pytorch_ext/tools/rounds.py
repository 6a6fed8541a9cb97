"""Rounds in which calls take turns, for whatever measures them. Imports the standard library only."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

Name = TypeVar("Name")
Call = TypeVar("Call", bound=Callable[..., object])


def in_turn(
    calls: Mapping[Name, Call],
    rounds: int,
    warm_up: int = 2,
    report: Callable[[int, int], object] = lambda done, rounds: None,
) -> Iterator[tuple[Name, Call, bool]]:
    """Yield every call once in each round, with its name and whether the round counts.

    Each round starts with another call, so that none always comes first.

    Args:
        rounds: Rounds that count.
        warm_up: Rounds before them, which do not.
        report: report(round, rounds) runs at the start of each round.
    """
    order = list(calls.items())
    for number in range(1 - warm_up, rounds + 1):
        report(max(0, number), rounds)
        order.append(order.pop(0))
        for name, call in order:
            yield name, call, number > 0
