"""What the ops call: collectives on one group, in the shape that layers need (in place, along a dimension, uneven).

Three of a kind: over the engine of a "weft" group, one crossing into C++ a call; over any other torch.distributed
backend, composed of what every backend has; and over what the tensor's device needs (`comm.device`), which uses both.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.backend import WeftProcessGroup
from weft.comm.dtypes import SUM, op_code
from weft.comm.engine import Engine
from weft.comm.fusion import Fusion
from weft.comm.record import WaitRecord, name_of, watch_for_losses

_of_group: dict[dist.ProcessGroup, "Communicator"] = {}  # of groups of torch's own, which cannot hold theirs


def communicator(group=None) -> "Communicator":
    """The communicator of a ProcessGroup, a one-dimensional DeviceMesh, or the default group (None).

    Raises:
        ValueError: this rank is not in the group, the mesh has several dimensions, or there is no default group.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError(
                "group=None means the default process group, and there is none: call weft.init_mesh() or "
                "torch.distributed.init_process_group() first"
            )
    elif isinstance(group, Communicator):
        return group
    else:
        group = _process_group(group)
    if isinstance(group, WeftProcessGroup):
        if group.communicator is None:
            group.communicator = _made_for(group)
        return group.communicator
    if group not in _of_group:
        for destroyed in [other for other in _of_group if other not in dist.distributed_c10d._world.pg_map]:
            del _of_group[destroyed]
        _of_group[group] = _made_for(group)
    return _of_group[group]


def _made_for(group: dist.ProcessGroup) -> "Communicator":
    from weft.comm.device import DeviceCommunicator  # made of the communicators of this file

    if isinstance(group, WeftProcessGroup) and "cuda" not in backends_of(group):
        return EngineCommunicator(group)
    return DeviceCommunicator(group)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The group's backends by device type, as they were asked for."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _process_group(group) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}; pass one of them, "
                f'like mesh["tp"]'
            )
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this rank is not in the group: new_group returned NON_GROUP_MEMBER here; "
            "build the layer only on the ranks that are in it"
        )
    raise TypeError(f"group must be a ProcessGroup, a one-dimensional DeviceMesh or None, got {type(group).__name__}")


