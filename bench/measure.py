"""The measurement of every bench: contenders in alternation in one process, quantiles over rounds, slowest rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.bench import progress
from weft.tools.rounds import in_turn

ROUNDS = 21


@dataclass(frozen=True)
class Quantiles:
    """The 20th, 50th and 80th percentile over rounds, in microseconds a call."""

    p20_us: float
    p50_us: float
    p80_us: float

    @classmethod
    def of(cls, samples_us: list[float]) -> "Quantiles":
        ordered = sorted(samples_us)
        return cls(*(ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8)))

    def spread(self, digits: int = 0) -> str:
        """Return the 20th and the 80th percentile as a table's cell."""
        return f"{self.p20_us:.{digits}f}-{self.p80_us:.{digits}f}"


def alternate(
    contenders: Mapping[str, Callable[[], object]], *, meet: Callable[[], object], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return each contender's microseconds a call in each round, measured in alternation.

    One round more runs first to warm up.

    Args:
        contenders: Function of each contender by name.
        meet: Barrier of the ranks, called before each measurement.
        rounds: Rounds that count.
        calls: Calls in one measurement.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for name, call, counts in in_turn(contenders, rounds, warm_up=1, report=progress.set_round):
        meet()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed_us = (time.perf_counter() - start) / calls * 1e6
        if counts:
            samples[name].append(elapsed_us)
    return samples


def slowest_rank(per_rank: Sequence[Mapping[str, list[float]]]) -> dict[str, Quantiles]:
    """Return the quantiles over rounds of the slowest rank of each round."""
    return {
        name: Quantiles.of([max(round_us) for round_us in zip(*(rank[name] for rank in per_rank), strict=True)])
        for name in per_rank[0]
    }
