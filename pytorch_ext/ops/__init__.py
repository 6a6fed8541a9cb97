"""Autograd functions with their collectives. Each docstring says what travels."""

from weft.ops.cross_entropy import parallel_cross_entropy
from weft.ops.embedding import parallel_embedding
from weft.ops.linear import Place, column_parallel_linear, row_parallel_linear
from weft.ops.regions import gather, split

__all__ = [
    "Place",
    "column_parallel_linear",
    "gather",
    "parallel_cross_entropy",
    "parallel_embedding",
    "row_parallel_linear",
    "split",
]
