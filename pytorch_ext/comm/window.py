"""Symmetric memory as kernels want it: where each rank's part is mapped here."""

import ctypes
from dataclasses import dataclass

import torch

from weft.comm.communicator import Communicator, EngineCommunicator
from weft.comm.engine import Engine


@dataclass(frozen=True)
class Window:
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


def open_window(ranks: Communicator, bytes: int, device: torch.device) -> Window:
    """A window of zeros. A collective call: every rank asks for the same size; all parts are zero when it returns.

    Raises:
        ValueError: ranks that do not reach each other's memory.
        CollectiveMismatchError: ranks ask for different sizes. OSError: the memory cannot be had; on every rank.
    """
    if device.type == "cpu":
        return _on_cpu(ranks, bytes)
    raise ValueError(f"no symmetric memory on {device}")


def _on_cpu(ranks: Communicator, bytes: int) -> Window:
    if not isinstance(ranks, EngineCommunicator) or not isinstance(ranks.engine, Engine):
        raise ValueError('symmetric memory needs a group of the "weft" backend whose ranks are on one machine')
    region = ranks.engine.group.create_region(bytes)  # fresh pages of a memfd: zeros
    parts = [(ctypes.c_uint8 * bytes).from_address(address) for address in region.addresses]
    return Window(ranks.rank, tuple(torch.frombuffer(part, dtype=torch.uint8) for part in parts), 0, region)
