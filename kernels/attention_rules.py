"""What a chunk of attention computes: where its rows stand, and who sees whom. Needs neither torch nor Triton."""

from dataclasses import dataclass
from typing import NamedTuple


class Positions(NamedTuple):
    """Where the rows of a chunk stand in the sequence: `length` consecutive positions, then `second_length` more."""

    start: int
    length: int
    second_start: int = 0
    second_length: int = 0


@dataclass(frozen=True)
class Rules:
    """Who sees whom, and what becomes of a score.

    Attributes:
        left, right: how far behind and ahead of its own position a query sees; None is without bound. causal is
            right=0, a window of w positions left=w-1.
        scale: 1 / sqrt(D) where None.
        softcap: c of c tanh(score / c).
        dropout: the share of probabilities that are dropped; seed, head_start: of its random numbers (the number of the
            first head, where heads are split over ranks).
    """

    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    head_start: int = 0
