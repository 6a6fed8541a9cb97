"""Layers that stand where torch.nn's stand: wiring only."""

from weft.nn.embedding import ParallelEmbedding
from weft.nn.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from weft.nn.sequence import sum_gradients

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "ParallelLinear", "RowParallelLinear", "sum_gradients"]
