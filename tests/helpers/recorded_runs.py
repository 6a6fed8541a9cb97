"""Recordings of programs of tests, in this process and on ranks, compared as `weft compare` does."""

from functools import cache, partial

from weft.testing.ranks import run_ranks
from weft.tools.compare.comparison import compare_recordings
from weft.tools.compare.recorder import RunRecorder


def recorded(program, reordered=False):
    recorder = RunRecorder(reordered=reordered)
    recorder.start()
    try:
        program()
    finally:
        recorder.stop()
    return recorder.seen(), recorder.edges()


def on_rank(rank, program):
    return recorded(program)[0]


@cache
def reference(plain, *args):
    """Return what `plain(*args)` records, and with products in another order."""
    (seen, edges), (other, _) = (recorded(partial(plain, *args), reordered) for reordered in (False, True))
    return seen, edges, other


def compared(plain, program, world, rename=()):
    """Compare a program on ranks with a plain one: a function and its arguments."""
    ranks = run_ranks(on_rank, world, program, timeout_s=120, group_timeout_s=60)
    return compare_recordings(*reference(*plain), ranks, dict(rename))
