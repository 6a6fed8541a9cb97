"""Symmetric memory as kernels want it: where each rank's part is mapped here."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from weft import _C
from weft.comm.communicator import Communicator, backends_of
from weft.comm.engine import Engine
from weft.comm.rendezvous import _describe_process


@dataclass(frozen=True)
class SymmetricMemory:
    """One allocation of the same size on every rank, mapped by all.

    Attributes:
        rank: whose view this is.
        parts: [bytes] uint8 each: every rank's part, in rank order, as this rank reaches it.
        multicast: an address that writes to all parts at once; 0 where there is none.
        owner: what keeps the memory mapped.
    """

    rank: int
    parts: tuple[torch.Tensor, ...]
    multicast: int
    owner: object

    @property
    def mine(self) -> torch.Tensor:
        return self.parts[self.rank]

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(part.data_ptr() for part in self.parts)


def open_symmetric_memory(ranks: Communicator, bytes: int, device: torch.device) -> SymmetricMemory:
    """A window of zeros. A collective call: every rank asks for the same size; all parts are zero when it returns.

    Raises:
        ValueError: ranks that do not reach each other's memory.
        CollectiveMismatchError: ranks ask for different sizes. OSError: the memory cannot be had; on every rank.
    """
    if device.type == "cpu":
        return _on_cpu(ranks, bytes)
    if device.type != "cuda":
        raise ValueError(f"there is symmetric memory on cpu and cuda devices, not on {device}")
    group = ranks.cuda_group()
    if group is None:
        raise ValueError(
            f'symmetric memory on {device} needs a group that has a backend for cuda, as "cpu:weft,cuda:nccl"; group '
            f'"{ranks.name}" has {backends_of(ranks.group)}'
        )
    with torch.cuda.device(device):
        return _on_gpu(ranks, group.group_name, bytes, torch.device("cuda", torch.cuda.current_device()))


def _on_cpu(ranks: Communicator, bytes: int) -> SymmetricMemory:
    if not isinstance(ranks.engine, Engine):
        raise ValueError('symmetric memory needs a group of the "weft" backend whose ranks are on one machine')
    region = ranks.engine.group.create_region(bytes)  # fresh pages of a memfd: zeros
    parts = [(ctypes.c_uint8 * bytes).from_address(address) for address in region.addresses]
    return SymmetricMemory(ranks.rank, tuple(torch.frombuffer(part, dtype=torch.uint8) for part in parts), 0, region)


def _on_gpu(ranks: Communicator, name: str, bytes: int, device: torch.device) -> SymmetricMemory:
    """Each rank allocates and zeroes its part; where all could, they map each other's."""
    # Not torch's `empty`: that takes from a pool, in which one rank's piece may lie at another place than its peer's.
    memory, error = _tried(lambda: _zeros(bytes, device))
    told = ranks.all_gather_object(Asked(bytes, error, **_place(device)))
    _check(ranks, told)
    handle, error = _tried(lambda: _SymmetricMemory.rendezvous(memory, name))
    for rank, reason in enumerate(ranks.all_gather_object(error)):
        if reason:
            raise OSError(f"rank {rank} could not map the symmetric memory of its peers: {reason}")
    parts = tuple(handle.get_buffer(rank, (max(bytes, 1),), torch.uint8)[:bytes] for rank in range(ranks.world_size))
    return SymmetricMemory(ranks.rank, parts, handle.multicast_ptr or 0, (memory, handle))


def _zeros(bytes: int, device: torch.device) -> torch.Tensor:
    memory = _SymmetricMemory.empty_strided_p2p((max(bytes, 1),), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)  # nobody may see it before it is zero
    return memory


def _tried(action: Callable[[], Any]) -> tuple[Any, str]:
    """What the action gave, and what it raised: the ranks must hear of it before one of them goes its own way."""
    try:
        given = action()
    except (RuntimeError, OSError) as error:
        return None, str(error).strip().splitlines()[0] or type(error).__name__
    return given, "" if given is not None else "torch does not know the memory"


@dataclass(frozen=True)
class Asked:
    """What one rank tells the others of the memory that it wants to share."""

    bytes: int
    error: str
    machine: str
    gpu: str
    may_share_gpu: bool


def _place(device: torch.device) -> dict[str, Any]:
    return {
        "machine": _describe_process()["machine"],
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "may_share_gpu": os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
    }


def _check(ranks: Communicator, told: list[Asked]) -> None:
    """Raises on every rank what keeps any two from sharing memory."""
    first = told[0]
    for rank, asked in enumerate(told):
        if asked.bytes != first.bytes:
            raise _C.CollectiveMismatchError(
                f'symmetric memory of group "{ranks.name}": rank 0 asks for {first.bytes} bytes, rank {rank} for '
                f"{asked.bytes}"
            )
        if asked.machine != first.machine:
            raise ValueError(
                f'symmetric memory needs a group on one machine; ranks 0 and {rank} of group "{ranks.name}" are on two'
            )
        same = next(other for other, one in enumerate(told) if one.gpu == asked.gpu)
        if same != rank and not all(one.may_share_gpu for one in told):
            raise ValueError(
                f'symmetric memory needs a GPU for each rank; ranks {same} and {rank} of group "{ranks.name}" are on '
                "one (for tests, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 on every rank permits it)"
            )
    for rank, asked in enumerate(told):
        if asked.error:
            raise OSError(f"rank {rank} could not get {asked.bytes} bytes of symmetric memory: {asked.error}")
