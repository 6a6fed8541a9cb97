"""Flat buckets of gradients, each of one type, in the order in which backward produces the gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from weft import _C
from weft.comm.communicator import Communicator
from weft.comm.symmetric_tensor import empty_symmetric
from weft.ops import kernel_choice
from weft.sharding.owners import owners_of
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import gradient_like, local

# A bucket of this size has left a core's second-level cache before it is reduced.
_PAST_CACHE_FROM_BYTES = 2 << 20
_LINE_BYTES = 64  # every gradient starts on a cache line of its own


@dataclass(eq=False)
class Slot:
    """One parameter and the place of its gradient.

    Attributes:
        number: index of the parameter in the module's order, the same on every rank.
        name: name of the parameter in the module.
        parameter: the parameter.
        bucket: bucket of the gradient; None before there are buckets.
        offset: first element of the gradient in the bucket.
        view: the gradient in the bucket, shaped like the parameter; None before there are buckets.
        address: memory address of `view`.
        into_main_grad: the gradient is added to the fp32 `main_grad` of the parameter, which is the view.
        due: number of times that autograd produces the gradient in one backward; reentrant checkpoints may need
            several.
        arrivals: number of times that autograd has done so in this backward.
        given: the last of them was a gradient and not None.
        touched: a gradient has come since the last reduction.
        reduced: the view holds the result of a reduction, and nothing has been added since.
        outside: the gradient, where autograd made it, until its bucket is packed; None if the view holds the gradient.
    """

    number: int
    name: str
    parameter: torch.nn.Parameter
    bucket: "Bucket | None" = None
    offset: int = 0
    view: torch.Tensor | None = None
    address: int = 0
    into_main_grad: bool = False
    due: int = 1
    arrivals: int = 0
    given: bool = False
    touched: bool = False
    reduced: bool = False
    outside: torch.Tensor | None = None

    @property
    def place(self) -> torch.Tensor:
        """The slot's `view`, which exists once there are buckets."""
        assert self.view is not None
        return self.view

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.into_main_grad else self.parameter.dtype


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together.

    Attributes:
        index: position in the order in which the buckets travel.
        flat: [elements] of one type, a multiple of W cache lines for W ranks. Elements outside gradients are zero.
        slots: parameters with their gradients in this bucket.
        shard_ranks: ranks that hold the other shards of the parameters, under tensor parallelism.
        replicated: some of these ranks have rows of the parameters that a lower rank has too.
        counted_here: this is the first stage that holds the parameters, so it alone adds them to norms.
        ranks: ranks that reduce the bucket: all of the wrapper's, or those that have the same experts.
        is_last: the bucket travels last.
        missing: number of slots that wait for their gradient in this backward.
        squared_norm: float64 [1], squared norm of the part that the last reduction left this rank.
        written: on a GPU, events of the streams that wrote to the bucket.
        packing: passes over the bucket by weft's kernels; None if they do not take it.
    """

    index: int
    flat: torch.Tensor
    slots: list[Slot]
    shard_ranks: Communicator | None
    replicated: bool
    counted_here: bool
    ranks: Communicator
    is_last: bool
    missing: int = 0
    squared_norm: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    written: list[torch.cuda.Event] = field(default_factory=list)
    packing: "Packing | None" = None

    def __post_init__(self) -> None:
        self.missing = len(self.slots)
        if self.flat.is_cuda:
            self.squared_norm = self.squared_norm.to(self.flat.device)

    def is_written(self) -> None:
        """Record that the current stream has written to the bucket; on a GPU the reduction waits for that stream."""
        if self.flat.is_cuda:
            self.written.append(torch.cuda.current_stream(self.flat.device).record_event())

    @property
    def own_part(self) -> torch.Tensor:
        """This rank's part under a sharded optimizer; the parts are equal and in rank order."""
        return self.flat.chunk(self.ranks.world_size)[self.ranks.rank]


