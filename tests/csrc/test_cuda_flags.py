"""The flags of csrc/cuda/flags.h in every interleaving of two and three ranks.

A rank sets its flags without a look at them. That is right if each is 0 by then, for calls of any numbers of meetings
but one.
"""

import itertools

import pytest
from interleavings import Process, Violated, explore


def replace(state, place, value):
    return (*state[:place], value, *state[place + 1 :])


def calls(world, meetings_of_calls):
    """Explore one block of each rank; a call of n meetings uses flags 1 to n of each pair."""
    names = list(itertools.product(range(world), (1, 2, 3), range(world)))  # owner, meeting, setter
    place = {name: number + 1 for number, name in enumerate(names)}  # place 0 is what went wrong

    def set_flag(name, value):
        def step(state):
            if state[place[name]]:
                return replace(state, 0, f"flag {name} is set again before its owner took it")
            return replace(state, place[name], value)

        return step

    def take_flag(name, value):
        def step(state):
            if state[place[name]] not in (0, value):
                return replace(state, 0, f"flag {name} is of call {state[place[name]]}, not {value}")
            return replace(state, place[name], 0) if state[place[name]] else None

        return step

    programs = []
    for rank in range(world):
        steps = []
        for call, meetings in enumerate(meetings_of_calls, 1):
            for meeting in range(1, meetings + 1):
                peers = [peer for peer in range(world) if peer != rank]
                steps += [set_flag((peer, meeting, rank), call) for peer in peers]
                steps += [take_flag((rank, meeting, peer), call) for peer in peers]
        programs.append(steps)

    def process(steps):
        def step(state, at):
            after = steps[at](state)
            return None if after is None else (after, at + 1)

        return Process(step, len(steps))

    final = [len(steps) for steps in programs]

    def fault(state, counters):
        left = any(state[1:]) and list(counters) == final
        return state[0] or ("flags are left" if left else None)

    explore([process(steps) for steps in programs], (None,) + (0,) * len(names), fault)


@pytest.mark.parametrize("of_calls", list(itertools.product((2, 3), repeat=3)), ids=str)
def test_a_flag_is_free_when_it_is_set(of_calls):
    calls(2, of_calls)


def test_a_flag_of_three_ranks_is_free_when_it_is_set():
    calls(3, (2, 3, 2))


@pytest.mark.parametrize("of_calls", [(1, 1), (2, 1, 2), (3, 1, 1)], ids=str)
def test_calls_of_one_meeting_would_set_a_flag_twice(of_calls):
    with pytest.raises(Violated, match="set again"):
        calls(2, of_calls)
