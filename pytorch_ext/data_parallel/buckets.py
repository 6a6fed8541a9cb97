"""Flat buckets of gradients, each of one type, in the order in which backward produces the gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft import _C
from weft.comm.communicator import Communicator
from weft.comm.symmetric_tensor import empty_symmetric
from weft.sharding.owners import owners_of
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import gradient_like

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
        counts: no lower rank of a model in stages has the same parameters.
        is_last: the bucket travels last.
        missing: number of slots that wait for their gradient in this backward.
        squared_norm: float64 [1], squared norm of the part that the last reduction left this rank.
        written: on a GPU, events of the streams that wrote to the bucket.
    """

    index: int
    flat: torch.Tensor
    slots: list[Slot]
    shard_ranks: Communicator | None
    replicated: bool
    counts: bool
    is_last: bool
    missing: int = 0
    squared_norm: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    written: list[torch.cuda.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing = len(self.slots)
        if self.flat.is_cuda:
            self.squared_norm = self.squared_norm.to(self.flat.device)

    def is_written(self) -> None:
        """Record that the current stream has written to the bucket; on a GPU the reduction waits for that stream."""
        if self.flat.is_cuda:
            self.written.append(torch.cuda.current_stream(self.flat.device).record_event())

    def parts(self, world_size: int) -> list[torch.Tensor]:
        """Return the equal parts that the ranks of a sharded optimizer hold, in rank order."""
        return list(self.flat.chunk(world_size))


def plan(slots: Sequence[Slot], bucket_bytes: int) -> list[list[Slot]]:
    """Group slots into buckets, and return the buckets in the order in which they become full.

    A bucket takes gradients of one type and one kind until it has bucket_bytes. The kinds are whole parameters and
    shards over the same ranks, because their norms are counted differently.
    """
    opened: dict[tuple, list[Slot]] = {}
    opened_bytes: dict[tuple, int] = {}
    full: list[list[Slot]] = []
    for slot in slots:
        shard = shard_of(slot.parameter)
        kinds = slot.dtype, slot.parameter.dtype  # main_grad makes them differ; a bucket's parameters are gathered too
        key = kinds, (shard.communicator, shard.cut.replicated) if shard else None, _counts(slot)
        members = opened.setdefault(key, [])
        members.append(slot)
        opened_bytes[key] = opened_bytes.get(key, 0) + padded_bytes(slot)
        if opened_bytes[key] >= bucket_bytes:
            full.append(opened.pop(key))
            del opened_bytes[key]
    rest = sorted(opened.values(), key=lambda members: slots.index(members[-1]))
    return full + rest


def _counts(slot: Slot) -> bool:
    owners = owners_of(slot.parameter)
    return owners is None or owners.counts


def padded_bytes(slot: Slot) -> int:
    gradient_bytes = slot.parameter.numel() * slot.dtype.itemsize
    return -(-gradient_bytes // _LINE_BYTES) * _LINE_BYTES


def lay_out(groups: Sequence[Sequence[Slot]], ranks: Communicator) -> list[Bucket]:
    """Allocate buckets for the groups of a plan, and give every slot its place.

    The memory is symmetric if possible. This is a collective call, and all ranks pass the same plan. Gradients that
    slots have already are moved one after another.
    """
    unit = _LINE_BYTES * ranks.world_size
    sizes = [max(unit, -(-sum(map(padded_bytes, members)) // unit) * unit) for members in groups]
    memory = shared_memory(sum(sizes), groups[0][0].parameter.device, ranks).split(sizes)
    buckets = []
    for index, (members, part) in enumerate(zip(groups, memory, strict=True)):
        shard = shard_of(members[0].parameter)
        shard_ranks, replicated = (shard.communicator, shard.cut.replicated) if shard else (None, False)
        is_last = index == len(groups) - 1
        flat, counts = part.view(members[0].dtype), _counts(members[0])
        bucket = Bucket(index, flat, list(members), shard_ranks, replicated, counts, is_last)
        offset = 0
        for slot in members:
            _settle(slot, bucket, offset)
            offset += padded_bytes(slot) // slot.dtype.itemsize
        buckets.append(bucket)
    return buckets


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


def put(gradient: torch.Tensor, slot: Slot) -> None:
    """Copy a gradient to its slot's place."""
    view, bucket = slot.view, slot.bucket
    assert view is not None and bucket is not None
    # A slot's elements fill its memory, so a gradient with the same strides fills its own as well.
    alike = gradient.dtype == view.dtype and gradient.stride() == view.stride() and not gradient.is_neg()
    if alike and gradient.is_cpu and bucket.flat.nbytes >= _PAST_CACHE_FROM_BYTES:
        _C.copy_past_cache(gradient.data_ptr(), slot.address, gradient.nbytes)
    else:
        view.copy_(gradient)
