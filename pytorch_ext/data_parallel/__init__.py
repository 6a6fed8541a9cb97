"""Data parallelism: each rank computes on its part of the batch, and backward sums gradients in buckets."""

from weft.data_parallel.comm_hooks import FSDPAllGather, FSDPReduceScatter, HookState, ddp_hook
from weft.data_parallel.data_parallel import DataParallel

__all__ = ["DataParallel", "FSDPAllGather", "FSDPReduceScatter", "HookState", "ddp_hook"]
