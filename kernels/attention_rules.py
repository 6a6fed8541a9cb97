"""Rules of a chunk of attention: the positions of its rows and their visibility. Needs neither torch nor Triton."""

from dataclasses import dataclass
from typing import NamedTuple


class Positions(NamedTuple):
    """Positions of a chunk's rows: `length` consecutive ones from `start`, then `second_length` from `second_start`."""

    start: int
    length: int
    second_start: int = 0
    second_length: int = 0


@dataclass(frozen=True)
class Rules:
    """Visibility of keys, and the treatment of scores.

    Attributes:
        left, right: number of positions that a query sees behind and ahead of its own; None is without bound. causal
            is right=0, a window of w positions is left=w-1.
        scale: factor of the scores, 1 / sqrt(D) if None.
        softcap: the c of c tanh(score / c).
        dropout: the share of probabilities that are dropped.
        seed: seed of the random numbers of dropout.
        head_start: number of the first head for these random numbers, where heads are split over ranks.
    """

    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    head_start: int = 0
