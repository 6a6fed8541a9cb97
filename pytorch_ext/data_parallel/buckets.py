"""Where gradients lie: flat buckets, each of one type, in the order in which backward gives the gradients."""

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
_LINE_BYTES = 64  # every gradient starts on a cache line, which no other shares


@dataclass(eq=False)
class Slot:
    """One parameter and the place of its gradient.

    Attributes:
        number: its place in the module's order, the same on every rank.
        bucket, offset, view, address: where the gradient lies: from that element of the bucket on, as a tensor like the
            parameter; None before there are buckets.
        into_main_grad: the gradient is added to the fp32 `main_grad` of the parameter, which is the view.
        due: how often autograd hands it a gradient in one backward (reentrant checkpoints may do so several times).
        arrivals: how often it did in this one.
        given: the last time, it was a gradient and not None.
        touched: it got a gradient since the last reduction.
        reduced: what is in its place is the result of a reduction, and nothing has been added since.
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
        """`view`, which there is once there are buckets."""
        assert self.view is not None
        return self.view

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.into_main_grad else self.parameter.dtype


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together.

    Attributes:
        index: its place among the buckets, which is the order in which they travel.
        flat: [elements] of one type; a multiple of W cache lines, zeros where no gradient lies.
        shard_ranks: the ranks that hold the other parts of its parameters, under tensor parallelism.
        replicated: some of these have rows of them that a rank before has as well.
        counts: no rank before of a model in stages has the same parameters.
        missing: slots whose gradient has not come in this backward.
        is_last: to travel.
        squared_norm: float64 [1], of what the last reduction left this rank.
        written: events of the streams that wrote to it, on a GPU.
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
        """The current stream has written to it: on a GPU, what reduces it waits for that stream."""
        if self.flat.is_cuda:
            self.written.append(torch.cuda.current_stream(self.flat.device).record_event())

    def parts(self, world: int) -> list[torch.Tensor]:
        """The equal parts that the ranks of a sharded optimizer hold, in rank order."""
        return list(self.flat.chunk(world))


def plan(slots: Sequence[Slot], bucket_bytes: int) -> list[list[Slot]]:
    """Cuts the list into buckets, in the order in which they become full.

    A bucket takes gradients of one type and kind (whole parameters, or shards over the same ranks, whose norms are
    counted differently) until it has bucket_bytes.
    """
    opened: dict[tuple, list[Slot]] = {}
    opened_bytes: dict[tuple, int] = {}
    full: list[list[Slot]] = []
    for slot in slots:
        shard = shard_of(slot.parameter)
        kinds = slot.dtype, slot.parameter.dtype  # which under main_grad differ; parameters of a bucket are gathered
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
    bytes = slot.parameter.numel() * slot.dtype.itemsize
    return -(-bytes // _LINE_BYTES) * _LINE_BYTES


def lay_out(groups: Sequence[Sequence[Slot]], ranks: Communicator) -> list[Bucket]:
    """Gives every slot of the plan its place, in memory that all ranks reach where that can be had.

    A collective call: ranks lay out the same. Gradients that slots have already are moved, one after another.
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
    """uint8 zeros: symmetric memory where the ranks can have it (all of them or none), else this rank's own.

    Fresh memory of the kernel is zero without being touched, so it is resident only where a gradient has come.
    """
    try:
        return empty_symmetric(bytes, dtype=torch.uint8, group=ranks, device=device)
    except ValueError:  # on every rank: several machines, another backend, GPUs without peer access
        return torch.zeros(bytes, dtype=torch.uint8, device=device)


def place_in(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The slot's place in a tensor laid out like its bucket, shaped and strided like the parameter."""
    # The parameter's own strides where its elements fill its memory (channels last, transposed), else row-major.
    strides = torch.empty_like(slot.parameter, device="meta").stride()
    return flat.as_strided(slot.parameter.shape, strides, flat.storage_offset() + slot.offset)


def _settle(slot: Slot, bucket: Bucket, offset: int) -> None:
    """Moves a slot, with the gradient that it has, to its place."""
    slot.bucket, slot.offset = bucket, offset
    slot.view = place_in(bucket.flat, slot)
    slot.address = slot.view.data_ptr()
    if slot.into_main_grad:
        slot.parameter.main_grad = slot.view  # type: ignore[attr-defined]
    elif slot.parameter.grad is not None:
        slot.view.copy_(slot.parameter.grad)
        slot.parameter.grad = gradient_like(slot.parameter, slot.view.detach())


def put(gradient: torch.Tensor, slot: Slot) -> None:
    """Copies a gradient to its slot's place."""
    view, bucket = slot.view, slot.bucket
    assert view is not None and bucket is not None
    # A slot's elements fill its memory, and so do those of whatever has the same strides.
    alike = gradient.dtype == view.dtype and gradient.stride() == view.stride() and not gradient.is_neg()
    if alike and gradient.is_cpu and bucket.flat.nbytes >= _PAST_CACHE_FROM_BYTES:
        _C.copy_past_cache(gradient.data_ptr(), slot.address, gradient.nbytes)
    else:
        view.copy_(gradient)