class Packing:
    """Passes over a bucket by weft's kernels: one moves the gradients in, and one ends the reduction.

    Args:
        flat: memory of the bucket.
        slots: parameters with their places in it.
        sent: [elements], memory that travels: `flat`, or a buffer in the wire type. Buckets share that buffer, so each
            is packed after the reduction of the one before, on the same stream.

    Attributes:
        squared_norm: float64 [1], set by `finish` and `measure`.
    """

    def __init__(self, flat: torch.Tensor, slots: Sequence[Slot], sent: torch.Tensor):
        from weft.kernels.bucket import PackedBucket, Statistics

        self._flat, self._slots, self._sent = flat, slots, sent
        offsets = [*(slot.offset for slot in slots), flat.numel()]
        self._bucket = PackedBucket([slot.place for slot in slots], offsets=offsets)
        self._statistics = Statistics(flat.device)
        self.squared_norm = self._statistics.squared_norm.view(1)

    def pack(self) -> torch.Tensor:
        """Move all gradients to the memory that travels, in one launch on the current stream, and return it.

        Gradients from outside the bucket leave their memory. Their `.grad` becomes their place in the bucket.
        """
        outside = [(slot, local(slot.outside)) for slot in self._slots if slot.outside is not None]
        if outside or self._sent is not self._flat:
            moved = dict(outside)
            self._bucket.pack([moved.get(slot, slot.place) for slot in self._slots], self._sent)
        for slot, gradient in outside:
            if gradient.is_cuda:  # autograd allocated it on another stream
                gradient.record_stream(torch.cuda.current_stream(gradient.device))
            slot.outside = None
            if slot.parameter.grad is not None:  # otherwise a hook took it away, which is an error at the end
                slot.parameter.grad = gradient_like(slot.parameter, slot.place.detach())
        return self._sent

    def finish(self, reduced: torch.Tensor, part: torch.Tensor, scale: float) -> None:
        """Set part = scale * reduced, and the squared norm to that of part, in one pass.

        Args:
            reduced: [n], may be `part` itself. With a scale of 1 that is only read.
            part: [n], the part of the bucket that this rank gets.
            scale: factor before the only rounding.
        """
        from weft.kernels import bucket

        bucket.reduce([reduced], None if reduced is part and scale == 1.0 else part, scale, self._statistics)

    def measure(self, part: torch.Tensor) -> None:
        """Set the squared norm to that of `part`, in one pass that only reads."""
        self.finish(part, part, 1.0)


def group_slots(slots: Sequence[Slot], bucket_bytes: int) -> list[list[Slot]]:
    """Group slots into buckets, and return the buckets in the order in which they become full.

    A bucket takes gradients of one type and one kind until it has bucket_bytes. The kinds are whole parameters and
    shards over the same ranks, because their norms are counted differently. All ranks get the same groups, also where
    they have different numbers of experts.
    """
    opened: dict[tuple, list[Slot]] = {}
    opened_bytes: dict[tuple, int] = {}
    full: list[list[Slot]] = []
    for slot in slots:
        shard = shard_of(slot.parameter)
        kinds = slot.dtype, slot.parameter.dtype  # main_grad makes them differ; a bucket's parameters are gathered too
        of_shard = (shard.communicator, shard.replicated, shard.replicas) if shard else None
        key = kinds, of_shard, _counted_here(slot)
        members = opened.setdefault(key, [])
        members.append(slot)
        opened_bytes[key] = opened_bytes.get(key, 0) + _largest_bytes(slot)
        if opened_bytes[key] >= bucket_bytes:
            full.append(opened.pop(key))
            del opened_bytes[key]
    rest = sorted(opened.values(), key=lambda members: slots.index(members[-1]))
    return full + rest


def _counted_here(slot: Slot) -> bool:
    owners = owners_of(slot.parameter)
    return owners is None or owners.counted_here


def padded_bytes(slot: Slot) -> int:
    return _padded(slot.parameter.numel() * slot.dtype.itemsize)


