"""How the gradients of a bucket cross ranks while backward goes on: on the engine's thread or on a side stream.

A transport is started in backward, once for each bucket and in the order of the buckets, and is waited for at the end.
`scatter` leaves each rank its own part of the sum, else every rank has all of it. Sums are averaged where asked, and
`bucket.squared_norm` becomes that of what this rank was left.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator
from weft.comm.dtypes import SUM, op_code
from weft.comm.fusion import Fusion
from weft.data_parallel.buckets import Bucket

_AVERAGE = op_code(dist.ReduceOp.AVG)
BLOCK = 1 << 15  # elements; in fp64 they stay in the second-level cache
Wait = Callable[[], object]


@dataclass(frozen=True)
class Transport:
    """What all of them know.

    Attributes:
        wire_dtype: what fp32 gradients are rounded to before they travel.
        average: divide the sum by the number of ranks (`among` of them, where some have run out of inputs).
        scatter: see above.
    """

    ranks: Communicator
    wire_dtype: torch.dtype | None
    average: bool
    scatter: bool

    def wire_of(self, flat: torch.Tensor) -> torch.dtype | None:
        return self.wire_dtype if flat.dtype == torch.float32 else None

    def start(self, bucket: Bucket, among: int, overlap: bool) -> Wait:
        """Hands the bucket over; returns what waits for it. overlap=False: it may as well be done at once."""
        raise NotImplementedError

    def gather(self, part: torch.Tensor, parts: list[torch.Tensor], overlap: bool) -> Wait:
        """parts[r] = rank r's part, of parameters; returns what waits for it."""
        raise NotImplementedError


class OnEngine(Transport):
    """On the thread of the weft backend: fp32, in the order of ranks, everything in one pass over the data."""

    def start(self, bucket: Bucket, among: int, overlap: bool) -> Wait:
        engine = self.ranks.engine
        assert engine is not None
        if self.scatter:
            return self._scatter(engine, bucket, overlap)
        op, scale = SUM, 1.0
        if self.average and among & (among - 1) == 0:  # to multiply is then the same to the bit, and faster
            scale = 1 / among
        elif self.average:
            op, scale = _AVERAGE, self.ranks.world_size / among
        fusion = Fusion(self.wire_of(bucket.flat), scale, bucket.squared_norm)
        pending = engine.all_reduce(bucket.flat, op, wait=not overlap, fusion=fusion)
        return _nothing if pending is None else pending.wait

    def gather(self, part: torch.Tensor, parts: list[torch.Tensor], overlap: bool) -> Wait:
        engine = self.ranks.engine
        assert engine is not None
        pending = engine.all_gather(part, parts, wait=not overlap)
        return _nothing if pending is None else pending.wait

    def _scatter(self, engine, bucket: Bucket, overlap: bool) -> Wait:
        wire, world = self.wire_of(bucket.flat), self.ranks.world_size
        sent = bucket.flat if wire is None else bucket.flat.to(wire)
        parts, mine = list(sent.chunk(world)), bucket.parts(world)[self.ranks.rank]
        op = _AVERAGE if self.average else SUM
        pending = engine.reduce_scatter(parts, parts[self.ranks.rank], op, wait=not overlap)

        def wait() -> None:
            if pending is not None:
                pending.wait()
            if wire is not None:
                mine.copy_(parts[self.ranks.rank])
            measure(mine, bucket)

        return wait


class OnBackend(Transport):
    """Over another backend of torch.distributed, at the end of backward and in that backend's order."""

    def start(self, bucket: Bucket, among: int, overlap: bool) -> Wait:
        return lambda: self.reduce(bucket, among)

    def gather(self, part: torch.Tensor, parts: list[torch.Tensor], overlap: bool) -> Wait:
        self.ranks.all_gather_into(part, parts)  # now, since ranks may wait for parts in different orders
        return _nothing

    def reduce(self, bucket: Bucket, among: int) -> None:
        flat, wire = bucket.flat, self.wire_of(bucket.flat)
        share = 1 / among if self.average else 1.0
        if not self.scatter:
            self.ranks.all_reduce_(flat, fusion=Fusion(wire, share))
            return measure(flat, bucket)
        parts = list((flat if wire is None else flat.to(wire)).chunk(self.ranks.world_size))
        mine = torch.empty_like(parts[self.ranks.rank])
        self.ranks.reduce_scatter_into(parts, mine)
        own = bucket.parts(self.ranks.world_size)[self.ranks.rank]
        own.copy_(mine).mul_(share)
        return measure(own, bucket)


class OnSideStream(OnBackend):
    """On a stream of its own, behind every stream that wrote a gradient of the bucket."""

    def start(self, bucket: Bucket, among: int, overlap: bool) -> Wait:
        device = bucket.flat.device
        stream = _side_stream(device)
        for event in bucket.written:
            stream.wait_event(event)
        bucket.written.clear()
        with torch.cuda.stream(stream):
            self.reduce(bucket, among)
        return lambda: torch.cuda.current_stream(device).wait_stream(stream)

    def gather(self, part: torch.Tensor, parts: list[torch.Tensor], overlap: bool) -> Wait:
        device = part.device
        stream = _side_stream(device)
        ahead = torch.cuda.current_stream(device)
        stream.wait_stream(ahead)
        with torch.cuda.stream(stream):
            self.ranks.all_gather_into(part, parts)
            gathered = stream.record_event()

        def wait() -> None:  # once for all uses: also those on the stream that forks into the one of the first
            for reader in (ahead, torch.cuda.current_stream(device)):
                reader.wait_event(gathered)

        return wait


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def transport_to(device: torch.device, ranks: Communicator) -> type[Transport]:
    """What carries gradients on that device between these ranks."""
    if device.type == "cuda":
        return OnSideStream
    return OnEngine if ranks.engine is not None else OnBackend


def measure(part: torch.Tensor, bucket: Bucket) -> None:
    """The squared norm, in a pass of its own."""
    if part.is_cuda:
        bucket.squared_norm.copy_(torch.linalg.vector_norm(part, dtype=torch.float64).square())
        return
    bucket.squared_norm.zero_()
    for block in part.split(BLOCK):  # torch's own norm in fp64 of an fp32 tensor takes ten times as long
        wide = block.double()
        bucket.squared_norm += torch.dot(wide, wide)


def _nothing() -> None:
    """To wait for what is done."""
