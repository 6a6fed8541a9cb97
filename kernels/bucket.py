"""bucket: many gradients to one flat buffer and back, and the sum of W buffers in rank order, each in one launch.

    pack     flat[offset_i + j] = round(scale * tensor_i[j])    every tensor of its own size and type (bf16, fp16, fp32)
    unpack   tensor_i[j] = round(scale * flat[offset_i + j])    flat is of one of these types
    reduce   out[j] = round(scale * ((b_0[j] + b_1[j]) + ... + b_{W-1}[j]))    W buffers [N] of one type; out [N]
    with statistics   squared_norm = sum of squares, in fp64, of the written elements (after scale, rounded); of a
                      reduction that writes nothing, of the scaled sums in fp32;
                      nonfinite = 1 if any of them is infinite or NaN, else 0

Arithmetic is in fp32: a product with the fp32 scale, then one rounding to the type that is written. Each tensor starts
at a multiple of 8 elements of the flat buffer, 16 bytes of its narrowest type. Pack writes zeros to the gaps, so that a
collective over the whole buffer moves nothing undefined. `weft.DataParallel` packs and reduces by these kernels on
GPUs (docs/data_parallel.md).

Bytes, for N elements: pack N (s_tensor + s_flat), unpack the same, reduce N (W s_buffer + s_out). There are 1 to W + 2
operations per element, so device memory is the limit. Statistics add no pass: each program writes the sum of its block
to a table (8 bytes for a block of 4096), and the program that finishes last sums the table.

The kernel gets the addresses of the tensors in a table. It is uploaded again only when an address changes (a gradient
that was set to None). Nothing is saved for backward. Tests: tests/kernels/test_bucket.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from weft.kernels import launch
from weft.kernels.language import cdiv, tl, triton

ALIGNMENT = 8  # elements; tensors start at multiples of it in the flat buffer
MOST_BUFFERS = 64
# One addition to the ticket for 4096 elements. 16 elements per thread are two to four 16-byte accesses in flight, in 40
# to 78 registers. In a reduction the compiler unrolls the loop over the ranks, so 8 per thread give as many in 40.
_BLOCK = 4096
_WARPS = 8
_REDUCE_WARPS = 16
_TABLE_BLOCK: tl.constexpr = tl.constexpr(2048)  # partial sums that the last program reads at a time
_BF16: tl.constexpr = tl.constexpr(0)
_FP16: tl.constexpr = tl.constexpr(1)
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Statistics:
    """Norm and finiteness of the elements that a pass over a bucket writes, without a synchronisation.

    It serves one launch at a time: two launches that may overlap (on two streams) need one each.

    Attributes:
        squared_norm: scalar fp64: the sum of squares of the written elements. Blocks and partial sums are added in a
            fixed order, so it has the same bits in every run. It is finite if and only if every element is.
        nonfinite: scalar fp32: 1 if an element is infinite or NaN, else 0; serves as a GradScaler's found_inf.
    """

    def __init__(self, device: torch.device | str):
        self.squared_norm = torch.zeros((), dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=device)
        self._ticket = torch.zeros((), dtype=torch.int32, device=device)
        self._partials = torch.empty(0, dtype=torch.float64, device=device)

    def arguments(self, programs: int) -> tuple[torch.Tensor, ...]:
        """Return the arguments that a kernel of that many programs needs to fill this in."""
        if programs == 0:  # nothing is launched
            self.squared_norm.zero_()
            self.nonfinite.zero_()
        if self._partials.numel() < programs:
            self._partials = torch.empty(programs, dtype=torch.float64, device=self._partials.device)
        return self._partials, self._ticket, self.squared_norm, self.nonfinite


@dataclass(frozen=True)
class PackedSlot:
    """A tensor's place in the flat buffer: elements offset to offset + count, and a gap up to offset + room."""

    offset: int
    count: int
    room: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[tuple[int, int], ...]  # sizes and strides of the dimensions of more than one element
    contiguous: bool


