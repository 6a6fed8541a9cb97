"""cross_entropy: the passes of the loss over a vocabulary split over ranks (Shoeybi et al. 2019, section 3).

    z [M, V_r]: a rank's logits of the classes from `offset` on, of V in all     target [M]     s: label smoothing

    statistics   per row: h_r = max z,   e_r = sum exp(z - h_r),   t_r = sum z,   z[target] if this rank has it, else 0
                 [4, M] fp32, which the ranks exchange
    losses       h = max h_r,   l = log sum_r e_r exp(h_r - h),   loss = l + (1 - s) (h - z[target]) + s (h - t / V)
    gradient     dz = (exp(z - h - l) - (1 - s) onehot - s / V) dloss,   0 in ignored rows

Maximum and sum of exponentials take one pass (online softmax: Milakov & Gimelshein 2018, algorithm 3). Each lane keeps
a maximum and a sum against it, and rescales the sum once for each 16 logits. An exponential is 2^(log2(e) z - shift):
one multiply-add and one instruction. The shift is the lane's maximum times log2(e), rounded; the end of the row makes
good for the rounding. No probability is ever stored. Arithmetic is in fp32.

Bytes: statistics read M V_r s_z once and write 16 M; gradient reads M V_r s_z and writes as much, in place on request.
They take about 4 and 5 operations per logit, one of them an exponential: device memory is the limit. The gradient of a
row's target is written by itself, after the others. The losses take one small launch, with their sum or mean and the
check of the targets.

Rows may start anywhere, also with an odd V_r. A program counts from the last multiple of 16 bytes before its row, so
that its accesses are of 16 bytes except in the first and last block of a row. The gradient needs for this that logits
and out start equally far after such a multiple, as they do in place.

Few rows would leave a device idle, so they are cut into pieces, and a second kernel merges these in order (16 bytes
more per piece). The number of pieces depends on M, V_r and the device. It is the same on every run, but a row's last
bits may differ between batches of different M.

Saved for backward by weft.ops.cross_entropy: z, target, h and l. Tests: tests/kernels/test_cross_entropy.py.
"""

import torch

from weft.kernels import launch
from weft.kernels.language import cdiv, tl, triton
from weft.kernels.replay import replayed

# 16 logits per thread: two (16-bit) or four (fp32) 16-byte accesses in flight, while each lane's running maximum and
# sums still fit in registers.
_BLOCK = 4096
_WARPS = 8
_LEAST_PIECE = 2  # blocks; for a shorter piece the start would cost more than the reads
_PROGRAMS_PER_MULTIPROCESSOR = 4  # programs that fit at once; rows are cut while there are fewer
_MERGE_ROWS = 128  # rows per program of the merge
_GRADIENT = "cross_entropy_gradient"  # in errors


