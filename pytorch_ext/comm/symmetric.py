"""Tensors that every rank of a group can reach."""

import math

import torch

from weft.comm.communicator import EngineCommunicator, communicator
from weft.comm.engine import Engine


def empty_symmetric(*shape, dtype: torch.dtype | None = None, group=None, device=None) -> torch.Tensor:
    """An uninitialised tensor in memory that all ranks of the group have mapped; `weft.all_reduce` of it, or of a
    contiguous part of it, copies nothing: each rank reduces its slice where it lies and writes it to all.

    A collective call: every rank asks for the same size, in the same order. The memory lives as long as a tensor in it.

    Args:
        shape: of the tensor, as ints or one sequence.
        dtype: torch.get_default_dtype() where None.
        group: of the weft backend; None is the default group.
        device: "cpu", for now.

    Raises:
        ValueError: a group of another backend, or of several machines. NotImplementedError: a device but the CPU.
        CollectiveMismatchError: ranks ask for different sizes. OSError: the memory cannot be had; on every rank.
    """
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    dtype = dtype or torch.get_default_dtype()
    if device is not None and torch.device(device).type != "cpu":
        raise NotImplementedError(f"empty_symmetric gives CPU memory for now, not memory on {device}")
    ranks = communicator(group)
    if not isinstance(ranks, EngineCommunicator) or not isinstance(ranks.engine, Engine):
        raise ValueError('empty_symmetric needs a group of the "weft" backend whose ranks are on one machine')
    count = math.prod(sizes)
    region = ranks.engine.group.create_region(count * dtype.itemsize)
    if count == 0:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(memoryview(region), dtype=dtype, count=count).view(sizes)