class PackedBucket:
    """The places of a list of tensors in a flat buffer, and copies in both directions.

    A dense tensor that is not contiguous (a channels_last weight, say) is copied in the order of its memory.

    Args:
        tensors: bf16, fp16 or fp32; only their types, shapes and strides matter, so they may be on "meta".
        device: device of the packing; the tensors' own by default.
        offsets: first element of each tensor in the flat buffer, then the size of the buffer; multiples of 8, in
            ascending order from 0. By default the tensors lie one after another.

    Attributes:
        elements: the size of the flat buffer.
        slots: a PackedSlot for each tensor.

    Raises:
        TypeError: a tensor of another type.
        ValueError: a tensor with holes in its memory or with elements that share memory; no tensors and no device;
            offsets that leave a tensor too little room.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device | str | None = None,
        offsets: Sequence[int] | None = None,
    ):
        if device is None and not tensors:
            raise ValueError("PackedBucket: of no tensors the device must be given: PackedBucket([], device=...)")
        self.device = torch.empty(0, device=device if device is not None else tensors[0].device).device
        if offsets is None:
            offsets = [0, *accumulate(-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors)]
        _check_offsets(tensors, offsets)
        slots: list[PackedSlot] = []
        for number, (tensor, (start, stop)) in enumerate(zip(tensors, pairwise(offsets), strict=True)):
            launch.check_dtype("PackedBucket", **{f"tensors[{number}]": tensor})
            slots.append(_slot(number, tensor, start, stop - start))
        self.elements = offsets[-1]
        self.slots = tuple(slots)
        rooms = torch.tensor([slot.room for slot in slots], dtype=torch.int64)
        blocks = (rooms + _BLOCK - 1) // _BLOCK
        owner = torch.repeat_interleave(torch.arange(len(slots)), blocks)
        block = torch.arange(len(owner)) - (blocks.cumsum(0) - blocks)[owner]
        rows = [(slot.offset, slot.count, slot.room, _KINDS[slot.dtype]) for slot in slots]
        self._programs = torch.stack([owner, block], 1).to(self.device, torch.int32)
        self._table = torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(self.device)

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat buffer, not initialised."""
        return torch.empty(self.elements, dtype=dtype, device=self.device)

    def pack(
        self,
        tensors: Sequence[torch.Tensor | None],
        flat: torch.Tensor,
        scale: float = 1.0,
        statistics: Statistics | None = None,
    ) -> None:
        """Write flat = round(scale * tensors), each tensor in its slot, with zeros between them.

        The kernel has addresses, not tensors. On another stream than the one of their allocation the tensors need
        `record_stream`, as for any work there.

        Args:
            tensors: like those that the bucket was made of; None counts as zeros. They may be views of `flat`, each at
                its own slot.
            flat: [elements], bf16, fp16 or fp32, at a multiple of 16 bytes.
            scale: finite in fp32.
            statistics: filled in from the elements of flat.

        Raises:
            ValueError, TypeError: a tensor differs from the one that the bucket was made of, or another argument is
                invalid. Raised before any write.
        """
        self._launch("pack", _pack_kernel, tensors, flat, scale, statistics)

    def unpack(
        self,
        flat: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        scale: float = 1.0,
        statistics: Statistics | None = None,
    ) -> None:
        """Write tensors = round(scale * flat), each tensor in its own type.

        Arguments are those of `pack`. Tensors that are None are skipped. The statistics are those of the tensors'
        elements.
        """
        self._launch("unpack", _unpack_kernel, tensors, flat, scale, statistics)

    def _launch(self, op, kernel, tensors, flat, scale, statistics) -> None:
        op = f"PackedBucket.{op}"
        self._check_flat(op, flat)
        addresses = self._addresses(op, tensors, flat)
        _check_scale(op, scale)
        programs = len(self._programs)
        launch.launch(
            kernel,
            (programs,),
            self._programs,
            self._table,
            _address_table(addresses, self.device),
            flat,
            float(scale),
            *_arguments_of(op, statistics, self.device, programs),
            BLOCK=_BLOCK,
            warps=_WARPS,
        )

    def _check_flat(self, op: str, flat: torch.Tensor) -> None:
        launch.check_memory(op, flat=flat)
        launch.check_dtype(op, flat=flat)
        launch.check_shape(op, (self.elements,), flat=flat)
        if flat.device != self.device:
            raise ValueError(f"{op}: flat is on {flat.device} and the bucket on {self.device}; make it with .empty()")
        if not flat.is_contiguous() or flat.data_ptr() % 16:
            raise ValueError(
                f"{op}: flat has stride {flat.stride(0)} and starts {flat.data_ptr() % 16} bytes past a multiple of "
                "16; it must be contiguous and start at a multiple of 16 bytes: make it with .empty()"
            )

    def _addresses(self, op: str, tensors: Sequence[torch.Tensor | None], flat: torch.Tensor) -> tuple[int, ...]:
        """Check the tensors and return their addresses, 0 for None. The kernel itself checks nothing."""
        if len(tensors) != len(self.slots):
            raise ValueError(f"{op}: got {len(tensors)} tensors for a bucket of {len(self.slots)}")
        begin = flat.data_ptr()
        end = begin + flat.numel() * flat.element_size()
        addresses = []
        for number, (tensor, slot) in enumerate(zip(tensors, self.slots, strict=True)):
            if tensor is None:
                addresses.append(0)
                continue
            if tensor.dtype != slot.dtype or tensor.numel() != slot.count or tensor.device != self.device:
                raise ValueError(
                    f"{op}: tensors[{number}] is {tensor.dtype}, {tensor.numel()} elements, on {tensor.device}; the "
                    f"bucket was made for {slot.dtype}, {slot.count} elements, on {self.device}. "
                    "Make another PackedBucket"
                )
            if not (tensor.is_contiguous() if slot.contiguous else _order(tensor) == slot.order):
                raise ValueError(
                    f"{op}: tensors[{number}] of shape {tuple(tensor.shape)} has strides {tensor.stride()}; the bucket "
                    f"was made for {'a contiguous one' if slot.contiguous else f'sizes and strides {slot.order}'}. "
                    "Lay it out so, or make another PackedBucket"
                )
            address = tensor.data_ptr()
            overlaps = address < end and address + slot.count * slot.dtype.itemsize > begin
            own = address == begin + slot.offset * flat.element_size() and flat.dtype == slot.dtype
            if overlaps and slot.count and not own and flat.device.type != "meta":
                raise ValueError(
                    f"{op}: tensors[{number}] shares memory with flat at another place than its own, element "
                    f"{slot.offset}; copy it first"
                )
            addresses.append(address)
        return tuple(addresses)