class Communicator:
    """Collectives on one group. Tensors are of any shape; a shard's sizes are listed in rank order."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank: int = group.rank()
        self.world: int = group.size()
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
        timeout = getattr(self.group, "timeout", None)
        if not isinstance(self.group, WeftProcessGroup):
            with suppress(RuntimeError):  # a backend that has no options
                timeout = self.group._get_backend(self.group._device_types[0]).options._timeout
        return (timeout or default_pg_timeout).total_seconds()

    def notes(self, note: Any) -> list:
        """Every rank's note (anything that can be pickled), in rank order. Slow; for what is set up once."""
        told = [None] * self.world
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
            if isinstance(self.host, EngineCommunicator) and not watched and self.world > 1:
                watch_for_losses(self, self.host.engine)
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

    def gather_parts(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """parts[r] = rank r's x; parts are contiguous and of each rank's size."""
        raise NotImplementedError

    def scatter_sum(self, parts: list[torch.Tensor], output: torch.Tensor) -> None:
        """output = the sum over ranks of their parts[this rank]; all contiguous."""
        raise NotImplementedError

    def exchange(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """outputs[r] = rank r's parts[this rank]; outputs are contiguous and of the right size."""
        raise NotImplementedError

    def all_to_all(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the ranks have for this one, in rank order; parts may differ in the size of their first dimension."""
        rows = torch.tensor([[part.size(0) for part in parts]], device=parts[0].device)
        told = self.all_gather(rows, 0, [1] * self.world)[:, self.rank].tolist()
        outputs = [parts[0].new_empty([count, *parts[0].shape[1:]]) for count in told]
        self.exchange(parts, outputs)
        return outputs

    def all_sizes(self, x: torch.Tensor, dim: int) -> list[int]:
        """The size of every rank's x along `dim`, in rank order."""
        if self.world == 1:
            return [x.size(dim)]
        # Over the host's engine, if there is one: a GPU would have to be waited for.
        device = torch.device("cpu") if isinstance(self.host, EngineCommunicator) else x.device
        sizes = torch.empty(self.world, dtype=torch.int64, device=device)
        self.gather_parts(torch.tensor([x.size(dim)], device=device), list(sizes.split(1)))
        return sizes.tolist()

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' x one after another along `dim`; their sizes along it may differ."""
        if self.world == 1:
            return x
        dim %= x.dim()
        shape = list(x.shape)
        if _leads(x.shape, dim):  # the parts lie one after another in the result itself
            shape[dim] = sum(sizes)
            whole = x.new_empty(shape)
            self.gather_parts(x, list(whole.split(list(sizes), dim)))
            return whole
        parts = [x.new_empty([*shape[:dim], size, *shape[dim + 1 :]]) for size in sizes]
        self.gather_parts(x, parts)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """This rank's shard along `dim` of the sum over ranks of x."""
        if self.world == 1:
            return x
        parts = [part.contiguous() for part in x.split(list(sizes), dim)]
        output = torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format)
        self.scatter_sum(parts, output)
        return output


class EngineCommunicator(Communicator):
    """Over shared memory: sums in rank order in fp32, rounded once."""

    def __init__(self, group: WeftProcessGroup):
        super().__init__(group)
        self.engine = group.engine

    @property
    def transport(self) -> str:
        return "shared memory" if isinstance(self.engine, Engine) else "shared memory, and gloo between machines"

    def all_reduce_(
        self, x: torch.Tensor, op=dist.ReduceOp.SUM, fusion: Fusion | None = None, deterministic: bool = True
    ) -> torch.Tensor:
        if self.world > 1 or fusion is not None:
            self.engine.all_reduce(x, SUM if op is dist.ReduceOp.SUM else op_code(op), fusion=fusion)
        return x

    def broadcast_(self, x: torch.Tensor, root: int) -> torch.Tensor:
        self.engine.broadcast(x, root)
        return x

    def gather_parts(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.engine.all_gather(x, parts)

    def scatter_sum(self, parts: list[torch.Tensor], output: torch.Tensor) -> None:
        self.engine.reduce_scatter(parts, output)

    def exchange(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.engine.all_to_all(parts, outputs)


class BackendCommunicator(Communicator):
    """Over another backend of torch.distributed: uneven shards are padded, and sums are in that backend's order."""

    @property
    def transport(self) -> str:
        return ", ".join(sorted(set(backends_of(self.group).values())))

    def all_reduce_(
        self, x: torch.Tensor, op=dist.ReduceOp.SUM, fusion: Fusion | None = None, deterministic: bool = True
    ) -> torch.Tensor:
        if fusion is not None:
            fusion.around(lambda sent: self.all_reduce_(sent, op), x)
            return x
        if self.world == 1:
            return x
        whole = x.contiguous()
        dist.all_reduce(whole, op, group=self.group)
        return x if whole is x else x.copy_(whole)

    def broadcast_(self, x: torch.Tensor, root: int) -> torch.Tensor:
        whole = x.contiguous()
        dist.broadcast(whole, group=self.group, group_src=root)
        return x if whole is x else x.copy_(whole)

    def exchange(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        flat = torch.cat([part.reshape(-1) for part in parts])
        received = flat.new_empty(sum(output.numel() for output in outputs))
        sizes = [output.numel() for output in outputs]
        dist.all_to_all_single(received, flat, sizes, [part.numel() for part in parts], group=self.group)
        for output, part in zip(outputs, received.split(sizes), strict=True):
            output.view(-1).copy_(part)

    def gather_parts(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        longest = max(part.numel() for part in parts)
        padded = _padded(x, longest)
        received = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(received, padded, group=self.group)
        for part, whole in zip(parts, received, strict=True):
            part.view(-1).copy_(whole[: part.numel()])

    def scatter_sum(self, parts: list[torch.Tensor], output: torch.Tensor) -> None:
        longest = max(part.numel() for part in parts)
        received = output.new_empty(longest)
        dist.reduce_scatter(received, [_padded(part, longest) for part in parts], group=self.group)
        output.view(-1).copy_(received[: output.numel()])


def _leads(shape: torch.Size, dim: int) -> bool:
    return all(size == 1 for size in shape[:dim])


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    flat = x.reshape(-1)
    return flat if flat.numel() == length else torch.cat([flat, flat.new_zeros(length - flat.numel())])
