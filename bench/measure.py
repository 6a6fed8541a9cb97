"""How every bench measures: contenders in alternation in the same processes, quantiles over rounds, slowest rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.bench import progress

ROUNDS = 21


@dataclass(frozen=True)
class Quantiles:
    """Microseconds a call: the 20th, 50th and 80th percentile over rounds."""

    p20_us: float
    p50_us: float
    p80_us: float

    @classmethod
    def of(cls, samples_us: list[float]) -> "Quantiles":
        ordered = sorted(samples_us)
        return cls(*(ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8)))

    def spread(self, digits: int = 0) -> str:
        """The 20th and the 80th, for a table."""
        return f"{self.p20_us:.{digits}f}-{self.p80_us:.{digits}f}"


def alternate(
    contenders: Mapping[str, Callable[[], object]], *, meet: Callable[[], object], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Microseconds a call of each contender in each round. Ranks `meet` before each measurement; one round warms up.

    Each round starts with another contender, so that none always follows the same one.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders.items())
    for round_number in range(rounds + 1):
        progress.tell(round_number, rounds)
        order.append(order.pop(0))
        for name, call in order:
            meet()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            elapsed_us = (time.perf_counter() - start) / calls * 1e6
            if round_number > 0:
                samples[name].append(elapsed_us)
    return samples


def slowest_rank(per_rank: Sequence[Mapping[str, list[float]]]) -> dict[str, Quantiles]:
    """Quantiles over rounds of the slowest rank of each round."""
    return {
        name: Quantiles.of([max(round_us) for round_us in zip(*(rank[name] for rank in per_rank), strict=True)])
        for name in per_rank[0]
    }
