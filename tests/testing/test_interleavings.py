"""The exchange of csrc/shm/group.h and the sleep of csrc/shm/wait.cpp, in every interleaving of two and three ranks.

The models are sequentially consistent: the code's atomics that the argument leans on are seq_cst or acquire/release
pairs, and the plain data in between is ordered by them (docs/collectives.md).
"""

import pytest
from interleavings import Process, Violated, explore


def exchange_model(world, exchanges, *, waits=True, buffers=2):
    """Each rank does `exchanges` exchanges: write its buffer, publish, wait for each rank, read each rank's buffer.

    State: flags, and buffers as flags of what each holds: the number of the exchange it was written for.
    A read that finds another number than its own is a torn or wrong sum.
    """
    per_exchange = 2 + 2 * world  # write, publish, `world` waits, `world` reads

    def process(rank):
        def step(state, pc):
            flags, contents, fault = state
            number, phase = pc // per_exchange + 1, pc % per_exchange
            if phase == 0:
                contents = replace(contents, rank * buffers + number % buffers, number)
            elif phase == 1:
                flags = replace(flags, rank, number)
            elif phase < 2 + world:
                if waits and flags[phase - 2] < number:
                    return None
            else:
                peer = phase - 2 - world
                found = contents[peer * buffers + number % buffers]
                if found != number:
                    fault = f"rank {rank} reads of rank {peer} what was written for exchange {found}, not {number}"
            return (flags, contents, fault), pc + 1

        return Process(step, per_exchange * exchanges)

    initial = ((0,) * world, (0,) * (world * buffers), None)
    return [process(rank) for rank in range(world)], initial


def replace(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def no_fault(state, counters):
    return state[2]


@pytest.mark.parametrize(("world", "exchanges"), [(2, 8), (3, 4)])
def test_two_buffers_need_no_trailing_barrier(world, exchanges):
    assert explore(*exchange_model(world, exchanges), no_fault) > 100


def test_one_buffer_would_be_overwritten_while_it_is_read():
    with pytest.raises(Violated, match="reads of rank"):
        explore(*exchange_model(2, 3, buffers=1), no_fault)


def test_a_missing_wait_would_be_found():
    with pytest.raises(Violated, match="reads of rank"):
        explore(*exchange_model(2, 2, waits=False), no_fault)


def sleep_model(*, announces=True, kernel_looks_again=True):
    """One writer raises a flag; one waiter may go to sleep in the kernel, which looks at the value once more itself.

    State: value, sleepers, asleep, value as the waiter saw it.
    """

    def writer(state, pc):
        value, sleepers, asleep, seen = state
        if pc == 0:
            return (1, sleepers, asleep, seen), 1
        return (value, sleepers, asleep and not sleepers, seen), 2  # wake the one that announced itself

    def waiter(state, pc):
        value, sleepers, asleep, seen = state
        if pc == 0:
            return (value, sleepers + announces, asleep, seen), 1
        if pc == 1:
            return (value, sleepers, asleep, value), 2
        if pc == 2:  # the futex call: one atomic step of the kernel's
            return (value, sleepers, seen == 0 and (value == seen or not kernel_looks_again), seen), 3
        return None if asleep else ((value, sleepers - announces, asleep, seen), 4)

    return [Process(writer, 2), Process(waiter, 4)], (0, 0, False, None)


def test_no_wake_up_is_lost():
    explore(*sleep_model(), lambda state, counters: None)


@pytest.mark.parametrize("fault", [{"announces": False}, {"kernel_looks_again": False}], ids=str)
def test_each_half_of_the_handshake_is_needed(fault):
    with pytest.raises(Violated, match="nobody can go on"):
        explore(*sleep_model(**fault), lambda state, counters: None)