def reduce(
    buffers: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    scale: float = 1.0,
    statistics: Statistics | None = None,
) -> None:
    """Write out = round(scale * sum of the buffers), summed in fp32 in the order of the list and rounded once.

    Args:
        buffers: 1 to 64 buffers [N], of one type (bf16, fp16, fp32), contiguous. Buffers of 16 bits are summed in fp32
            too.
        out: [N], contiguous, of any of these types; may be one of the buffers. None writes nothing, so that a pass for
            the statistics alone only reads.
        scale: finite in fp32.
        statistics: filled in from the elements of out, or from the scaled sums in fp32 if nothing is written.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any write.
    """
    op = "bucket.reduce"
    _check_scale(op, scale)
    _check_buffers(op, buffers, out)
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    count, device = buffers[0].numel(), buffers[0].device
    programs = cdiv(count, _BLOCK)
    launch.launch(
        _reduce_kernel,
        (programs,),
        _address_table(addresses, device),
        out,
        count,
        len(buffers),
        float(scale),
        *_arguments_of(op, statistics, device, programs),
        DTYPE=launch.TRITON_TYPES[buffers[0].dtype],
        ALIGNED=all(address % 16 == 0 for address in addresses),
        BLOCK=_BLOCK,
        warps=_REDUCE_WARPS,
    )


