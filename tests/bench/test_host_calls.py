"""The calls of Python functions in a training step are counted, so that no change adds to them unseen.

A ceiling is the count on Python 3.11 and torch 2.13 with a margin of 3%. Lower it with the count; raise it only with a
reason.
"""

import pytest

from weft.bench import host_calls
from weft.testing.ranks import run_ranks

CEILINGS = {
    "one rank": 2170,
    "tp=2": 2260,
    "dp=2": 2020,
    "pp=2": 3190,
    "cp=2": 5490,
    "invariant=4": 6880,
    "invariant=4, tp=2": 7140,
    "invariant=4, dp=2": 6480,
    "invariant=4, cp=2 in two units": 20000,
}


def counted(rank: int, cases: list[host_calls.StepCase]) -> dict[str, int]:
    host_calls.SEQUENCE = 16  # the number of positions is in no count
    return {case.name: host_calls.calls_of(host_calls.step_of(case)) for case in cases}


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_makes_no_more_python_calls_than_before(world):
    cases = [case for case in host_calls.CASES[1:] if case.world == world]
    per_rank = run_ranks(counted, world, cases)
    counts = {case.name: max(of_rank[case.name] for of_rank in per_rank) for case in cases}
    over = {name: count for name, count in counts.items() if count > CEILINGS[name]}
    assert not over, f"{over} exceed the ceilings { ({name: CEILINGS[name] for name in over}) }"


def test_every_case_has_a_ceiling():
    assert list(CEILINGS) == [case.name for case in host_calls.CASES[1:]]
