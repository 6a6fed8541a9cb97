"""matmul: D = act(A B + bias + C), the product of the parallel linear layers, forward and backward.

    A [M, K]    B [K, N]    bias [N]    C, D [M, N]    Z = A B + bias + C, kept for backward on request

    forward   y  = act(x @ w.T + b)     A = x,    B = w.T                      reads x, w; writes y (and z)
    gated     y  = act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)            B = w_gate.T beside w_up.T, Z [M, 2N]
    dgrad     dx = dz @ w               A = dz,   B = w
    wgrad     dw = dw + dz.T @ x        A = dz.T, B = x, C = D = main_grad     in fp32

2 M N K operations (4 M N K gated). Device memory: at least M K + K N elements read and M N written; A is read N /
block_n times and B M / block_m times from L2. Matrices may have any strides and any size. If their rows are 16-byte
aligned, the tensor copy engine of sm_90 and later loads them (tensor descriptors), else masked loads do. The sum over K
is in fp32, in order, and is rounded once; bias, C and activation are applied in fp32 before that. A tile asks for its
part of C in the last steps of the sum, so that C waits in L2 when the sum ends.

A persistent grid walks the tiles in columns of group_m rows, so that the operands of the running programs stay in L2.
Thin products (the shards of a layer over many ranks) have too few tiles to fill a device. For these split_k > 1 cuts K
into pieces, and a second kernel adds their fp32 partial sums in the order of K. This moves 8 split_k M N bytes more and
gives the same bits in every run.

Nothing is saved here; the autograd functions of weft.ops keep x, w and z. Tests: tests/kernels/test_matmul.py.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch

from weft.kernels import launch, signal
from weft.kernels.activation import ACTIVATIONS, activate, check_activation, gated_backward, gated_forward
from weft.kernels.chunks import Rows
from weft.kernels.config import MatmulConfig
from weft.kernels.language import TensorDescriptor, cdiv, tl, triton
from weft.kernels.launch import _INTERPRETED
from weft.kernels.matmul_tiles import choose_tile, is_turned, listed, problem_of, tile_of_any_size
from weft.kernels.replay import replayed

PRECISIONS = ("ieee", "tf32")
# fp32 has no tile with room for the flags' registers without spilling, so only the interpreter takes it.
COMMUNICATING_DTYPES = launch.DTYPES if launch.INTERPRETED else (torch.bfloat16, torch.float16)
_COMBINE_BLOCK = 1024  # elements per program of the second kernel of a split product
_NO_STRIDES = (0, 0)
_AHEAD: tl.constexpr = tl.constexpr(16)  # last steps of a sum, in which its addend comes to L2; it divides each BLOCK_M
_RESERVED_BYTES = 2048  # of the shared memory of a program: the system takes 1024, barriers the rest


@dataclass(frozen=True)
class Arrivals:
    """Chunks of A's rows that come while the product runs.

    A tile waits for the chunks of its rows, and tiles run in the order in which chunks come.

    Attributes:
        flags: [chunks] int32, set to 1 once the chunk has arrived.
    """

    peers: signal.Peers
    rows: Rows
    flags: torch.Tensor


@dataclass(frozen=True)
class Departures:
    """Destinations of the result's rows in the memory of other ranks.

    The kernel posts a chunk's flag once all of the chunk is written. Tiles run in the order in which the other ranks
    wait for them.

    Attributes:
        destinations: [M] int64, the address of each row of the result, contiguous, 16-byte aligned if `aligned`.
        flags: [chunks] int64, the address of each chunk's flag.
        agreed: the value that is posted there.
    """

    peers: signal.Peers
    rows: Rows
    destinations: torch.Tensor
    aligned: bool
    flags: torch.Tensor
    agreed: int


@replayed
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    b_up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    keep_z: bool = False,
    precision: str = "ieee",
    config: MatmulConfig | None = None,
    arrivals: Arrivals | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return act(a @ b + bias + addend), and z, the input of the activation.

    Args:
        a: [M, K], bf16, fp16 or fp32, any strides.
        b: [K, N], of a's type, any strides.
        b_up: [K, N]; makes the product gated: act(a @ b + bias[:N]) * (a @ b_up + bias[N:]).
        bias: [N], or [2N] for a gated product.
        activation: None, "gelu", "gelu_tanh", "relu" or "silu".
        addend: [M, N]; may be `out`, to accumulate a gradient.
        out: [M, N] to write to, of any of the three types; a new tensor of out_dtype by default.
        out_dtype: type of a new out; a's type by default.
        keep_z: also return z, [M, N] (gated: [M, 2N], gate beside up) in a's type.
        precision: precision of fp32 operands: "ieee", or "tf32" (10 bits of mantissa).
        config: an explicit tile configuration; by default the table's, else the heuristic's.
        arrivals: the rows of a are still coming; then K is not split.

    Returns:
        (out, z); z is None without keep_z.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any launch.
    """
    _check(a, b, b_up, bias, activation, addend, out, precision)
    (rows, depth), columns = a.shape, b.size(1)
    width = 2 * columns if b_up is not None else columns
    if out is None:
        out = launch.empty((rows, columns), out_dtype or a.dtype, a.device)
    z = launch.empty((rows, width), a.dtype, a.device) if keep_z else None
    activation = activation or "none"
    adds = addend is not None and addend is out
    problem = problem_of(a, b, b_up, activation=activation, precision=precision, adds=adds)
    config = choose_tile(problem, a.device, config, communicates=arrivals is not None).config
    if arrivals:
        launch.check_dtype("matmul", COMMUNICATING_DTYPES, a=a)
        config = replace(config, split_k=1)
    steps = cdiv(cdiv(depth, config.block_k), config.split_k)
    splits = max(1, cdiv(depth, max(1, steps * config.block_k)))
    partials = launch.empty((splits, rows, width), torch.float32, a.device) if splits > 1 else None
    _launch_product(a, b, b_up, bias, addend, out, z, partials, activation, problem, config, steps, splits, arrivals)
    if partials is not None:
        _launch_combine(partials, bias, addend, out, z, activation)
    return out, z


