"""Communication hooks: those of DDP on weft's buckets, and weft's hooks for DDP and FSDP2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from weft._C import CollectiveMismatchError
from weft.comm.dtypes import AVERAGE, SUM, op_code
from weft.comm.engine import promise
from weft.comm.fusion import Fusion
from weft.comm.registry import Group, communicator
from weft.data_parallel.bucket_comm import Transport, Wait, measure
from weft.data_parallel.buckets import Bucket


class GradBucket:
    """Bucket with the interface of torch.distributed.GradBucket, which only DDP can construct."""

    def __init__(self, bucket: Bucket):
        self._bucket, self._buffer = bucket, bucket.flat

    def index(self) -> int:
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        return [slot.view for slot in self._bucket.slots if slot.view is not None]

    def parameters(self) -> list[torch.Tensor]:
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        return self._bucket.is_last


Hook = Callable[[Any, GradBucket], torch.futures.Future]


@dataclass(frozen=True)
class ByHook(Transport):
    """Transport through a communication hook of the user, which returns a future of the reduced bucket."""

    state: Any
    hook: Hook

    def start(self, bucket: Bucket, overlap: bool) -> Wait:
        if bucket.packing is not None:
            bucket.packing.pack()
        future = self.hook(self.state, GradBucket(bucket))

        def wait() -> None:
            result = future.wait()
            result = result if isinstance(result, torch.Tensor) else result[0]
            if result.numel() != bucket.flat.numel():
                raise ValueError(
                    f"register_comm_hook: the hook's future gave {result.numel()} elements for bucket {bucket.index}, "
                    f"and the bucket has {bucket.flat.numel()}: return all of bucket.buffer(), reduced"
                )
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result.reshape(-1))
            measure(bucket.flat, bucket)

        return wait


@dataclass(frozen=True)
class HookState:
    """State of `ddp_hook`.

    Attributes:
        group: ranks that average; None is the default group. It may be another group than DDP's with the same ranks.
            DDP over gloo then keeps gloo for everything else.
        wire_dtype: type to which fp32 gradients are rounded before they travel, bfloat16 or float16. None leaves them
            in fp32.

    Examples:
        >>> weft.HookState(wire_dtype=torch.bfloat16).wire_dtype
        torch.bfloat16
    """

    group: Any = None
    wire_dtype: torch.dtype | None = None


def ddp_hook(state: HookState | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP's gradients in fp32, in the order of ranks.

    A communication hook for torch's DistributedDataParallel:

        ddp.register_comm_hook(weft.HookState(wire_dtype=torch.bfloat16), weft.ddp_hook)

    Args:
        state: ranks and type on the wire; None is `HookState()`.
        bucket: bucket of DDP, reduced in place.

    Returns:
        Future of the bucket's flat tensor, averaged.

    Examples:
        >>> model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
        >>> model.register_comm_hook(weft.HookState(wire_dtype=torch.bfloat16), weft.ddp_hook)
    """
    state = state or HookState()
    flat, ranks = bucket.buffer(), communicator(state.group)
    fusion = Fusion.of(flat, state.wire_dtype if flat.dtype == torch.float32 else None)
    future, complete = promise()
    if flat.is_cuda or ranks.engine is None:
        ranks.all_reduce_(flat, dist.ReduceOp.AVG, fusion)
        complete(flat)
    else:
        pending = ranks.engine.all_reduce(flat, AVERAGE, wait=False, fusion=fusion)
        assert pending is not None  # wait=False returns the pending operation
        pending.then(lambda error: complete(flat if error is None else error))
    return future


class FSDPReduceScatter(ReduceScatter):
    """Reduce-scatter for FSDP2 that sums and averages in fp32, in the order of ranks.

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(weft.FSDPReduceScatter(group))

    Args:
        group: ranks that sum, the same as the mesh's; None is the mesh's own group.

    Raises:
        ValueError: FSDP asks for another operation than a sum or an average; raised when it calls the reduce-scatter.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> model = fully_shard(nn.Linear(4, 1), mesh=weft.init_mesh(dp=2)["dp"])
        >>> model.set_custom_reduce_scatter(weft.FSDPReduceScatter())
        >>> model(torch.ones(2, 4)).sum().backward()
    """

    def __init__(self, group: Group = None):
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        ranks = communicator(group if self._group is None else self._group)
        if op_code(op) not in (SUM, AVERAGE):
            raise ValueError(f"FSDPReduceScatter sums and averages; FSDP asked for {op}")
        ranks.reduce_scatter_into(list(input_tensor.chunk(ranks.world_size)), output_tensor, op)


class FSDPAllGather(AllGather):
    """All-gather for FSDP2 by weft's engine or kernels.

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(weft.FSDPAllGather(group))

    Args:
        group: ranks that gather, the same as the mesh's; None is the mesh's own group.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> model = fully_shard(nn.Linear(4, 1), mesh=weft.init_mesh(dp=2)["dp"])
        >>> model.set_custom_all_gather(weft.FSDPAllGather())
        >>> model(torch.ones(2, 4)).shape
        torch.Size([2, 1])
    """

    def __init__(self, group: Group = None):
        self._group = group
        self.module = ""  # whose parameters are gathered, for errors

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        ranks = communicator(group if self._group is None else self._group)
        try:
            ranks.all_gather_into(input_tensor, list(output_tensor.chunk(ranks.world_size)))
        except CollectiveMismatchError as error:
            if self.module:
                error.args = (
                    f"{error} It gathers the parameters of {self.module!r}: every rank must call the same modules in "
                    "the same order, also one that its batch does not need (times zero)",
                )
            raise
