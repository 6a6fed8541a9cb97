"""What the ops call: collectives on one group, in the shape that layers need (in place, along a dimension, uneven)."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from weft.comm.engine import Engine
from weft.comm.fusion import Fusion
from weft.comm.multi_host import SpanningEngine
from weft.comm.wait_record import WaitRecord, name_of, watch_for_losses


class Communicator:
    """Collectives on one group. Tensors are of any shape; a shard's sizes are listed in rank order."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self._records: dict[torch.device, WaitRecord] = {}
        self.unreached: dict[torch.device, str] = {}  # why ranks do not reach each other's memory there; "": they do
        self.workspaces: dict[tuple[str, torch.device], Any] = {}  # of kernels that write to other ranks

    @property
    def name(self) -> str:
        return name_of(self.group)

    @property
    def transport(self) -> str:
        """What carries the collectives, and why not the faster thing."""
        raise NotImplementedError

    @property
    def engine(self) -> Engine | SpanningEngine | None:
        """The weft engine that carries tensors in the host's memory, where the group has one."""
        return None if self.host is self else self.host.engine

    @property
    def host(self) -> "Communicator":
        """What serves tensors in the host's memory: this one, or a part of it."""
        return self

    def cuda_group(self) -> dist.ProcessGroup | None:
        """The group with a store of its own over which the ranks' GPUs meet; None where there is no backend for them.
        The first call of it is a collective one."""
        return None

    @property
    def timeout_s(self) -> float:
        """How long a kernel waits for another rank: the group's own timeout where torch tells it."""
        timeout = getattr(self.group, "timeout", None)  # the weft backend's
        if not isinstance(timeout, timedelta):
            with suppress(RuntimeError):  # a backend that has no options
                timeout = self.group._get_backend(self.group._device_types[0]).options._timeout
        return (timeout or default_pg_timeout).total_seconds()

    def all_gather_object(self, note: Any) -> list:
        """Every rank's note (anything that can be pickled), in rank order. Slow; for what is set up once."""
        told = [None] * self.world_size
        with torch.inference_mode(False):  # gloo writes to what it is given
            dist.all_gather_object(told, note, group=self.group)
        return told

    def record(self, device: torch.device) -> WaitRecord:
        """Where kernels of this group on that device leave word of a wait that failed. Made when first asked for; from
        then on kernels stop waiting once the group's engine, if it has one, has lost a rank."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._records:
            watched = bool(self._records)
            self._records[device] = WaitRecord(self.group, device, self.timeout_s)
            if self.engine is not None and not watched and self.world_size > 1:
                watch_for_losses(self, self.engine)
        return self._records[device]

    def check_waits(self) -> None:
        """Raises what kernels left word of; see `weft.check_waits`."""
        for record in self.records:
            record.check_past(self._stopped_a_kernel)

    def _stopped_a_kernel(self) -> bool:
        """Whether a kernel that leaves no record then gave up because the host told it to."""
        return False

    @property
    def records(self) -> list[WaitRecord]:
        return list(self._records.values())

    def __eq__(self, other) -> bool:
        return type(self) is type(other) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def __deepcopy__(self, memo):
        return self  # a copied model talks to the same ranks

    def __reduce__(self):
        raise TypeError("a layer that is split over ranks cannot be pickled: save its state_dict instead")

    def all_reduce_(
        self, x: torch.Tensor, op=dist.ReduceOp.SUM, fusion: Fusion | None = None, deterministic: bool = True
    ) -> torch.Tensor:
        """The sum over ranks (or what `op` says), in place. deterministic=False permits the order of the hardware."""
        raise NotImplementedError

    def broadcast_(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """The root's x, in place."""
        raise NotImplementedError

    def all_gather_into(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """parts[r] = rank r's x; parts are contiguous and of each rank's size."""
        raise NotImplementedError

    def reduce_scatter_into(self, parts: list[torch.Tensor], output: torch.Tensor) -> None:
        """output = the sum over ranks of their parts[this rank]; all contiguous."""
        raise NotImplementedError

    def all_to_all_into(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """outputs[r] = rank r's parts[this rank]; outputs are contiguous and of the right size."""
        raise NotImplementedError

    def all_to_all(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the ranks have for this one, in rank order; parts may differ in the size of their first dimension."""
        rows = torch.tensor([[part.size(0) for part in parts]], device=parts[0].device)
        told = self.all_gather(rows, 0, [1] * self.world_size)[:, self.rank].tolist()
        outputs = [parts[0].new_empty([count, *parts[0].shape[1:]]) for count in told]
        self.all_to_all_into(parts, outputs)
        return outputs

    def all_sizes(self, x: torch.Tensor, dim: int) -> list[int]:
        """The size of every rank's x along `dim`, in rank order."""
        if self.world_size == 1:
            return [x.size(dim)]
        # Over the host's engine, if there is one: a GPU would have to be waited for.
        device = torch.device("cpu") if self.engine is not None else x.device
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=device)
        self.all_gather_into(torch.tensor([x.size(dim)], device=device), list(sizes.split(1)))
        return sizes.tolist()

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' x one after another along `dim`; their sizes along it may differ."""
        if self.world_size == 1:
            return x
        dim %= x.dim()
        shape = list(x.shape)
        if _leads(x.shape, dim):  # the parts lie one after another in the result itself
            shape[dim] = sum(sizes)
            whole = x.new_empty(shape)
            self.all_gather_into(x, list(whole.split(list(sizes), dim)))
            return whole
        parts = [x.new_empty([*shape[:dim], size, *shape[dim + 1 :]]) for size in sizes]
        self.all_gather_into(x, parts)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """This rank's shard along `dim` of the sum over ranks of x."""
        if self.world_size == 1:
            return x
        parts = [part.contiguous() for part in x.split(list(sizes), dim)]
        output = torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format)
        self.reduce_scatter_into(parts, output)
        return output


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The group's backends by device type, as they were asked for."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _leads(shape: torch.Size, dim: int) -> bool:
    return all(size == 1 for size in shape[:dim])