def matmul_to_peers(
    a: torch.Tensor,
    b: torch.Tensor,
    departures: Departures,
    *,
    precision: str = "ieee",
    config: MatmulConfig | None = None,
) -> None:
    """Write each row of a @ b to its address in `departures`; with the bits of `matmul` of that tile with K not split.

    Args:
        a, b, precision, config: as in `matmul`.
        departures: addresses of the result's rows and of the chunks' flags.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any launch.
    """
    _check(a, b, None, None, None, None, None, precision)
    problem = problem_of(a, b, precision=precision)
    launch.check_dtype("matmul", COMMUNICATING_DTYPES, a=a)
    config = replace(choose_tile(problem, a.device, config, communicates=True).config, split_k=1)
    steps = cdiv(a.size(1), config.block_k)
    _launch_product(a, b, None, None, None, None, None, None, "none", problem, config, steps, 1, departures=departures)


def _launch_product(
    a, b, b_up, bias, addend, out, z, partials, activation, problem, config, steps, splits,
    arrivals=None, departures=None,
):  # fmt: skip
    (rows, depth), columns = a.shape, b.size(1)
    units = cdiv(rows, config.block_m) * cdiv(columns, config.block_n) * splits
    meeting = arrivals or departures
    processors = meeting.peers.processors if meeting else launch.multiprocessors(a.device)
    programs = min(units, processors * _resident(config))
    a_turned, b_turned = is_turned(a), is_turned(b)
    descriptors = problem.aligned and launch.has_copy_engine(a.device)
    stored = partials is None and not departures and launch.has_copy_engine(out.device) and launch.describable(out)
    rest = config.rest_n
    first = config.block_n - rest
    a_block, b_block, second = (config.block_m, config.block_k), (config.block_k, first), b if rest else b_up

    def operand(matrix, block, turned):
        if matrix is None or not descriptors:
            return matrix
        if turned:
            return TensorDescriptor.from_tensor(matrix.t(), list(reversed(block)))
        return TensorDescriptor.from_tensor(matrix, list(block))

    if partials is not None:  # the second kernel applies these to the whole sum
        bias, addend, z, activation = None, None, None, "none"
    target = partials if partials is not None else out
    adds = b_up is not None or z is not None or (meeting is not None and not descriptors)
    crowded = config.block_k > 64 and target is not None and target.dtype != a.dtype  # in shared memory
    strip = min(rest or first, _strip(a, columns, splits > 1, adds or crowded))
    fused = (bias, addend, z, b_up, meeting)
    if descriptors and stored and activation == "none" and all(each is None for each in fused):
        strip = _widest_strip(strip, config, a, out)
    launch.launch(
        _matmul_kernel,
        (programs,),
        operand(a, a_block, a_turned),
        operand(b, b_block, b_turned),
        operand(second, (config.block_k, rest or first), b_turned),
        bias,
        addend,
        TensorDescriptor.from_tensor(out, [config.block_m, strip]) if stored else target,
        z,
        rows,
        columns,
        depth,
        # A descriptor holds its strides. They are 0 here, so that variants do not differ in unused arguments.
        *(_NO_STRIDES if descriptors else a.stride()),
        *(_NO_STRIDES if descriptors else b.stride()),
        *(_NO_STRIDES if descriptors or second is None else second.stride()),
        bias.stride(0) if bias is not None else 0,
        *(addend.stride() if addend is not None else _NO_STRIDES),
        *(_NO_STRIDES if stored or target is None else target.stride()[-2:]),
        z.stride(0) if z is not None else 0,
        config.group_m,
        steps,
        splits,
        programs,
        *_meeting_arguments(arrivals, departures, config.block_m, a.device),
        BLOCK_M=config.block_m,
        BLOCK_N=first,
        REST=rest,
        BLOCK_K=config.block_k,
        STRIP=strip,
        ACTIVATION=activation,
        PRECISION=problem.precision,
        SPLIT=partials is not None,
        # Only for dimensions along which masked accesses run.
        ROWS_OF_16=rows % 16 == 0 and not descriptors and a_turned,
        COLUMNS_OF_16=columns % 16 == 0,
        DEPTH_OF_16=depth % 16 == 0 and not descriptors and (b_turned or not a_turned),
        DESCRIPTORS=descriptors,
        A_TURNED=a_turned,
        B_TURNED=b_turned,
        STORE_DESCRIPTOR=stored,
        OUT_DTYPE=launch.TRITON_TYPES[a.dtype if departures else target.dtype],
        ALIGNED=bool(departures and departures.aligned),
        warps=config.warps,
        stages=config.stages,
    )