@replayed
def cross_entropy_statistics(
    logits_shard: torch.Tensor,
    target: torch.Tensor,
    *,
    offset: int,
    ignore_index: int,
    smoothing: bool,
    pieces: int | None = None,
) -> torch.Tensor:
    """Return the statistics of this rank's logits, row by row, for the exchange with the other ranks.

    Args:
        logits_shard: [M, V_r], bf16, fp16 or fp32, contiguous columns, rows anywhere.
        target: [M] int64, class numbers in the whole vocabulary; not checked.
        offset: the number of this shard's first class.
        ignore_index: a target with 0 as its logit.
        smoothing: compute the sum of the logits; otherwise it is 0.
        pieces: number of pieces of each row; by default as many as fill the device.

    Returns:
        [4, M] fp32: maximum, sum of exponentials against it, sum of logits, target's logit. In a row with only -inf the
        maximum is -inf and the sum of exponentials 0. In a row with a NaN the sum of exponentials is NaN; the maximum
        is that of the other logits.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    op = "cross_entropy_statistics"
    _check_logits(op, logits_shard=logits_shard)
    launch.check_memory(op, logits_shard=logits_shard, target=target)
    _check_target(op, target, len(logits_shard))
    rows, columns = logits_shard.shape
    if pieces is not None and pieces < 1:
        raise ValueError(f"{op}: pieces={pieces} must be at least 1")
    pieces, blocks_each = _pieces(logits_shard, pieces)
    partials = launch.empty((pieces, 4, rows), torch.float32, logits_shard.device)
    launch.launch(
        _statistics_kernel,
        (_programs(op, rows, pieces),),
        logits_shard,
        target,
        partials,
        rows,
        columns,
        logits_shard.stride(0),
        target.stride(0),
        pieces,
        blocks_each,
        offset,
        ignore_index,
        SMOOTHING=smoothing,
        BLOCK=_BLOCK,
        LANES=32 * _WARPS,
        warps=_WARPS,
    )
    if pieces == 1:
        return partials[0]
    statistics = launch.empty((4, rows), torch.float32, logits_shard.device)
    launch.launch(_merge_kernel, (cdiv(rows, _MERGE_ROWS),), partials, statistics, rows, pieces, BLOCK=_MERGE_ROWS)
    return statistics


def cross_entropy_losses(
    statistics: torch.Tensor,
    target: torch.Tensor,
    *,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    mean: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the losses, and their sum or mean, from the statistics of all parts of the vocabulary.

    Args:
        statistics: [R, 4, M] fp32, contiguous: `cross_entropy_statistics` of R parts, summed in this order.
        target: [M] int64, class numbers in the whole vocabulary.
        vocabulary: V, the classes of all parts.
        ignore_index: a target with no loss.
        smoothing: label smoothing, 0 to 1.
        mean: average the losses of targets that are not ignored, instead of summing them.

    Returns:
        losses [M], h [M], l [M], and scalars: the sum or mean, the number of targets that are not ignored, and 1 if all
        of these lie in the vocabulary, else 0. All fp32.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    op = "cross_entropy_losses"
    launch.check_dtype(op, (torch.float32,), statistics=statistics)
    _check_target(op, target, statistics.size(2))
    launch.check_memory(op, statistics=statistics, target=target)
    if not statistics.is_contiguous() or statistics.size(1) != 4:
        raise ValueError(
            f"{op}: statistics has shape {tuple(statistics.shape)} and strides {statistics.stride()}; it must be "
            "[R, 4, M] and contiguous"
        )
    return _losses(statistics, target, launch.ticket(target.device), vocabulary, ignore_index, float(smoothing), mean)


@replayed
def _losses(statistics, target, ticket, vocabulary, ignore_index, smoothing, mean) -> tuple[torch.Tensor, ...]:
    parts, _, rows = statistics.shape
    losses, highest, log_sum = (launch.empty((rows,), torch.float32, target.device) for _ in range(3))
    loss, count, valid = (launch.empty((), torch.float32, target.device) for _ in range(3))
    programs = max(1, cdiv(rows, _MERGE_ROWS))
    launch.launch(
        _losses_kernel,
        (programs,),
        statistics,
        target,
        losses,
        highest,
        log_sum,
        launch.empty((3, programs), torch.float32, target.device),
        ticket,
        loss,
        count,
        valid,
        rows,
        parts,
        target.stride(0),
        vocabulary,
        ignore_index,
        smoothing,
        MEAN=mean,
        BLOCK=_MERGE_ROWS,
    )
    return losses, highest, log_sum, loss, count, valid


def cross_entropy_gradient(
    logits_shard: torch.Tensor,
    target: torch.Tensor,
    highest: torch.Tensor,
    log_sum: torch.Tensor,
    dlosses: torch.Tensor,
    *,
    offset: int,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the losses with respect to this rank's logits.

    Args:
        logits_shard, target, offset, ignore_index: as for the statistics.
        highest, log_sum: [M] fp32: h and l over the whole vocabulary.
        dlosses: [M] fp32, of any stride.
        vocabulary: V, the classes of all shards.
        smoothing: label smoothing, 0 to 1.
        out: [M, V_r] of the logits' type, contiguous columns; may be `logits_shard` itself, which is then overwritten.

    Returns:
        out, or a new tensor.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any write.
    """
    if out is not None:  # by addresses, which a replay does not compare
        _check_logits(_GRADIENT, logits_shard=logits_shard, out=out)
        launch.check_shape(_GRADIENT, logits_shard.shape, out=out)
        launch.check_dtype(_GRADIENT, (logits_shard.dtype,), out=out)
        _check_overlap(_GRADIENT, logits_shard, out)
    numbers = offset, vocabulary, ignore_index, float(smoothing)
    return _write_gradient(logits_shard, target, highest, log_sum, dlosses, out, *numbers)


