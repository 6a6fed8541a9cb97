"""Collectives on one group in the forms that the ops need: in place, along a dimension, of uneven sizes."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.nn.functional import rms_norm

from weft.comm.engine import Engine
from weft.comm.fusion import Fusion
from weft.comm.multi_host import SpanningEngine
from weft.comm.wait_record import Processes, WaitRecord, name_of, watch_for_losses


class Communicator:
    """Collectives on one group; the base class of every transport.

    Tensors may have any shape. Lists of sizes and of parts are in rank order.

    Attributes:
        group: the process group.
        rank: this rank in the group.
        world_size: ranks in the group.
        unreached: by device, why ranks do not reach each other's memory there; "" if they do.
        known_attention: attention by the kind of its call (ops/context_attention.py).
        compared: kinds of calls; the ranks have compared the first call of each.
        workspaces: by kernel and device, the workspaces of kernels that write to other ranks.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self._records: dict[torch.device, WaitRecord] = {}
        self._processes: Processes | None = None
        self.unreached: dict[torch.device, str] = {}
        self.known_attention: dict[tuple, Any] = {}
        self.compared: set[str] = set()
        self.workspaces: dict[tuple[str, torch.device], Any] = {}

    @property
    def name(self) -> str:
        return name_of(self.group)

    @cached_property
    def global_ranks(self) -> list[int]:
        """Each rank's number in the whole program, which is the one that errors name."""
        return dist.get_process_group_ranks(self.group)

    @property
    def transport(self) -> str:
        """Transport in use, and why no faster one is."""
        raise NotImplementedError

    @property
    def engine(self) -> Engine | SpanningEngine | None:
        """weft engine for tensors in host memory; None if the group has none."""
        return None if self.host is self else self.host.engine

    @property
    def host(self) -> "Communicator":
        """Communicator for tensors in host memory: this one, or a part of it."""
        return self

    def device_of_numbers(self, device: torch.device) -> torch.device:
        """Return the device for a few numbers that the hosts exchange: the CPU, so that no host waits for its GPU.

        Args:
            device: where the numbers go if the group serves no tensors in host memory; then the CPU stands for the
                rank's GPU.
        """
        return torch.device("cpu")

    def cuda_group(self) -> dist.ProcessGroup | None:
        """Return the group for CUDA tensors, which has its own store; None if no backend serves them.

        Every rank must take part in the first call.
        """
        return None

    def p2p_group(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group whose ranks send each other tensors on `device`.

        Messages of one batch must be one call of the backend: NCCL's ranks wait for each other in every message. torch
        makes it one call only for a group that is no more than a ProcessGroup, not for one of the weft backend.

        Every rank must take part in the first call for CUDA. The batches may then be of a few ranks.
        """
        return self.group

    @property
    def timeout_s(self) -> float:
        """Seconds that a kernel waits for another rank: the group's timeout, and no more than WEFT_WAIT_TIMEOUT_S.

        A kernel that waits holds the GPU, so its limit is shorter than usual for groups: 300 s if it is not set.
        """
        timeout = getattr(self.group, "timeout", None)  # set by the weft backend
        if not isinstance(timeout, timedelta):
            with suppress(RuntimeError):  # a backend without options
                timeout = self.group._get_backend(self.group._device_types[0]).options._timeout
        return min((timeout or default_pg_timeout).total_seconds(), _wait_timeout_s())

    def all_gather_object(self, note: Any) -> list:
        """Return every rank's `note` (any object that pickles), in rank order. Slow: use it during set-up only."""
        gathered = [None] * self.world_size
        with torch.inference_mode(False):  # gloo writes to the tensors that it gets
            dist.all_gather_object(gathered, note, group=self.group)
        return gathered

    def record(self, device: torch.device) -> WaitRecord:
        """Return the record of failed waits that kernels of this group write on `device`.

        The first call makes it. From then on, waiting kernels stop if the group's engine loses a rank.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._records:
            watched = bool(self._records)
            self._records[device] = WaitRecord(self.group, device, self.timeout_s)
            if self.engine is not None and not watched and self.world_size > 1:
                watch_for_losses(self, self.engine)
        return self._records[device]

    def drain(self) -> None:
        """Wait for the kernels that this rank has launched.

        Call it before the rank leaves: a peer that sees it exit stops waiting, and may read unfinished data.
        """
        for device in self._records:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def watch(self, processes: list[dict]) -> None:
        """Stop waiting kernels once a rank's process has ended, also if the group has no engine that would notice.

        Args:
            processes: key and machine of each rank's process.
        """
        if self.engine is None and self._processes is None and self.world_size > 1:
            self._processes = Processes(processes, self.rank)
            watch_for_losses(self, self._processes)

    def check_waits(self) -> None:
        """Raise the failure that kernels recorded; see `weft.check_waits`."""
        for record in self.records:
            record.check_past(self._stopped_a_kernel)

    def _stopped_a_kernel(self) -> bool:
        """Return whether a kernel gave up because the host stopped it; such a kernel writes no record."""
        return False

    @property
    def records(self) -> list[WaitRecord]:
        return list(self._records.values())

    def __eq__(self, other) -> bool:
        return type(self) is type(other) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def __deepcopy__(self, memo):
        return self  # a copied model uses the same ranks

    def __reduce__(self):
        raise TypeError("a layer that is split over ranks cannot be pickled: save its state_dict instead")

    def all_reduce_(
        self, x: torch.Tensor, op=dist.ReduceOp.SUM, fusion: Fusion | None = None, deterministic: bool = True
    ) -> torch.Tensor:
        """Reduce x over ranks in place, and return it.

        Args:
            x: the tensor.
            op: the reduction.
            fusion: further steps of the same pass over the data.
            deterministic: False permits the order of summation of the hardware.
        """
        raise NotImplementedError

    def all_reduce_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the RMS norm of residual + the sum of `partial` over ranks, and what it is of.

        All tensors have one floating-point type. May overwrite `partial`.
        """
        total = residual + self.all_reduce_(partial)
        return rms_norm(total, weight.shape, weight, eps), total

    def fuses_scale(self, x: torch.Tensor) -> bool:
        """Return whether all_reduce_ applies a fusion's scale to x in its own pass, before it rounds.

        A collective call if it is the first about CUDA tensors.
        """
        return False

    def barrier(self) -> None:
        """Return once every rank has called this."""
        raise NotImplementedError

    def broadcast_(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Copy the root's x to every rank in place, and return it."""
        raise NotImplementedError

    def all_gather_into(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Set parts[r] to rank r's x. Parts are contiguous, and part r has the size of rank r's x."""
        raise NotImplementedError

    def reduce_scatter_into(self, parts: list[torch.Tensor], output: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        """Set `output` to the reduction over ranks of parts[this rank]. All tensors are contiguous."""
        raise NotImplementedError

    def all_to_all_into(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Set outputs[r] to rank r's parts[this rank]. Outputs are contiguous and of the right size."""
        raise NotImplementedError

    def all_to_all(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send parts[r] to rank r; return the received parts in rank order.

        Parts may differ in the size of their first dimension.
        """
        where = self.device_of_numbers(parts[0].device)
        rows = torch.tensor([[part.size(0) for part in parts]], device=where)
        counts = self.all_gather(rows, 0, [1] * self.world_size)[:, self.rank].tolist()
        outputs = [parts[0].new_empty([count, *parts[0].shape[1:]]) for count in counts]
        self.all_to_all_into(parts, outputs)
        return outputs

    def all_sizes(self, x: torch.Tensor, dim: int) -> list[int]:
        """Return the size of every rank's x along `dim`, in rank order."""
        if self.world_size == 1:
            return [x.size(dim)]
        device = self.device_of_numbers(x.device)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=device)
        self.all_gather_into(torch.tensor([x.size(dim)], device=device), list(sizes.split(1)))
        return sizes.tolist()

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return the x of all ranks concatenated along `dim`; sizes[r] is the size of rank r's x along it."""
        if self.world_size == 1:
            return x
        dim %= x.dim()
        shape = list(x.shape)
        if _leads(x.shape, dim):  # each part is one piece of the result's memory
            shape[dim] = sum(sizes)
            whole = x.new_empty(shape)
            self.all_gather_into(x, list(whole.split(list(sizes), dim)))
            return whole
        return torch.cat(self.all_gather_parts(x, dim, sizes), dim)

    def all_gather_parts(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the x of each rank; sizes[r] is the size of rank r's x along `dim`."""
        if self.world_size == 1:
            return [x]
        parts = [x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]]) for size in sizes]
        self.all_gather_into(x, parts)
        return parts

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's shard of the sum of x over ranks; sizes[r] is the size of rank r's shard along `dim`."""
        if self.world_size == 1:
            return x
        parts = [part.contiguous() for part in x.split(list(sizes), dim)]
        output = torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format)
        self.reduce_scatter_into(parts, output)
        return output


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return {device type: backend} of the group, as configured at its creation."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _wait_timeout_s() -> float:
    given = os.environ.get("WEFT_WAIT_TIMEOUT_S", "300")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 1e9:
        raise ValueError(f"WEFT_WAIT_TIMEOUT_S={given} must be a number of seconds, more than 0 and at most 1e9")
    return seconds


def _leads(shape: torch.Size, dim: int) -> bool:
    return all(size == 1 for size in shape[:dim])