def _resident(config: MatmulConfig) -> int:
    """Return the number of programs of a tile that a multiprocessor holds."""
    return 2 if config.block_m * config.block_n <= 64 * 128 else 1


def _strip(a: torch.Tensor, columns: int, split: bool, adds: bool) -> int:
    """Return the number of columns that a program writes at a time.

    The registers hold the sums and addresses of that many (`make gate` checks it). Columns that 16 does not
    divide have an address each.

    Args:
        adds: the program writes z, is gated, has flags together with its operands' addresses, or has as much of
            the operands in shared memory as leaves no room for 64 columns of fp32.
    """
    odd = columns % 16 != 0
    if (odd and (split or adds)) or (split and a.dtype == torch.float32):
        return 16
    return 32 if split or adds else 64


def _widest_strip(strip: int, config: MatmulConfig, a: torch.Tensor, out: torch.Tensor) -> int:
    """Return the widest strip of a tile that the copy engine stores and nothing else is done with.

    Each strip waits until the one before it has left the shared memory, so a program waits least with the whole tile in
    one. Nothing but that memory bounds it: it has no addresses, and as many programs must fit as before.
    """
    free = launch.SHARED_LIMIT_BYTES.get(launch.architecture_of(a.device), 0) // _resident(config) - _RESERVED_BYTES
    free -= config.stages * (config.block_m + config.block_n) * config.block_k * a.element_size()
    while strip < (config.rest_n or config.block_n) and 2 * strip * config.block_m * out.element_size() <= free:
        strip *= 2
    return strip