@replayed
def _write_gradient(
    logits_shard, target, highest, log_sum, dlosses, out, offset, vocabulary, ignore_index, smoothing
) -> torch.Tensor:
    op = _GRADIENT
    _check_logits(op, logits_shard=logits_shard)
    if out is None:
        out = launch.empty(logits_shard.shape, logits_shard.dtype, logits_shard.device)
    rows, columns = logits_shard.shape
    launch.check_memory(
        op, logits_shard=logits_shard, target=target, highest=highest, log_sum=log_sum, dlosses=dlosses, out=out
    )
    _check_target(op, target, rows)
    launch.check_dtype(op, (torch.float32,), highest=highest, log_sum=log_sum, dlosses=dlosses)
    launch.check_shape(op, (rows,), highest=highest, log_sum=log_sum, dlosses=dlosses)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{op}: smoothing={smoothing} must lie between 0 and 1")
    if vocabulary < offset + columns:
        raise ValueError(
            f"{op}: vocabulary={vocabulary} ends before the shard's classes {offset} to {offset + columns}"
        )
    if columns == 0:
        return out
    pieces, blocks_each = _pieces(logits_shard)
    launch.launch(
        _gradient_kernel,
        (_programs(op, rows, pieces),),
        logits_shard,
        target,
        highest,
        log_sum,
        dlosses,
        out,
        columns,
        logits_shard.stride(0),
        target.stride(0),
        highest.stride(0),
        log_sum.stride(0),
        dlosses.stride(0),
        out.stride(0),
        pieces,
        blocks_each,
        offset,
        ignore_index,
        1.0 - smoothing,
        smoothing / vocabulary,
        BLOCK=_BLOCK,
        warps=_WARPS,
    )
    return out


