"""Symmetric memory for kernels: the addresses at which this rank has mapped every rank's part."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from weft import _C
from weft.comm.communicator import Communicator, backends_of
from weft.comm.engine import Engine
from weft.comm.rendezvous import _describe_process

_SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # what torch reads


@dataclass(frozen=True)
class SymmetricMemory:
    """One allocation of the same size on every rank, mapped by all ranks.

    Attributes:
        rank: the rank that has mapped `parts`.
        parts: every rank's part as mapped here, in rank order; each is [bytes] uint8.
        multicast: an address that writes to all parts at once; 0 if there is none.
        owner: the object that keeps the memory mapped.
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
    """Allocate symmetric memory; every part is zero when this returns.

    A collective call: every rank asks for the same size.

    Args:
        ranks: the communicator of the group.
        bytes: size of each rank's part.
        device: a CPU or CUDA device.

    Raises:
        ValueError: the ranks do not reach each other's memory.
        CollectiveMismatchError: the ranks ask for different sizes.
        OSError: a rank cannot allocate or map the memory; every rank raises it.
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
    """Allocate and zero this rank's part; if every rank could, map the parts of all."""
    # Not torch's `empty`: it allocates from a pool, where ranks may get pieces at different places.
    memory, error = _tried(lambda: _zeros(bytes, device))
    requests = ranks.all_gather_object(Asked(bytes, error, _describe_process(), **_place(device)))
    _check(ranks, requests)
    ranks.watch([request.process for request in requests])
    with _with_equal_numbers(requests):
        handle, error = _tried(lambda: _SymmetricMemory.rendezvous(memory, name))
    for rank, reason in zip(ranks.global_ranks, ranks.all_gather_object(error), strict=True):
        if reason:
            raise OSError(f"rank {rank} could not map the symmetric memory of its peers: {reason}")
    parts = tuple(handle.get_buffer(rank, (max(bytes, 1),), torch.uint8)[:bytes] for rank in range(ranks.world_size))
    return SymmetricMemory(ranks.rank, parts, handle.multicast_ptr or 0, (memory, handle))


def _zeros(bytes: int, device: torch.device) -> torch.Tensor:
    memory = _SymmetricMemory.empty_strided_p2p((max(bytes, 1),), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)  # no rank may see it before it is zero
    return memory


def _tried(action: Callable[[], Any]) -> tuple[Any, str]:
    """Return the action's result and "", or None and the error's text, so that ranks can agree on what follows."""
    try:
        result = action()
    except (RuntimeError, OSError) as error:
        return None, str(error).strip().splitlines()[0] or type(error).__name__
    return result, "" if result is not None else "torch does not know the memory"


@dataclass(frozen=True)
class Asked:
    """One rank's request for symmetric memory, which every rank receives."""

    bytes: int
    error: str
    process: dict[str, Any]
    machine: str
    gpu: str
    fabric: str  # the NVLink fabric that joins the GPU with those of other machines, if any
    number: int | None  # of the GPU among those that the rank sees
    may_share_gpu: bool


@contextmanager
def _with_equal_numbers(requests: list[Asked]) -> Iterator[None]:
    """Let torch map the memory of GPUs that have equal numbers, as where each rank sees one GPU alone (Slurm, Ray).

    torch takes equal numbers for one GPU; `_check` has compared the GPUs themselves. Inside, torch makes no multicast
    address.
    """
    numbers = {(request.machine, request.number) for request in requests}
    before = os.environ.get(_SHARED_GPU)
    if len(numbers) < len(requests):
        os.environ[_SHARED_GPU] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SHARED_GPU, None)
        else:
            os.environ[_SHARED_GPU] = before


def _place(device: torch.device) -> dict[str, Any]:
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    processes = os.readlink("/proc/self/ns/pid")  # CUDA shares memory within one process namespace
    return {
        "machine": f"{_describe_process()['machine']}, {processes}",
        "gpu": gpu,
        "fabric": fabric_of(f"GPU-{gpu}"),
        "number": device.index,
        "may_share_gpu": os.environ.get(_SHARED_GPU) == "1",
    }


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )
    COMPLETED = 3


def fabric_of(gpu: str, library: str = "libnvidia-ml.so.1") -> str:
    """Return a name of the NVLink fabric and clique that join the GPU with GPUs of other machines; "" without one.

    Args:
        gpu: the GPU's UUID, with "GPU-" before it.
        library: the driver's management library (NVML).
    """
    try:
        nvml = ctypes.CDLL(library)
        handle, info = ctypes.c_void_p(), _FabricInfo()
        codes = (
            nvml.nvmlInit_v2(),
            nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(handle)),
            nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info)),
        )
    except (OSError, AttributeError):  # no driver, or one from before fabrics
        return ""
    joined = not any(codes) and info.state == _FabricInfo.COMPLETED and info.status == 0 and any(info.cluster)
    return f"{bytes(info.cluster).hex()}/{info.clique}" if joined else ""


def _check(ranks: Communicator, requests: list[Asked]) -> None:
    """Raise, on every rank, the reason that keeps any two ranks from sharing memory."""
    first, numbers = requests[0], ranks.global_ranks
    for rank, asked in zip(numbers, requests, strict=True):
        if asked.bytes != first.bytes:
            raise _C.CollectiveMismatchError(
                f'symmetric memory of group "{ranks.name}": rank {numbers[0]} asks for {first.bytes} bytes, rank '
                f"{rank} for {asked.bytes}"
            )
        if asked.machine != first.machine and not (asked.fabric and asked.fabric == first.fabric):
            raise ValueError(
                f'symmetric memory needs a group on one machine; ranks {numbers[0]} and {rank} of group "{ranks.name}" '
                "are on two, whose GPUs no NVLink fabric joins"
            )
        same = next(n for n, request in zip(numbers, requests, strict=True) if request.gpu == asked.gpu)
        if same != rank and not all(request.may_share_gpu for request in requests):
            raise ValueError(
                f'symmetric memory needs a GPU for each rank; ranks {same} and {rank} of group "{ranks.name}" are on '
                f"one (for tests, {_SHARED_GPU}=1 on every rank permits it)"
            )
    for rank, asked in zip(numbers, requests, strict=True):
        if asked.error:
            raise OSError(f"rank {rank} could not get {asked.bytes} bytes of symmetric memory: {asked.error}")
