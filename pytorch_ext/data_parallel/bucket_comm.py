"""Transports of gradient buckets between ranks during backward, on the engine's thread or on a side stream.

Backward starts a transport once for each bucket, in the order of the buckets, and waits for all of them at its end.
With `scatter` each rank gets its own part of the sum, otherwise all of it. Sums are averaged on request.
`bucket.squared_norm` becomes the squared norm of the part that this rank gets.

Where weft's kernels take a bucket (on GPUs), one launch packs its gradients into the memory that travels, in the wire
type. After the reduction one pass scales, converts to the bucket's type and measures the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator
from weft.comm.dtypes import op_code
from weft.comm.fusion import Fusion
from weft.data_parallel.buckets import Bucket, Packing
from weft.data_parallel.grad_norm import BLOCK
from weft.ops import kernel_choice

Wait = Callable[[], object]


@dataclass(frozen=True)
class Transport:
    """Base of the transports.

    Attributes:
        ranks: ranks that exchange the buckets.
        wire_dtype: type to which fp32 gradients are rounded before they travel; None leaves them as they are.
        divisor: number by which the sum is divided: 1, or the number of all ranks, also where fewer have a bucket.
        scatter: leave each rank only its own part of the sum.
        packs: buckets that weft's kernels take are packed by them.
    """

    packs: ClassVar[bool] = True
    ranks: Communicator
    wire_dtype: torch.dtype | None
    divisor: int
    scatter: bool

    def wire_of(self, flat: torch.Tensor) -> torch.dtype | None:
        return self.wire_dtype if flat.dtype == torch.float32 else None

    def averaging(self) -> tuple[dist.ReduceOp.RedOpType, float]:
        """Return the operator and the scale of a sum that is divided, with the same bits everywhere."""
        if self.divisor & (self.divisor - 1) == 0:  # a power of two: multiplying gives the same bits faster
            return dist.ReduceOp.SUM, 1 / self.divisor
        return dist.ReduceOp.AVG, self.ranks.world_size / self.divisor

    def start(self, bucket: Bucket, overlap: bool) -> Wait:
        """Start the reduction of a bucket.

        Args:
            bucket: gradients to reduce in place.
            overlap: False lets the transport finish before it returns.

        Returns:
            A function that waits for the reduction.
        """
        raise NotImplementedError


class OnEngine(Transport):
    """Transport on the thread of the weft backend: sums in fp32, in the order of ranks, in one pass over the data."""

    packs: ClassVar[bool] = False

    def start(self, bucket: Bucket, overlap: bool) -> Wait:
        engine = self.ranks.engine
        assert engine is not None
        if self.scatter:
            return self._scatter(engine, bucket, overlap)
        op, scale = self.averaging()
        fusion = Fusion(self.wire_of(bucket.flat), scale, bucket.squared_norm)
        pending = engine.all_reduce(bucket.flat, op_code(op), wait=not overlap, fusion=fusion)
        return _nothing if pending is None else pending.wait

    def _scatter(self, engine, bucket: Bucket, overlap: bool) -> Wait:
        wire, world_size = self.wire_of(bucket.flat), self.ranks.world_size
        sent = bucket.flat if wire is None else bucket.flat.to(wire)
        parts, own = list(sent.chunk(world_size)), bucket.own_part
        op = op_code(dist.ReduceOp.SUM if self.divisor == 1 else dist.ReduceOp.AVG)
        pending = engine.reduce_scatter(parts, parts[self.ranks.rank], op, wait=not overlap)

        def wait() -> None:
            if pending is not None:
                pending.wait()
            if wire is not None:
                own.copy_(parts[self.ranks.rank])
            if self.divisor not in (1, world_size):  # experts, which fewer ranks have
                own.mul_(world_size / self.divisor)
            measure(own, bucket)

        return wait


class OnBackend(Transport):
    """Transport over another backend of torch.distributed, at the end of backward and in that backend's order."""

    def start(self, bucket: Bucket, overlap: bool) -> Wait:
        return lambda: self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> None:
        flat, wire = bucket.flat, self.wire_of(bucket.flat)
        if bucket.packing is not None:
            return self._reduce_packed(bucket, bucket.packing)
        op, scale = self.averaging()
        if not self.scatter:
            self.ranks.all_reduce_(flat, op, Fusion(wire, scale))
            return measure(flat, bucket)
        parts = list((flat if wire is None else flat.to(wire)).chunk(self.ranks.world_size))
        received = torch.empty_like(parts[self.ranks.rank])
        self.ranks.reduce_scatter_into(parts, received, op)
        own = bucket.own_part
        own.copy_(received).mul_(scale)
        return measure(own, bucket)

    def _reduce_packed(self, bucket: Bucket, packing: Packing) -> None:
        sent, (op, scale) = packing.pack(), self.averaging()
        if self.scatter:
            parts = list(sent.chunk(self.ranks.world_size))
            received = torch.empty_like(parts[self.ranks.rank])
            self.ranks.reduce_scatter_into(parts, received, op)
            return packing.finish(received, bucket.own_part, scale)
        if not self.ranks.fuses_scale(sent):  # one pass more, which also averages
            self.ranks.all_reduce_(sent)
            return packing.finish(sent, bucket.flat, 1 / self.divisor)
        self.ranks.all_reduce_(sent, op, Fusion.of(sent, scale=scale))
        return packing.finish(sent, bucket.flat, 1.0)


class OnSideStream(OnBackend):
    """Transport on a stream of its own, which waits for every stream that wrote a gradient of the bucket."""

    def start(self, bucket: Bucket, overlap: bool) -> Wait:
        device = bucket.flat.device
        stream = _side_stream(device)
        for event in bucket.written:
            stream.wait_event(event)
        bucket.written.clear()
        with torch.cuda.stream(stream):
            self.reduce(bucket)
        return lambda: torch.cuda.current_stream(device).wait_stream(stream)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def transport_to(device: torch.device, ranks: Communicator) -> type[Transport]:
    """Return the class of the transport for gradients on `device` between these ranks.

    On the CPU, `prefer("kernel")` takes the GPU's path to weft's kernels, in Triton's interpreter.
    """
    if device.type == "cuda":
        return OnSideStream
    return OnEngine if ranks.engine is not None and not kernel_choice.on_kernel(device) else OnBackend


def measure(part: torch.Tensor, bucket: Bucket) -> None:
    """Set the bucket's squared norm to that of `part`, in a pass of its own."""
    if bucket.packing is not None:
        bucket.packing.measure(part)
        return
    if part.is_cuda:
        bucket.squared_norm.copy_(torch.linalg.vector_norm(part, dtype=torch.float64).square())
        return
    bucket.squared_norm.zero_()
    for block in part.split(BLOCK):  # torch's fp64 norm of an fp32 tensor takes ten times as long
        wide = block.double()
        bucket.squared_norm += torch.dot(wide, wide)


def _nothing() -> None:
    """Return at once, as the wait for a finished operation."""