def _check_buffers(op: str, buffers: Sequence[torch.Tensor], out: torch.Tensor | None) -> None:
    if not 1 <= len(buffers) <= MOST_BUFFERS:
        raise ValueError(f"{op}: got {len(buffers)} buffers; it takes 1 to {MOST_BUFFERS}, sum more in several calls")
    named = {f"buffers[{rank}]": buffer for rank, buffer in enumerate(buffers)}
    every = named if out is None else {**named, "out": out}
    launch.check_memory(op, **every)
    launch.check_dtype(op, **every)
    launch.check_dtype(op, (buffers[0].dtype,), **named)
    launch.check_shape(op, ((buffers[0] if out is None else out).numel(),), **every)
    for name, tensor in every.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} has stride {tensor.stride(0)}; make it contiguous")
        if out is None:
            continue
        size = out.element_size()
        shift = tensor.data_ptr() - out.data_ptr()
        apart = shift >= out.numel() * size or -shift >= tensor.numel() * tensor.element_size()
        same = shift == 0 and tensor.dtype == out.dtype
        if not apart and not same and out.device.type != "meta":
            raise ValueError(f"{op}: {name} and out share memory, but not element by element; give out its own")


def _check_scale(op: str, scale: float) -> None:
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{op}: scale={scale} must be finite in fp32")


def _arguments_of(op: str, statistics: Statistics | None, device: torch.device, programs: int):
    if statistics is None:
        return None, None, None, None
    if statistics.squared_norm.device != device:
        raise ValueError(f"{op}: statistics are on {statistics.squared_norm.device}; make them on {device}")
    return statistics.arguments(programs)


