"""Argument lists that tests and benches share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mlp:
    """A two-layer perceptron on `tokens` tokens."""

    hidden: int
    intermediate: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.hidden}/{self.intermediate}/{self.tokens}"


MLPS = [Mlp(64, 256, 16), Mlp(256, 1024, 64), Mlp(255, 1021, 63), Mlp(1024, 4096, 512)]
SMALL_MLPS = [Mlp(8, 16, 6), Mlp(7, 11, 5), Mlp(5, 4, 4), Mlp(33, 66, 9)]

# Elements of a collective: nothing, less than one a rank, around a cache line, around one staging buffer, several.
COUNTS = [0, 1, 2, 3, 17, 1023, 65536, 65537, 200_003]

# m, n, k of a product: one element, less than a tile, a tile, its odd neighbours, thin, deep, several tiles each way.
MATMULS = [(1, 1, 1), (5, 3, 7), (32, 32, 32), (33, 31, 65), (3, 70, 40), (67, 5, 130), (80, 48, 64), (70, 67, 129)]