def _padded(bytes: int) -> int:
    return -(-bytes // _LINE_BYTES) * _LINE_BYTES


def _largest_bytes(slot: Slot) -> int:
    """Return the padded bytes of the slot's gradient on the rank that has most of it."""
    shard = shard_of(slot.parameter)
    if shard is None or shard.replicas is None:
        return padded_bytes(slot)
    largest = max(prod(shard.shape_of(rank)) for rank in range(shard.communicator.world_size))
    return _padded(largest * slot.dtype.itemsize)


def ranks_that_reduce(parameter: torch.Tensor, ranks: Communicator) -> Communicator:
    """Return the ranks that have the same parameter, out of the ranks of a wrapper."""
    shard = shard_of(parameter)
    return ranks if shard is None or shard.replicas is None else shard.replicas


def lay_out(groups: Sequence[Sequence[Slot]], ranks: Communicator) -> list[Bucket]:
    """Allocate buckets for the groups of a plan, and give every slot its place.

    The memory is symmetric if possible. This is a collective call, and all ranks pass the same groups. Gradients that
    slots have already are moved one after another.
    """
    reducing = [ranks_that_reduce(members[0].parameter, ranks) for members in groups]
    units = [_LINE_BYTES * those.world_size for those in reducing]
    bytes = [sum(map(padded_bytes, members)) for members in groups]
    sizes = [max(unit, -(-size // unit) * unit) for unit, size in zip(units, bytes, strict=True)]
    device = groups[0][0].parameter.device
    memory: dict[Communicator, list[torch.Tensor]] = {}
    for those in dict.fromkeys(reducing):
        of_those = [size for size, others in zip(sizes, reducing, strict=True) if others == those]
        memory[those] = list(shared_memory(sum(of_those), device, those).split(of_those))
    buckets = []
    for index, (members, those) in enumerate(zip(groups, reducing, strict=True)):
        part = memory[those].pop(0)
        shard = shard_of(members[0].parameter)
        shard_ranks, replicated = (shard.communicator, shard.replicated) if shard else (None, False)
        is_last = index == len(groups) - 1
        flat, counted = part.view(members[0].dtype), _counted_here(members[0])
        bucket = Bucket(index, flat, list(members), shard_ranks, replicated, counted, those, is_last)
        offset = 0
        for slot in members:
            _settle(slot, bucket, offset)
            offset += padded_bytes(slot) // slot.dtype.itemsize
        buckets.append(bucket)
    return buckets


def pack_by_kernels(buckets: Sequence[Bucket], ranks: Communicator, wire_dtype: torch.dtype | None) -> None:
    """Set `packing` of the buckets that weft's kernels take. A collective call.

    Args:
        buckets: new buckets.
        ranks: ranks that reduce them.
        wire_dtype: type in which fp32 gradients travel; None is their own. One buffer of this type serves all buckets.
    """
    taken = [bucket for bucket in buckets if kernel_choice.streams(bucket.flat)]
    narrowed = [bucket.flat.numel() for bucket in taken if bucket.flat.dtype == torch.float32]
    wire = None
    if wire_dtype is not None and narrowed:
        bytes = max(narrowed) * wire_dtype.itemsize
        wire = shared_memory(bytes, taken[0].flat.device, ranks).view(wire_dtype)
    for bucket in taken:
        flat = bucket.flat
        sent = flat if wire is None or flat.dtype != torch.float32 else wire[: flat.numel()]
        bucket.packing = Packing(flat, bucket.slots, sent)
        bucket.squared_norm = bucket.packing.squared_norm


def shared_memory(bytes: int, device: torch.device, ranks: Communicator) -> torch.Tensor:
    """Return uint8 zeros, in symmetric memory if the ranks can share it, else in each rank's own memory.

    All ranks can share it, or none. Fresh memory of the kernel is zero without being touched, so a page becomes
    resident only when a gradient comes.
    """
    try:
        return empty_symmetric(bytes, dtype=torch.uint8, group=ranks, device=device)
    except ValueError:  # raised on every rank: several machines, another backend, GPUs without peer access
        return torch.zeros(bytes, dtype=torch.uint8, device=device)


def place_in(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the slot's place in a tensor laid out like the bucket, with the shape and strides of the parameter."""
    # The parameter's own strides if its elements fill its memory (channels last, transposed), else row-major ones.
    strides = torch.empty_like(slot.parameter, device="meta").stride()
    return flat.as_strided(slot.parameter.shape, strides, flat.storage_offset() + slot.offset)


def _settle(slot: Slot, bucket: Bucket, offset: int) -> None:
    """Move a slot, with its gradient if there is one, to its place in the bucket."""
    slot.bucket, slot.offset = bucket, offset
    slot.view = place_in(bucket.flat, slot)
    slot.address = slot.view.data_ptr()
    if slot.into_main_grad:
        slot.parameter.main_grad = slot.view  # type: ignore[attr-defined]
    elif slot.parameter.grad is not None:
        slot.view.copy_(slot.parameter.grad)
        slot.parameter.grad = gradient_like(slot.parameter, slot.view.detach())


def alike(gradient: torch.Tensor, place: torch.Tensor) -> bool:
    """Return whether the gradient's elements lie in memory as those of its place do.

    The elements of a place fill its memory, so a gradient with the same strides fills its own as well.
    """
    return gradient.dtype == place.dtype and gradient.stride() == place.stride() and not gradient.is_neg()


def put(gradient: torch.Tensor, slot: Slot) -> None:
    """Copy a gradient to its slot's place."""
    view, bucket = slot.view, slot.bucket
    assert view is not None and bucket is not None
    if gradient.is_cpu and bucket.flat.nbytes >= _PAST_CACHE_FROM_BYTES and alike(gradient, view):
        _C.copy_past_cache(gradient.data_ptr(), slot.address, gradient.nbytes)
    else:
        view.copy_(gradient)