def _meeting_arguments(arrivals: Arrivals | None, departures: Departures | None, block_m: int, device) -> tuple:
    """Return the kernel's arguments from `order` to `rank`: for its waits and for the flags that it posts."""
    if arrivals:
        order = arrivals.rows.order(block_m, arrivals.peers.rank, True, device)
        ranks = arrivals.rows.rank_of_chunk(device)
        arrivals.peers.keep(order, ranks)
        return order, arrivals.flags, None, None, ranks, None, 0, *arrivals.peers.waits()
    if departures:
        peers, rows = departures.peers, departures.rows
        order = rows.order(block_m, peers.rank, False, device)
        tiles = rows.tiles_of_chunk(block_m, device)
        peers.keep(order, tiles, departures.destinations, departures.flags)
        posts = departures.destinations, departures.flags, tiles, peers.counters, departures.agreed
        return order, None, *posts, *peers.waits()
    return None, None, None, None, None, None, 0, None, None, 0, 0


def _launch_combine(partials, bias, addend, out, z, activation) -> None:
    splits, rows, width = partials.shape
    columns = out.size(1)
    launch.launch(
        _combine_kernel,
        (cdiv(rows * columns, _COMBINE_BLOCK),),
        partials,
        bias,
        addend,
        out,
        z,
        rows,
        columns,
        width,
        bias.stride(0) if bias is not None else 0,
        *(addend.stride() if addend is not None else (0, 0)),
        *out.stride(),
        z.stride(0) if z is not None else 0,
        splits,
        ACTIVATION=activation,
        GATED=width != columns,
        BLOCK=_COMBINE_BLOCK,
    )


def _check(a, b, b_up, bias, activation, addend, out, precision) -> None:
    op = "matmul"
    if a.dim() != 2 or b.dim() != 2 or a.size(1) != b.size(0):
        raise ValueError(
            f"{op}: a {tuple(a.shape)} and b {tuple(b.shape)} must be [M, K] and [K, N]; flatten leading dimensions "
            "with reshape, and give a weight [N, K] as weight.t()"
        )
    launch.check_memory(op, a=a, b=b, b_up=b_up, bias=bias, addend=addend, out=out)
    launch.check_dtype(op, a=a, bias=bias, addend=addend, out=out)
    launch.check_dtype(op, (a.dtype,), b=b, b_up=b_up)
    columns = b.size(1)
    launch.check_shape(op, b.shape, b_up=b_up)
    launch.check_shape(op, (2 * columns if b_up is not None else columns,), bias=bias)
    launch.check_shape(op, (a.size(0), columns), addend=addend, out=out)
    check_activation(op, activation)
    if b_up is not None and addend is not None:
        raise ValueError(f"{op}: a gated product takes no addend; add it to the result")
    if b_up is not None and is_turned(b_up) != is_turned(b):
        raise ValueError(
            f"{op}: b_up has strides {b_up.stride()} and goes with a matrix of strides {b.stride()}; "
            "lay both out by rows or both by columns"
        )
    launch.check_output(op, out=out)
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision={precision!r} is not one of {', '.join(map(repr, PRECISIONS))}")
    if max(*a.shape, columns) >= 2**31 - 2**10:
        raise ValueError(f"{op}: a dimension of {max(*a.shape, columns)} does not fit 31 bits; cut the matrix")


