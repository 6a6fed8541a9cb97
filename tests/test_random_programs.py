"""Random models on random meshes are the unsplit model: outputs, gradients, and the same after an optimizer's step.

Hypothesis draws programs (tests/helpers/random_programs); ranks of one world run many of them, one after the other. CI
draws the same few every time. WEFT_RANDOM_PROGRAMS=3000 draws so many, WEFT_RANDOM_SEED=n others. A program that fails
is simplified and printed; `verdicts_of([Program(...)])` runs it again.
"""

import math
import os
import time
from collections import Counter

from hypothesis import Phase
from random_programs.drawing import TOGETHER, each_drawn
from random_programs.judging import verdicts_of
from random_programs.models import Program

COUNT = int(os.environ.get("WEFT_RANDOM_PROGRAMS", "12"))
SEED = int(os.environ.get("WEFT_RANDOM_SEED", "0"))
MOST_REFUSED = 0.15
SHRINKING_S = 100


def shrunk(number: int, known: dict[Program, tuple[str, str]]) -> str:
    """The simplest fault that hypothesis finds in time from those of this seed."""
    until = time.monotonic() + SHRINKING_S

    def is_right(program):
        if program not in known and time.monotonic() < until:
            (known[program],) = verdicts_of([program])
        kind, why = known.get(program, ("", ""))
        if kind == "fault":
            raise AssertionError(f"{program}\n{why}")

    try:
        each_drawn(number, is_right, Phase.shrink)
    except AssertionError as error:
        return str(error)
    return "none is found again"


def test_random_programs_are_the_unsplit_model():
    by_seed: dict[int, list[Program]] = {}
    for number in range(SEED, SEED + math.ceil(COUNT / TOGETHER)):
        each_drawn(number, by_seed.setdefault(number, []).append)
    these = list(dict.fromkeys(program for drawn in by_seed.values() for program in drawn))
    known = dict(zip(these, verdicts_of(these), strict=True))
    counts = Counter(kind for kind, _ in known.values())
    print(dict(counts))
    faults = {number: [p for p in drawn if known[p][0] == "fault"] for number, drawn in by_seed.items()}
    report = "\n\n".join(f"{p}\n{known[p][1]}" for found in faults.values() for p in found)
    first = next((number for number, found in faults.items() if found), None)
    assert first is None, f"{report}\n\nThe first, simplified:\n{shrunk(first, known)}"
    assert counts["refused"] <= MOST_REFUSED * len(these), [why for kind, why in known.values() if kind == "refused"]
    assert counts["unfit"] <= 0.1 * len(these), [why for kind, why in known.values() if kind == "unfit"]
