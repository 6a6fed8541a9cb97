"""Autograd functions with their collectives. Each docstring names the tensors that travel."""

from weft import _C
from weft.kernels import dispatch
from weft.ops.cross_entropy import parallel_cross_entropy
from weft.ops.embedding import parallel_embedding
from weft.ops.linear import ParallelContext, column_parallel_linear, row_parallel_linear
from weft.ops.linear_cross_entropy import parallel_linear_cross_entropy
from weft.ops.mappings import gather, split

dispatch.use(_C.launch)  # launches the kernels that were compiled ahead of time

__all__ = [
    "ParallelContext",
    "column_parallel_linear",
    "gather",
    "parallel_cross_entropy",
    "parallel_embedding",
    "parallel_linear_cross_entropy",
    "row_parallel_linear",
    "split",
]