@triton.jit
def _load(matrix, row, column, rows, columns, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
          DESCRIPTOR: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """Load the tile [ROWS, COLUMNS] at (row, column), with zeros outside the matrix."""
    if DESCRIPTOR:
        if TURNED:
            tile = matrix.load([column, row]).T
        else:
            tile = matrix.load([row, column])
    else:
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        pointers = matrix + r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_column
        tile = tl.load(pointers, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)
    return tile


@triton.jit
def _ask_for(matrix, part, row, column, rows, columns, stride_row, stride_column, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """Let ROWS rows of the tile at (row, column) come to L2, from its row part * ROWS on; nothing if part < 0.

    Nothing waits for them, and a thread has an address at most for each 32 bytes of fp32. There is no branch: ptxas
    would serialise the wgmma of two sums around it (C7515).
    """
    if not _INTERPRETED:
        r = tl.minimum(row + part * ROWS + tl.arange(0, ROWS), rows - 1).to(tl.int64)[:, None]
        c = tl.minimum(column + 8 * tl.arange(0, COLUMNS // 8), columns - 1).to(tl.int64)[None, :]
        pointers = matrix + r * stride_row + c * stride_column
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
            [pointers, part], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def _finish(total, total_up, z, z_offsets, z_up, inside, ACTIVATION: tl.constexpr):
    """Store z if it is not None and apply the activation; gated if total_up is not None."""
    if z is not None:
        tl.store(z + z_offsets, launch.rounded(total, z.dtype.element_ty), mask=inside)
        if total_up is not None:
            tl.store(z + z_offsets + z_up, launch.rounded(total_up, z.dtype.element_ty), mask=inside)
    y = activate(total, ACTIVATION)
    if total_up is not None:
        y = y * total_up
    return y


@triton.jit
def _emit(total, total_up, bias, addend, out, destinations, z, piece, row, column, rows, columns, stride_bias,
          stride_addend_row, stride_addend_column, stride_out_row, stride_out_column, stride_z_row,
          BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STRIP: tl.constexpr, ACTIVATION: tl.constexpr,
          SPLIT: tl.constexpr, STORE_DESCRIPTOR: tl.constexpr, OUT_DTYPE: tl.constexpr,
          ALIGNED: tl.constexpr):  # fmt: skip
    """Write a tile of sums in strips of STRIP columns.

    The whole tile at once would need more registers, and more shared memory to change its layout, than the sum itself.
    """
    if WIDTH > STRIP:
        left, right = launch.halves(total, BLOCK_M, WIDTH)
        if total_up is not None:
            left_up, right_up = launch.halves(total_up, BLOCK_M, WIDTH)
        else:
            left_up = None
            right_up = None
        _emit(left, left_up, bias, addend, out, destinations, z, piece, row, column, rows, columns, stride_bias,
              stride_addend_row, stride_addend_column, stride_out_row, stride_out_column, stride_z_row,
              BLOCK_M, WIDTH // 2, STRIP, ACTIVATION, SPLIT, STORE_DESCRIPTOR, OUT_DTYPE, ALIGNED)  # fmt: skip
        _emit(right, right_up, bias, addend, out, destinations, z, piece, row, column + WIDTH // 2, rows, columns,
              stride_bias, stride_addend_row, stride_addend_column, stride_out_row, stride_out_column, stride_z_row,
              BLOCK_M, WIDTH // 2, STRIP, ACTIVATION, SPLIT, STORE_DESCRIPTOR, OUT_DTYPE, ALIGNED)  # fmt: skip
    else:
        r = row + tl.arange(0, BLOCK_M)
        c = column + tl.arange(0, WIDTH)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        if destinations is not None:
            there = tl.load(destinations + r, mask=r < rows, other=0)
            if ALIGNED:
                there = tl.multiple_of(there, 16)
            there = there.to(tl.pointer_type(OUT_DTYPE))[:, None]
        r = r.to(tl.int64)[:, None]
        c = c.to(tl.int64)[None, :]
        if SPLIT:
            pointers = out + (piece.to(tl.int64) * rows + r) * stride_out_row + c
            tl.store(pointers, total, mask=inside)
            if total_up is not None:
                tl.store(pointers + columns, total_up, mask=inside)
        else:
            if bias is not None:
                total += tl.load(bias + c * stride_bias, mask=c < columns, other=0.0).to(tl.float32)
                if total_up is not None:
                    total_up += tl.load(bias + (columns + c) * stride_bias, mask=c < columns, other=0.0).to(tl.float32)
            if addend is not None:
                # The copy engine could add in memory, but additions there take subnormal numbers for 0.
                added = addend + r * stride_addend_row + c * stride_addend_column
                total += tl.load(added, mask=inside, other=0.0).to(tl.float32)
            y = _finish(total, total_up, z, r * stride_z_row + c, columns, inside, ACTIVATION)
            y = launch.rounded(y, OUT_DTYPE)
            if STORE_DESCRIPTOR:
                if len(out.shape) == 3:
                    out.store([piece, row, column], y.reshape(1, BLOCK_M, WIDTH))
                else:
                    out.store([row, column], y)
            elif destinations is not None:
                tl.store(there + c, y, mask=inside)
            else:
                tl.store(out + r * stride_out_row + c * stride_out_column, y, mask=inside)


@triton.jit(
    do_not_specialize=[
        "rows", "columns", "depth", "group_m", "steps", "splits", "programs", "agreed", "timeout_us", "rank"
    ]
)  # fmt: skip
def _matmul_kernel(
    a,  # [M, K]
    b,  # [K, N]
    b_up,  # [K, N] or None; where REST it is b, in blocks of REST columns
    bias,  # [N] or [2N] or None
    addend,  # [M, N] or None
    out,  # [M, N]; partial sums [splits, M, N or 2N] fp32 where SPLIT
    z,  # [M, N or 2N], contiguous, or None
    rows,
    columns,
    depth,
    stride_a_row,
    stride_a_column,
    stride_b_row,
    stride_b_column,
    stride_b_up_row,
    stride_b_up_column,
    stride_bias,
    stride_addend_row,
    stride_addend_column,
    stride_out_row,
    stride_out_column,
    stride_z_row,
    group_m,
    steps,  # of block_k in a piece of K, the same for each piece
    splits,
    programs,
    order,  # [tiles_m, 3] or None: the tile of each turn, its first and its last chunk
    arrivals,  # [chunks] or None: flags to wait for
    destinations,  # [M] or None: addresses of the rows of the result; then out is None
    departures,  # [chunks] or None: addresses of flags to post
    of_chunk,  # [chunks] or None: the rank that a chunk comes from; with departures, the number of tiles in the chunk
    counters,  # [chunks] or None: number of finished tiles
    agreed,
    spoiled,
    record,
    timeout_us,
    rank,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,  # the columns of the second sum, behind BLOCK_N; 0 without it
    BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS_OF_16: tl.constexpr,  # 16 divides rows, so a mask has one value for 16 bytes
    COLUMNS_OF_16: tl.constexpr,
    DEPTH_OF_16: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    A_TURNED: tl.constexpr,  # its columns are contiguous
    B_TURNED: tl.constexpr,
    STORE_DESCRIPTOR: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,  # destinations lie at multiples of 16 bytes
):
    # The compiler uses this factor; it ignores `multiple_of` on an argument.
    if ROWS_OF_16:
        rows = rows // 16 * 16
    if COLUMNS_OF_16:
        columns = columns // 16 * 16
    if DEPTH_OF_16:
        depth = depth // 16 * 16
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N + REST)
    tiles = tiles_m * tiles_n
    UP_N: tl.constexpr = REST if REST else BLOCK_N  # columns of the second sum
    UP_AT: tl.constexpr = BLOCK_N if REST else 0  # its first one in the tile
    # With two sums, a flattened loop resets them by selects, for which ptxas serialises every wgmma (warning C7515).
    FLATTEN: tl.constexpr = b_up is None
    for unit in tl.range(tl.program_id(0), tiles * splits, programs, flatten=FLATTEN):
        # 1. Find the tile and the piece of K.
        piece = unit // tiles
        tile = unit % tiles
        group = tile // (group_m * tiles_n)
        height = tl.minimum(tiles_m - group * group_m, group_m)
        within = tile % (group_m * tiles_n)
        turn = group * group_m + within % height
        if order is not None:
            row = tl.load(order + 3 * turn) * BLOCK_M
            first = tl.load(order + 3 * turn + 1)
            final = tl.load(order + 3 * turn + 2)
        else:
            row = turn * BLOCK_M
        column = (within // height) * (BLOCK_N + REST)
        start = piece * steps * BLOCK_K
        if arrivals is not None:
            for chunk in range(first, final + 1):
                signal.wait(arrivals + chunk, 1, spoiled, record, timeout_us, rank, tl.load(of_chunk + chunk),
                            signal.ALL_GATHER_MATMUL, signal.ARRIVED)  # fmt: skip
            if DESCRIPTORS:
                signal.to_copy_engine()

        # 2. Sum over the piece, in order.
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if b_up is not None:
            total_up = tl.zeros((BLOCK_M, UP_N), tl.float32)
        else:
            total_up = None
        for step in range(steps):
            if addend is not None:
                _ask_for(addend, step - steps + _AHEAD, row, column, rows, columns, stride_addend_row,
                         stride_addend_column, BLOCK_M // _AHEAD, BLOCK_N + UP_AT)  # fmt: skip
            k = start + step * BLOCK_K
            x = _load(a, row, k, rows, depth, stride_a_row, stride_a_column, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TURNED)
            w = _load(b, k, column, depth, columns, stride_b_row, stride_b_column, BLOCK_K, BLOCK_N, DESCRIPTORS,
                      B_TURNED)  # fmt: skip
            total = launch.dot(x, w, total, PRECISION)
            if b_up is not None:
                w_up = _load(b_up, k, column + UP_AT, depth, columns, stride_b_up_row, stride_b_up_column, BLOCK_K,
                             UP_N, DESCRIPTORS, B_TURNED)  # fmt: skip
                total_up = launch.dot(x, w_up, total_up, PRECISION)

        # 3. Write the partial sum, or the result with everything after the sum. After a wait that gave up, write
        # nothing to other ranks' memory: they may still read there the rows of the previous call.
        if arrivals is not None:
            total *= signal.poison(spoiled)
            if REST:
                total_up *= signal.poison(spoiled)
        if departures is not None:
            sound = signal.is_sound(spoiled)
            reach = tl.where(sound, rows, 0)
        else:
            reach = rows
        _emit(total, None if REST else total_up, bias, addend, out, destinations, z, piece, row, column, reach, columns,
              stride_bias, stride_addend_row, stride_addend_column, stride_out_row, stride_out_column, stride_z_row,
              BLOCK_M, BLOCK_N, STRIP, ACTIVATION, SPLIT, STORE_DESCRIPTOR, OUT_DTYPE, ALIGNED)  # fmt: skip
        if REST:
            _emit(total_up, None, bias, addend, out, destinations, z, piece, row, column + BLOCK_N, reach, columns,
                  stride_bias, stride_addend_row, stride_addend_column, stride_out_row, stride_out_column, stride_z_row,
                  BLOCK_M, REST, STRIP, ACTIVATION, SPLIT, STORE_DESCRIPTOR, OUT_DTYPE, ALIGNED)  # fmt: skip

        # 4. The program that completes a chunk posts its flag at the owner.
        if departures is not None:
            for chunk in range(first, final + 1):
                if signal.last(counters + chunk, tl.load(of_chunk + chunk) * tiles_n) & sound:
                    signal.post(tl.load(departures + chunk).to(tl.pointer_type(tl.int32)), agreed)


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine_kernel(
    partials,  # [splits, M, N or 2N] fp32
    bias,  # [N] or [2N] or None
    addend,  # [M, N] or None
    out,  # [M, N]
    z,  # [M, N or 2N], contiguous, or None
    rows,
    columns,
    width,
    stride_bias,
    stride_addend_row,
    stride_addend_column,
    stride_out_row,
    stride_out_column,
    stride_z_row,
    splits,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the pieces of K in their order, regardless of the order in which programs finished."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = element // columns
    c = element % columns
    inside = r < rows
    total = tl.zeros((BLOCK,), tl.float32)
    if GATED:
        total_up = tl.zeros((BLOCK,), tl.float32)
    else:
        total_up = None
    for piece in range(splits):
        pointers = partials + (piece * rows.to(tl.int64) + r) * width + c
        total += tl.load(pointers, mask=inside, other=0.0)
        if GATED:
            total_up += tl.load(pointers + columns, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + c * stride_bias, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            total_up += tl.load(bias + (columns + c) * stride_bias, mask=inside, other=0.0).to(tl.float32)
    if addend is not None:
        added = addend + r * stride_addend_row + c * stride_addend_column
        total += tl.load(added, mask=inside, other=0.0).to(tl.float32)
    y = _finish(total, total_up, z, r * stride_z_row + c, columns, inside, ACTIVATION)
    tl.store(out + r * stride_out_row + c * stride_out_column, launch.rounded(y, out.dtype.element_ty), mask=inside)


def variants(architecture: str) -> None:
    """Call the launcher once for each variant to compile ahead of time, on meta tensors.

    Use it inside `launch.recording`. The variants serve all calls of weft.ops' layers in bf16 and fp16, with any sizes
    (tests: tests/kernels/test_served.py). Activations and fp32 have one tile each. Of layers with `invariant`, those
    with aligned results are served.
    """
    # No multiples of a tile, and 16 divides them as tests/on_gpu/first_launches.py makes them smaller, too.
    m, n, k = 4112, 2064, 1040

    def matrix(rows, columns, dtype):
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    def forward(x, w, bias=True, **options):
        matmul(x, w.t(), bias=w.new_empty(w.size(0)) if bias else None, **options)

    def backward(dy, x, w, **options):
        dw = torch.empty(w.shape, dtype=torch.float32, device="meta")
        matmul(dy, w, **options)
        matmul(dy.t(), x, **options)
        matmul(dy.t(), x, addend=dw, out=dw, **options)

    def layer(n, k, dtype, **options):
        """Run forward and backward of a linear layer."""
        x, w, dy = matrix(m, k, dtype), matrix(n, k, dtype), matrix(m, n, dtype)
        for bias in (True, False):
            forward(x, w, bias, **options)
        backward(dy, x, w, **options)

    for dtype in (torch.bfloat16, torch.float16):
        x, w, dy = matrix(m, k, dtype), matrix(n, k, dtype), matrix(m, n, dtype)
        for tile in listed(architecture, dtype):
            layer(n, k, dtype, config=tile)
            split = replace(tile, split_k=2)
            matmul(x, w.t(), config=split)
            matmul(dy, w, config=split)
            matmul(dy.t(), x, config=split)
        matmul(x, w.t(), bias=w.new_empty(n), config=split)
        matmul(dy.t(), x, addend=w.float(), config=split)
    x, w, dy = matrix(m, k, torch.bfloat16), matrix(n, k, torch.bfloat16), matrix(m, n, torch.bfloat16)
    odd_w, odd_dy = matrix(n + 1, k, x.dtype), matrix(m, n + 1, x.dtype)
    for tile in listed(architecture, x.dtype):
        forward(x, odd_w, True, config=tile)
        forward(x, odd_w, False, config=tile)
        matmul(x, odd_w.t(), config=replace(tile, split_k=2))
    for tile in listed(architecture, x.dtype, narrow=True):
        layer(n, k + 1, x.dtype, config=tile)
        backward(odd_dy, x, odd_w, config=tile)
        split = replace(tile, split_k=2)
        matmul(matrix(m, k + 1, x.dtype), matrix(n, k + 1, x.dtype).t(), config=split)
        matmul(dy, matrix(n, k + 1, x.dtype), config=split)
        matmul(odd_dy, odd_w, config=split)
        for config, up in product((tile, split), (w, odd_w)):
            matmul(x, up.t(), b_up=up.t(), activation="silu", keep_z=True, config=config)
    for activation in ACTIVATIONS:
        for tile in listed(architecture, x.dtype):
            forward(x, w, activation=activation, keep_z=True, config=tile)
        forward(x, w, activation=activation, keep_z=True, config=replace(tile, split_k=2))
    for activation in ("gelu", "gelu_tanh"):
        matmul(x, w.t(), b_up=w.t(), activation=activation, keep_z=True)
    for activation in ("silu", "gelu", "gelu_tanh"):
        for features, dtype in product((n, n + 1), launch.DTYPES):
            gated_forward(matrix(m, 2 * features, dtype), activation)
            gated_backward(matrix(m, features, dtype), matrix(m, 2 * features, dtype), activation)
    for dtype in launch.DTYPES:  # of layers with `invariant`: sums in fp32, in one block for all operands
        a, b = matrix(m, k, dtype), matrix(k, n, dtype)
        a_turned, b_turned = matrix(k, m, dtype).t(), matrix(n, k, dtype).t()
        a_odd, b_odd = matrix(m, k + 1, dtype)[:, :-1], matrix(k, n + 1, dtype)[:, :-1]
        odd = () if dtype == torch.float32 else ((a_odd, b), (a, b_odd))  # its sums would spill
        for left, right in ((a, b), (a, b_turned), (a_turned, b), *odd):
            tile, total = tile_of_any_size(left, right), matrix(m, n, torch.float32)
            matmul(left, right, out_dtype=torch.float32, config=tile)
            matmul(left, right, addend=total, out=total, config=tile)
    for precision in PRECISIONS:
        layer(n, k, torch.float32, precision=precision)
    x, w, dy = matrix(m, k, torch.float32), matrix(n, k, torch.float32), matrix(m, n, torch.float32)
    split = replace(listed(architecture, x.dtype)[0], split_k=2)
    matmul(x, w.t(), config=split)
    matmul(dy, w, config=split)
    matmul(x, w.t(), b_up=w.t(), activation="silu", keep_z=True)
