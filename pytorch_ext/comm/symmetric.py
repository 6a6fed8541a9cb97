"""Tensors that every rank of a group can reach."""

import math

import torch

from weft.comm.communicator import Communicator
from weft.comm.cuda import DeviceCommunicator
from weft.comm.engine import Engine
from weft.comm.registry import communicator
from weft.comm.window import open_window


def empty_symmetric(*shape, dtype: torch.dtype | None = None, group=None, device=None) -> torch.Tensor:
    """An uninitialised tensor in memory that all ranks of the group have mapped; `weft.all_reduce` of it, or of a
    contiguous part of it, copies nothing: each rank reduces its slice where it lies and writes it to all.

    A collective call: every rank asks for the same size, in the same order. The memory lives as long as a tensor in it.
    On a GPU all ranks must then reduce the same part of it; on the CPU they agree to copy where they do not.

    Args:
        shape: of the tensor, as ints or one sequence.
        dtype: torch.get_default_dtype() where None.
        group: of a backend that reaches the device; None is the default group.
        device: "cpu" (None as well), which needs the weft backend, or a CUDA device.

    Raises:
        ValueError: ranks that do not reach each other's memory: of several machines, of another backend on the CPU, of
            GPUs without peer access. CollectiveMismatchError: ranks ask for different sizes. OSError: the memory cannot
            be had; on every rank.
    """
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    dtype, device = dtype or torch.get_default_dtype(), torch.device(device or "cpu")
    ranks = communicator(group)
    if device.type == "cpu":
        return _on_cpu(ranks, sizes, dtype)
    window = open_window(ranks, math.prod(sizes) * dtype.itemsize, device)
    assert isinstance(ranks, DeviceCommunicator)  # no other opens a window on a GPU
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype, device=device)
    return ranks.lend(window).view(dtype).view(sizes)


def _on_cpu(ranks: Communicator, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(ranks.engine, Engine):
        raise ValueError('empty_symmetric needs a group of the "weft" backend whose ranks are on one machine')
    count = math.prod(sizes)
    region = ranks.engine.group.create_region(count * dtype.itemsize)
    if count == 0:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(memoryview(region), dtype=dtype, count=count).view(sizes)
