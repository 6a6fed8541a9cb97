"""Tensors in symmetric memory, which every rank of a group can reach."""

import math
from collections.abc import Sequence
from itertools import chain

import torch

from weft.comm.communicator import Communicator
from weft.comm.cuda import DeviceCommunicator
from weft.comm.engine import Engine
from weft.comm.registry import Group, communicator
from weft.comm.symmetric_memory import open_symmetric_memory


def empty_symmetric(
    *shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return an uninitialised tensor in memory that all ranks of the group have mapped.

    `weft.all_reduce` of it, or of a contiguous part of it, copies nothing: each rank reduces its slice in place and
    writes it to all ranks. On a GPU all ranks must then reduce the same part. On the CPU they may reduce different
    parts, which are then copied.

    A collective call: every rank asks for the same sizes in the same order. The memory lives as long as any tensor in
    it.

    Args:
        shape: shape of the tensor, as ints or one sequence.
        dtype: element type; None is torch.get_default_dtype().
        group: a group with a backend for the device; None is the default group.
        device: "cpu" or None, which needs the weft backend, or a CUDA device.

    Raises:
        ValueError: the ranks do not reach each other's memory. They run on several machines, use another backend on the
            CPU, or have GPUs without peer access.
        CollectiveMismatchError: the ranks ask for different sizes.
        OSError: a rank cannot allocate or map the memory; every rank raises it.

    Examples:
        >>> x = weft.empty_symmetric(1024).fill_(1.0)
        >>> weft.all_reduce(x)[:3]
        tensor([2., 2., 2.])
    """
    sizes: tuple[int, ...] = tuple(chain.from_iterable([size] if isinstance(size, int) else size for size in shape))
    dtype, device = dtype or torch.get_default_dtype(), torch.device(device or "cpu")
    ranks = communicator(group)
    if device.type == "cpu":
        return _on_cpu(ranks, sizes, dtype)
    window = open_symmetric_memory(ranks, math.prod(sizes) * dtype.itemsize, device)
    assert isinstance(ranks, DeviceCommunicator)  # only this class opens a window on a GPU
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