def _pieces(logits: torch.Tensor, pieces: int | None = None) -> tuple[int, int]:
    """Return the number of pieces of each row, as many as fill the device by default, and the blocks of a piece."""
    # Blocks are counted from the multiple of 16 bytes before the row.
    blocks = cdiv(logits.size(1) + 16 // logits.element_size() - 1, _BLOCK)
    if pieces is None:
        wanted = cdiv(launch.multiprocessors(logits.device) * _PROGRAMS_PER_MULTIPROCESSOR, max(len(logits), 1))
        pieces = max(1, min(wanted, blocks // _LEAST_PIECE))
    blocks_each = max(1, cdiv(blocks, pieces))
    return max(1, cdiv(blocks, blocks_each)), blocks_each


def _programs(op: str, rows: int, pieces: int) -> int:
    if rows * pieces >= 2**31:
        raise ValueError(f"{op}: {rows} rows in {pieces} pieces are more than 2^31 programs; call it on fewer rows")
    return rows * pieces


def _check_logits(op: str, **tensors: torch.Tensor) -> None:
    launch.check_dtype(op, **tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or (tensor.size(1) > 1 and tensor.stride(1) != 1):
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be [M, V_r] with "
                "contiguous columns: flatten leading dimensions with reshape, or make it contiguous"
            )
        if tensor.size(1) >= 2**31 - 2**14:
            raise ValueError(f"{op}: {name} has {tensor.size(1)} columns; the kernel counts them in 31 bits, cut it")


def _check_target(op: str, target: torch.Tensor, rows: int) -> None:
    launch.check_dtype(op, (torch.int64,), target=target)
    launch.check_shape(op, (rows,), target=target)


def _check_overlap(op: str, logits: torch.Tensor, out: torch.Tensor) -> None:
    """Check that rows of out share no memory, and no element of out that of another element of the logits."""
    rows, columns = out.shape
    stride = out.stride(0)
    if rows > 1 and stride < columns:
        raise ValueError(f"{op}: out has strides {out.stride()}, so that its rows share memory; give each its own")
    if out.numel() == 0 or out.device.type == "meta":
        return
    shift = (out.data_ptr() - logits.data_ptr()) // out.element_size()
    if shift == 0 and (rows == 1 or stride == logits.stride(0)):
        return
    apart = shift >= logits.stride(0) * (rows - 1) + columns or -shift >= stride * (rows - 1) + columns
    # Two groups of columns of one matrix.
    beside = stride == logits.stride(0) and rows > 1 and columns <= shift % stride <= stride - columns
    if not apart and not beside:
        raise ValueError(
            f"{op}: out overlaps logits_shard without being it; give it its own memory, or out=logits_shard"
        )


@triton.jit
def _lead(row_pointer):
    """Return the number of elements between the last multiple of 16 bytes and the start of the row."""
    return ((row_pointer.to(tl.int64) % 16) // (row_pointer.dtype.element_ty.primitive_bitwidth // 8)).to(tl.int32)


# No size or stride changes the accesses, so none is specialised: one variant serves every shape.
@triton.jit(
    do_not_specialize=[
        "rows", "columns", "stride_row", "stride_target", "pieces", "blocks_each", "offset", "ignore_index"
    ]
)  # fmt: skip
def _statistics_kernel(
    logits,  # [M, V_r], contiguous columns
    target,  # [M] i64
    partials,  # [pieces, 4, M] fp32: maximum, sum of exponentials, sum, target's logit
    rows,
    columns,
    stride_row,
    stride_target,
    pieces,
    blocks_each,
    offset,
    ignore_index,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    row_pointer = logits + row * stride_row
    lead = _lead(row_pointer)
    aligned = tl.multiple_of(row_pointer - lead, 16)
    # A lane has several accesses of 16 bytes, so its maximum takes no other thread.
    WIDTH: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
    access = tl.arange(0, BLOCK // (LANES * WIDTH))[:, None, None]
    within = (access * LANES + tl.arange(0, LANES)[None, :, None]) * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    highest = tl.full([LANES], float("-inf"), tl.float32)  # of each lane
    shift = tl.zeros([LANES], tl.float32)  # LOG2E highest, rounded; 0 where highest is -inf
    exponentials = tl.zeros([LANES], tl.float32)  # of each lane: sum of 2^(LOG2E z - shift)
    total = tl.zeros([LANES], tl.float32)
    # The row's first and last block may hold elements of its neighbours; the blocks between need no mask.
    end = lead + columns
    first = piece * blocks_each
    last = tl.minimum(first + blocks_each, tl.cdiv(end, BLOCK))
    first_whole = tl.where((first == 0) & (lead > 0), 1, first)
    last_whole = tl.maximum(tl.minimum(last, end // BLOCK), first_whole)
    for edge in range(first_whole - first + tl.maximum(last - last_whole, 0)):
        block = tl.where(edge < first_whole - first, first + edge, last_whole + edge - (first_whole - first))
        position = block * BLOCK + within
        inside = (position >= lead) & (position < end)
        z = tl.load(aligned + position, mask=inside, other=float("-inf")).to(tl.float32)
        highest, shift, exponentials = _extended(z, highest, shift, exponentials)
        if SMOOTHING:
            total += tl.sum(tl.sum(tl.where(inside, z, 0.0), 2), 0)
    for block in range(first_whole, last_whole):
        z = tl.load(aligned + (block * BLOCK + within)).to(tl.float32)
        highest, shift, exponentials = _extended(z, highest, shift, exponentials)
        if SMOOTHING:
            total += tl.sum(tl.sum(z, 2), 0)
    top = tl.max(highest, 0)
    result = partials + piece.to(tl.int64) * 4 * rows + row
    tl.store(result, top)
    result += rows
    # Exact but for one rounding, so the sum is against the maximum itself and not against its rounded multiple.
    below_top = launch.fused_multiply_add(
        tl.zeros_like(shift) - _subtrahend(top), tl.full([LANES], launch.LOG2E, tl.float32), shift
    )
    tl.store(result, tl.sum(tl.where(exponentials == 0, 0.0, exponentials * tl.exp2(below_top)), 0))
    result += rows
    tl.store(result, tl.sum(total, 0))
    number = tl.load(target + row * stride_target)
    here = (number != ignore_index) & (number >= offset) & (number < offset + columns) & (piece == 0)
    at_target = tl.load(row_pointer + tl.where(here, number - offset, 0), mask=here, other=0.0)
    result += rows
    tl.store(result, at_target.to(tl.float32))


@triton.jit
def _extended(z, highest, shift, exponentials):
    """Return each lane's maximum, shift and sum of exponentials with its logits z [accesses, lanes, width] added."""
    highest = tl.maximum(highest, tl.max(tl.max(z, 2), 0))
    before = shift
    shift = _subtrahend(highest) * launch.LOG2E
    exponentials *= tl.exp2(tl.minimum(before - shift, 0.0))  # above 0 only before the lane's first logit
    exponent = launch.fused_multiply_add(
        z, tl.full(z.shape, launch.LOG2E, tl.float32), tl.zeros_like(z) - shift[None, :, None]
    )
    return highest, shift, exponentials + tl.sum(tl.sum(tl.exp2(exponent), 2), 0)


@triton.jit
def _subtrahend(highest):
    """Return the subtrahend of logits with this maximum: 0 where all are -inf, so that they stay -inf."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit(do_not_specialize=["rows", "pieces"])
def _merge_kernel(
    partials,  # [pieces, 4, M] fp32
    statistics,  # [4, M] fp32
    rows,
    pieces,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    highest, exponentials, total, at_target = _merged(partials, row, inside, rows, pieces, BLOCK)
    result = statistics + row
    tl.store(result, highest, mask=inside)
    tl.store(result + rows, exponentials, mask=inside)
    tl.store(result + rows + rows, total, mask=inside)
    tl.store(result + rows + rows + rows, at_target, mask=inside)


@triton.jit
def _merged(partials, row, inside, rows, parts, BLOCK: tl.constexpr):
    """Return the statistics of the rows over all parts [parts, 4, M], added in order."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    pointers = partials + row
    for _ in range(parts):
        highest = tl.maximum(highest, tl.load(pointers, mask=inside, other=0.0))
        pointers += 4 * rows
    exponentials = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    at_target = tl.zeros([BLOCK], tl.float32)
    pointers = partials + row
    for _ in range(parts):
        there = tl.load(pointers, mask=inside, other=0.0)
        there_exponentials = tl.load(pointers + rows, mask=inside, other=0.0)
        exponentials += there_exponentials * tl.exp(there - _subtrahend(highest))
        total += tl.load(pointers + rows + rows, mask=inside, other=0.0)
        at_target += tl.load(pointers + rows + rows + rows, mask=inside, other=0.0)  # 0 in all parts but one
        pointers += 4 * rows
    return highest, exponentials, total, at_target


@triton.jit(do_not_specialize=["rows", "parts", "stride_target", "vocabulary", "ignore_index"])
def _losses_kernel(
    statistics,  # [R, 4, M] fp32
    target,  # [M] i64
    losses,  # [M] fp32
    highest,  # [M] fp32
    log_sum,  # [M] fp32
    partials,  # [3, programs] fp32: sum of losses, targets not ignored, those of them outside of the vocabulary
    ticket,  # i32, 0 before and after
    loss,  # fp32
    count,  # fp32
    valid,  # fp32
    rows,
    parts,
    stride_target,
    vocabulary,
    ignore_index,
    smoothing,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    top, exponentials, total, at_target = _merged(statistics, row, inside, rows, parts, BLOCK)
    number = tl.load(target + row * stride_target, mask=inside, other=0)
    kept = inside & (number != ignore_index)
    outside = kept & ((number < 0) | (number >= vocabulary))
    log = tl.log(exponentials)
    value = log + (1 - smoothing) * (top - at_target)
    if smoothing > 0:
        value += smoothing * (top - total / vocabulary)
    value = tl.where(kept, value, 0.0)
    tl.store(losses + row, value, mask=inside)
    tl.store(highest + row, top, mask=inside)
    tl.store(log_sum + row, log, mask=inside)

    # The program that finishes last adds the sums of all programs in their order (bucket.py says why it sees them).
    programs = tl.num_programs(0)
    own = partials + tl.program_id(0)
    tl.store(own, tl.sum(value, 0))
    tl.store(own + programs, tl.sum(kept.to(tl.float32), 0))
    tl.store(own + programs + programs, tl.sum(outside.to(tl.float32), 0))
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1:
        sum_of_losses = tl.zeros([BLOCK], tl.float32)
        number_kept = tl.zeros([BLOCK], tl.float32)
        number_outside = tl.zeros([BLOCK], tl.float32)
        for start in range(0, programs, BLOCK):
            program = start + tl.arange(0, BLOCK)
            there = program < programs
            sum_of_losses += tl.load(partials + program, mask=there, other=0.0, cache_modifier=".cg")
            number_kept += tl.load(partials + programs + program, mask=there, other=0.0, cache_modifier=".cg")
            of_outside = partials + programs + programs + program
            number_outside += tl.load(of_outside, mask=there, other=0.0, cache_modifier=".cg")
        result = tl.sum(sum_of_losses, 0)
        kept_in_all = tl.sum(number_kept, 0)
        if MEAN:
            result = result / kept_in_all
        tl.store(loss, result)
        tl.store(count, kept_in_all)
        tl.store(valid, tl.where(tl.sum(number_outside, 0) > 0, 0.0, 1.0))
        tl.store(ticket, 0)


@triton.jit(
    do_not_specialize=[
        "columns", "stride_logits", "stride_target", "stride_highest", "stride_log_sum", "stride_dlosses",
        "stride_out", "pieces", "blocks_each", "offset", "ignore_index",
    ]
)  # fmt: skip
def _gradient_kernel(
    logits,  # [M, V_r], contiguous columns
    target,  # [M] i64
    highest,  # [M] fp32
    log_sum,  # [M] fp32
    dlosses,  # [M] fp32
    out,  # [M, V_r], contiguous columns
    columns,
    stride_logits,
    stride_target,
    stride_highest,
    stride_log_sum,
    stride_dlosses,
    stride_out,
    pieces,
    blocks_each,
    offset,
    ignore_index,
    hit,  # 1 - s
    uniform,  # s / V
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    logits_row = logits + row * stride_logits
    out_row = out + row * stride_out
    lead = _lead(out_row)
    number = tl.load(target + row * stride_target)
    kept = number != ignore_index
    # An ignored row may hold anything: it counts as zeros without a gradient.
    shift = _subtrahend(tl.load(highest + row * stride_highest, mask=kept, other=0.0))
    log_sum_row = tl.load(log_sum + row * stride_log_sum, mask=kept, other=0.0) * launch.LOG2E
    dloss = tl.load(dlosses + row * stride_dlosses, mask=kept, other=0.0)
    first = piece * blocks_each
    here = number - offset
    hit_here = kept & (here >= 0) & (here < columns) & ((here + lead) // BLOCK >= first)
    hit_here = hit_here & ((here + lead) // BLOCK < first + blocks_each)
    z_here = tl.load(logits_row + here, mask=hit_here, other=0.0)
    tl.debug_barrier()  # every thread reads z_here, and in place the thread that has its column overwrites it below

    # As in the statistics, the blocks between the row's first and last need no mask.
    end = lead + columns
    last = tl.minimum(first + blocks_each, tl.cdiv(end, BLOCK))
    alike = lead == _lead(logits_row)
    first_whole = tl.where(alike, tl.where((first == 0) & (lead > 0), 1, first), last)
    last_whole = tl.maximum(tl.minimum(last, end // BLOCK), first_whole)
    within = tl.arange(0, BLOCK)
    for edge in range(first_whole - first + tl.maximum(last - last_whole, 0)):
        block = tl.where(edge < first_whole - first, first + edge, last_whole + edge - (first_whole - first))
        position = block * BLOCK + within
        inside = (position >= lead) & (position < end)
        z = tl.load(logits_row - lead + position, mask=inside & kept, other=0.0)
        gradient = _gradient(z, shift, log_sum_row, 0.0, uniform, dloss)
        tl.store(out_row - lead + position, launch.rounded(gradient, out.dtype.element_ty), mask=inside)
    logits_row = tl.multiple_of(logits_row - lead, 16)
    aligned_out = tl.multiple_of(out_row - lead, 16)
    for block in range(first_whole, last_whole):
        position = block * BLOCK + within
        z = tl.load(logits_row + position, mask=kept, other=0.0)
        gradient = _gradient(z, shift, log_sum_row, 0.0, uniform, dloss)
        tl.store(aligned_out + position, launch.rounded(gradient, out.dtype.element_ty))
    tl.debug_barrier()  # the next store is of another thread
    gradient = _gradient(z_here, shift, log_sum_row, hit, uniform, dloss)
    tl.store(out_row + here, launch.rounded(gradient, out.dtype.element_ty), mask=hit_here)


@triton.jit
def _gradient(z, shift, log_sum, hit, uniform, dloss):
    p = tl.exp2((z.to(tl.float32) - shift) * launch.LOG2E - log_sum)
    return (p - hit) * dloss - uniform * dloss


def variants(architecture: str) -> None:
    """Call the launchers once for each variant to check, on meta tensors; use inside `launch.recording`."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    for dtype in launch.DTYPES:
        for columns in (16032, 16033):
            logits, target, of_rows = empty(4096, columns, dtype=dtype), empty(4096, dtype=torch.int64), empty(4096)
            for smoothing in (False, True):
                cross_entropy_statistics(logits, target, offset=columns, ignore_index=-100, smoothing=smoothing)
            cross_entropy_gradient(
                logits,
                target,
                of_rows,
                of_rows,
                of_rows,
                offset=columns,
                vocabulary=128256,
                ignore_index=-100,
                smoothing=0.1,
                out=logits,  # the same variant as with an out of its own, checked in place
            )
    target = empty(8, dtype=torch.int64)
    cross_entropy_statistics(empty(8, 128256), target, offset=0, ignore_index=-100, smoothing=True)
    for mean in (True, False):
        cross_entropy_losses(empty(2, 4, 8), target, vocabulary=128256, ignore_index=-100, smoothing=0.0, mean=mean)