def _check_offsets(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    if len(offsets) != len(tensors) + 1 or offsets[0] or any(offset % ALIGNMENT for offset in offsets):
        raise ValueError(
            f"PackedBucket: got offsets {list(offsets)} for {len(tensors)} tensors; expected 0 first, one for each "
            f"tensor, then the buffer's size, all multiples of {ALIGNMENT}"
        )
    for number, (tensor, (start, stop)) in enumerate(zip(tensors, pairwise(offsets), strict=True)):
        if stop - start < tensor.numel():
            raise ValueError(
                f"PackedBucket: tensors[{number}] has {tensor.numel()} elements, and its offsets {start} and {stop} "
                f"leave room for {stop - start}"
            )


def _slot(number: int, tensor: torch.Tensor, offset: int, room: int) -> PackedSlot:
    order = _order(tensor)
    expected = 1
    for size, stride in sorted(order, key=lambda pair: pair[1]):
        if stride != expected and tensor.numel():
            raise ValueError(
                f"PackedBucket: tensors[{number}] of shape {tuple(tensor.shape)} has strides {tensor.stride()}: its "
                "elements must fill their memory, each in its own place; give a contiguous tensor"
            )
        expected *= size
    return PackedSlot(offset, tensor.numel(), room, tensor.dtype, tuple(tensor.shape), order, tensor.is_contiguous())


def _order(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


# Tables that a captured graph reads. The graph has only their addresses, so they must stay allocated.
_captured: list[torch.Tensor] = []


def _address_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the addresses as a table on the device, ready on the current stream; equal addresses share a table."""
    if device.type == "meta":
        return torch.empty(len(addresses), dtype=torch.int64, device=device)
    if device.type != "cuda":
        return _uploaded(addresses, device, 0)
    with torch.cuda.device(device):
        stream, capturing = torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing()
        misses = _uploaded.cache_info().misses
        table = _uploaded(addresses, device, stream)
        if capturing:
            if _uploaded.cache_info().misses != misses:
                _uploaded.cache_clear()
                raise RuntimeError(
                    "bucket: a captured graph would read addresses from host memory that is gone when it is replayed; "
                    "make the same call once, on the same stream, before capturing"
                )
            _captured.append(table)
        return table


@lru_cache(maxsize=1024)
def _uploaded(addresses: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """Upload a table of addresses.

    A table is never written again, so no launch can read the addresses of a later one. Each stream has its own table:
    a stream could not know when the copy on another stream is done.

    The pinned memory comes from the caching host allocator, which does not reuse it before the copy is done.
    """
    if device.type != "cuda":
        return torch.tensor(addresses, dtype=torch.int64, device=device)
    return torch.tensor(addresses, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


@triton.jit
def _pack_kernel(
    programs,  # [P, 2] i32: tensor, block of it
    table,  # [T, 4] i64: offset in flat, count, room, kind
    addresses,  # [T] i64
    flat,  # [elements]
    scale,
    partials,  # [P] fp64, or None: no statistics
    ticket,  # i32
    squared_norm,  # fp64
    nonfinite,  # fp32
    BLOCK: tl.constexpr,
):
    address, offset, start, room, limit, kind = _place(programs, table, addresses, BLOCK)
    if kind == _BF16:
        x = _read(address, start, limit, tl.bfloat16, BLOCK)
    elif kind == _FP16:
        x = _read(address, start, limit, tl.float16, BLOCK)
    else:
        x = _read(address, start, limit, tl.float32, BLOCK)
    index = start + tl.arange(0, BLOCK)
    y = launch.rounded(tl.where(index < limit, x * scale, 0.0), flat.dtype.element_ty)
    tl.store(flat + offset + index, y, mask=index < room)
    _finish(y.to(tl.float32), partials, ticket, squared_norm, nonfinite)


@triton.jit
def _unpack_kernel(
    programs,  # [P, 2] i32: tensor, block of it
    table,  # [T, 4] i64: offset in flat, count, room, kind
    addresses,  # [T] i64
    flat,  # [elements]
    scale,
    partials,  # [P] fp64, or None: no statistics
    ticket,  # i32
    squared_norm,  # fp64
    nonfinite,  # fp32
    BLOCK: tl.constexpr,
):
    address, offset, start, room, limit, kind = _place(programs, table, addresses, BLOCK)
    index = start + tl.arange(0, BLOCK)
    # The load includes the padding: a mask that changes every 8 elements permits one load of 16 bytes.
    x = tl.load(flat + offset + index, mask=index < room, other=0.0).to(tl.float32)
    x = tl.where(index < limit, x * scale, 0.0)
    if kind == _BF16:
        y = _write(x, address, start, limit, tl.bfloat16, BLOCK)
    elif kind == _FP16:
        y = _write(x, address, start, limit, tl.float16, BLOCK)
    else:
        y = _write(x, address, start, limit, tl.float32, BLOCK)
    _finish(y, partials, ticket, squared_norm, nonfinite)


@triton.jit(do_not_specialize=["count", "world"])
def _reduce_kernel(
    addresses,  # [W] i64
    out,  # [N], or None: nothing is written
    count,  # N
    world,  # W
    scale,
    partials,  # [P] fp64, or None: no statistics
    ticket,  # i32
    squared_norm,  # fp64
    nonfinite,  # fp32
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    if start + BLOCK <= count:
        y = _sum_of_ranks(addresses, world, start, count, DTYPE, ALIGNED, True, BLOCK) * scale
        if out is not None:
            y = launch.rounded(y, out.dtype.element_ty)
            tl.store(out + index, y)
    else:
        y = _sum_of_ranks(addresses, world, start, count, DTYPE, ALIGNED, False, BLOCK) * scale
        if out is not None:
            y = launch.rounded(y, out.dtype.element_ty)
            tl.store(out + index, y, mask=index < count)
    _finish(y.to(tl.float32), partials, ticket, squared_norm, nonfinite)


@triton.jit
def _place(programs, table, addresses, BLOCK: tl.constexpr):
    """Return the place of this program's block.

    The result has the tensor's address and offset in flat, the block's first element in the tensor, the tensor's room
    in flat, the number of its elements in memory (0 for a tensor that is None) and its kind.
    """
    entry = programs + tl.program_id(0).to(tl.int64) * 2
    tensor = tl.load(entry).to(tl.int64)
    start = tl.load(entry + 1).to(tl.int64) * BLOCK
    row = table + tensor * 4
    offset = tl.multiple_of(tl.load(row), 8)
    count = tl.load(row + 1)
    room = tl.multiple_of(tl.load(row + 2), 8)
    kind = tl.load(row + 3)
    address = tl.load(addresses + tensor)
    limit = tl.where(address == 0, 0, count)
    return address, offset, start, room, limit, kind


@triton.jit
def _pointer(address, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element `start` at the address.

    The alignment hint is set here, where the pointer is made. On a function's result it is lost by inlining.
    """
    pointer = (address + start * (DTYPE.primitive_bitwidth // 8)).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(address, start, limit, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Read elements start to start + BLOCK of DTYPE at the address, in fp32; zeros from limit on."""
    index = tl.arange(0, BLOCK)
    # If both hold, one load reads 16 bytes. Only this branch makes that known to the compiler.
    if (address % 16 == 0) & (start + BLOCK <= limit):
        x = tl.load(_pointer(address, start, DTYPE, True) + index)
    else:
        x = tl.load(_pointer(address, start, DTYPE, False) + index, mask=start + index < limit, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _write(x, address, start, limit, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Write elements start to start + BLOCK below limit; return the written values in fp32."""
    index = tl.arange(0, BLOCK)
    y = launch.rounded(x, DTYPE)
    if (address % 16 == 0) & (start + BLOCK <= limit):
        tl.store(_pointer(address, start, DTYPE, True) + index, y)
    else:
        tl.store(_pointer(address, start, DTYPE, False) + index, y, mask=start + index < limit)
    return y.to(tl.float32)


@triton.jit
def _sum_of_ranks(
    addresses, world, start, count, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the block's sum over the buffers, in fp32, in rank order.

    It starts with rank 0's values, not with 0, so that the sum of negative zeros is a negative zero.
    """
    total = _read_rank(addresses, start, count, DTYPE, ALIGNED, WHOLE, BLOCK)
    for rank in range(1, world):
        total += _read_rank(addresses + rank, start, count, DTYPE, ALIGNED, WHOLE, BLOCK)
    return total


@triton.jit
def _read_rank(
    entry, start, count, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.arange(0, BLOCK)
    pointer = _pointer(tl.load(entry), start, DTYPE, ALIGNED)
    if WHOLE:
        x = tl.load(pointer + index)
    else:
        x = tl.load(pointer + index, mask=start + index < count, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _finish(y, partials, ticket, squared_norm, nonfinite):
    """Compute the statistics of the written elements y [BLOCK], in fp32 with zeros where nothing was written.

    1 Each program writes the sum of its block to its own place in the table.
    2 It takes a ticket. One thread does both (Triton gives scalar memory operations to a program's first thread), so
      the ticket's release, at the scope of the device, covers the partial sum before it.
    3 The program with the last ticket has synchronised, by its acquire, with every program before it in the chain of
      additions: all partial sums are visible. Its other threads read after the barrier that passes them the ticket.
      They read from L2 (.cg), so an L1 cannot give old values of the table from an earlier launch.
    4 It adds the partial sums in the order of the table, which does not depend on the last program, and sets the ticket
      to zero for the next launch; the end of the kernel orders that.

    The square of any finite fp32 number is exact in fp64, and the sum of 10^230 of the largest squares is still finite
    there. So the sum is finite if and only if every element is, and needs no extra flag.
    """
    if partials is not None:
        wide = y.to(tl.float64)
        tl.store(partials + tl.program_id(0), tl.sum(wide * wide))
        last = tl.num_programs(0) - 1
        if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == last:
            total = _sum_of_table(partials, last + 1)
            tl.store(squared_norm, total)
            tl.store(nonfinite, tl.where(total - total == 0, 0.0, 1.0))
            tl.store(ticket, 0)


@triton.jit
def _sum_of_table(partials, count):
    index = tl.arange(0, _TABLE_BLOCK)
    total = tl.zeros([_TABLE_BLOCK], tl.float64)
    for start in range(0, count, _TABLE_BLOCK):
        total += tl.load(partials + start + index, mask=start + index < count, other=0.0, cache_modifier=".cg")
    return tl.sum(total)


def variants(architecture: str) -> None:
    """Call the launchers once for each variant to check, on meta tensors; use inside `launch.recording`."""

    def vector(count, dtype):
        return torch.empty(count, dtype=dtype, device="meta")

    statistics = Statistics("meta")
    tensors = [vector(10_000, dtype) for dtype in launch.DTYPES]
    bucket = PackedBucket(tensors)
    for dtype in launch.DTYPES:
        for asked in (None, statistics):
            bucket.pack(tensors, bucket.empty(dtype), statistics=asked)
            bucket.unpack(bucket.empty(dtype), tensors, statistics=asked)
        for out_dtype in launch.DTYPES:
            reduce([vector(65536, dtype)] * 8, vector(65536, out_dtype), statistics=statistics)
        reduce([vector(65536, dtype)] * 8, vector(65536, dtype))
        reduce([vector(65536, dtype)], None, statistics=statistics)
