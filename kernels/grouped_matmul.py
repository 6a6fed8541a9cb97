"""grouped_matmul: one product for each expert, over the rows that `offsets` gives it.

    offsets [E + 1] int32 on the device, ascending; rows offsets[e] to offsets[e + 1] are of expert e, and
    offsets[E] is at most R

    forward   y[r]  = act(x[r] @ w[e].T + b[e])                         a = x,   b = w.transpose(1, 2)   e of row r
    gated     y[r]  = act(x[r] @ gate[e].T + ...) * (x[r] @ up[e].T + ...)      b_up, z [R, 2N]
    dgrad     dx[r] = dz[r] @ w[e]                                      a = dz,  b = w
    wgrad     dw[e] = dw[e] + dz[rows of e].T @ x[rows of e]            `grouped_wgrad`, dw = main_grad in fp32

2 R N K operations each (4 R N K gated). Device memory: at least R K + E K N elements read and R N written; experts
without rows are not read. The host never reads `offsets`: each program finds its tiles in it. A tile has rows of one
expert only, so there are at most R / block_m + E of them times N / block_n. The sum over K, or over an expert's rows,
is in fp32, in order, and rounded once; no result is touched by an atomic, and nothing depends on other experts' rows.
Rows after offsets[E] are not written. Tiles of one expert run beside one another, rows first, so that a strip of its
weight is read from device memory once.

Operands come from the tensor copy engine where it can read them, else by masked loads, in the tiles of `matmul_tiles`;
the rest is `matmul`'s own. Nothing is saved here. Tests: tests/kernels/test_grouped_matmul.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from weft.kernels import launch
from weft.kernels.activation import check_activation
from weft.kernels.config import MatmulConfig, choose, chosen
from weft.kernels.language import TensorDescriptor, cdiv, next_power_of_2, tl, triton
from weft.kernels.matmul import PRECISIONS, _ask_for, _emit, _load, _strip, _widest_strip
from weft.kernels.matmul_tiles import listed
from weft.kernels.replay import replayed

MOST_GROUPS = 1024  # a program holds all offsets
_LEAST_LANES = 64  # of the offsets in a program: one variant serves all up to 64 experts
_HEIGHT: tl.constexpr = tl.constexpr(16)  # tiles of rows that share a strip of an expert's weight


@dataclass(frozen=True)
class GroupedProblem:
    """The properties of a grouped product that its speed depends on.

    Attributes:
        rows: of all groups.
        columns, depth: sizes of the weight of a group along the result and along the sum; for "wgrad", both are along
            the result.
        kind: "nt" for a forward (the weight's rows are along the sum), "nn" for a dgrad, "wgrad".
        fused: as in `matmul_tiles.Problem`.
    """

    rows: int
    columns: int
    depth: int
    groups: int
    kind: str
    dtype: str
    fused: str = "none"

    def key(self) -> dict[str, int | str]:
        """Return the key for the lookup in a tuned table."""
        return asdict(self)


def problem_of(a: torch.Tensor, b: torch.Tensor, b_up=None, activation: str | None = None) -> GroupedProblem:
    """Return the problem of `grouped_matmul` with these arguments."""
    fused = (activation or "none") + ("_gated" if b_up is not None else "")
    kind = "nt" if _is_turned(b) else "nn"
    return GroupedProblem(a.size(0), b.size(2), b.size(1), b.size(0), kind, _name(a), fused)


def wgrad_problem_of(dz: torch.Tensor, x: torch.Tensor, groups: int, adds: bool) -> GroupedProblem:
    """Return the problem of `grouped_wgrad` with these arguments."""
    fused = "main_grad" if adds else "none"
    return GroupedProblem(dz.size(0), dz.size(1), x.size(1), groups, "wgrad", _name(dz), fused)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_turned(b: torch.Tensor) -> bool:
    return b.stride(1) == 1 and b.stride(2) != 1


@replayed
def grouped_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    *,
    b_up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    keep_z: bool = False,
    precision: str = "ieee",
    config: MatmulConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return act(a[r] @ b[e] + bias[e]) for each row r of each group e, and z, the input of the activation.

    Args:
        a: [R, K], bf16, fp16 or fp32, with contiguous rows.
        b: [E, K, N], of a's type, any strides.
        offsets: [E + 1] int32, contiguous: the first row of each group, and the end of the last.
        b_up: [E, K, N], with b's strides; makes the products gated, as in `matmul`.
        bias: [E, N], or [E, 2N] for gated products, contiguous.
        activation: None, "gelu", "gelu_tanh", "relu" or "silu".
        keep_z: also return z, [R, N] (gated: [R, 2N]) in a's type.
        precision: precision of fp32 operands: "ieee" or "tf32".
        config: an explicit tile configuration, with K whole; by default the table's, else the heuristic's.

    Returns:
        (out [R, N], z); z is None without keep_z. Rows after the last group are not written.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any launch.
    """
    op = "grouped_matmul"
    if a.dim() != 2 or b.dim() != 3 or a.size(1) != b.size(1):
        raise ValueError(f"{op}: a {tuple(a.shape)} and b {tuple(b.shape)} must be [R, K] and [E, K, N]")
    (rows, depth), (groups, _, columns) = a.shape, b.shape
    width = 2 * columns if b_up is not None else columns
    _check(op, groups, offsets, precision, a=a, b=b, b_up=b_up, bias=bias)
    launch.check_shape(op, b.shape, b_up=b_up)
    launch.check_shape(op, (groups, width), bias=bias)
    check_activation(op, activation)
    if b_up is not None and b_up.stride() != b.stride():
        raise ValueError(f"{op}: b_up has strides {b_up.stride()} and must have those of b, {b.stride()}")
    if bias is not None and not bias.is_contiguous():
        raise ValueError(f"{op}: bias has strides {bias.stride()}; make it contiguous")
    out = launch.empty((rows, columns), a.dtype, a.device)
    z = launch.empty((rows, width), a.dtype, a.device) if keep_z else None
    if not rows:
        return out, z
    turned = _is_turned(b)
    stored = [w.transpose(1, 2) if turned else w for w in (b, b_up) if w is not None]
    odd = columns % 16 != 0 or depth % 16 != 0
    descriptors = not odd and _describes(a, *stored)
    tiles = tiles_of(launch.architecture_of(a.device), a.dtype, gated=b_up is not None, descriptors=descriptors)
    guess = _guess(tiles, [tile.block_m * 2 <= rows / groups for tile in tiles], odd)
    config = _choose(a, problem_of(a, b, b_up, activation), config, tiles, guess)
    programs = (cdiv(rows, config.block_m) + groups) * cdiv(columns, config.block_n)
    block = [1, config.block_n, config.block_k] if turned else [1, config.block_k, config.block_n]
    launch.launch(
        _grouped_matmul_kernel,
        (programs,),
        _described(a, [config.block_m, config.block_k], descriptors),
        _described(stored[0], block, descriptors) if descriptors else b,
        None if b_up is None else _described(stored[1], block, descriptors) if descriptors else b_up,
        bias,
        out,
        z,
        offsets,
        columns,
        depth,
        groups,
        programs,
        *((a.stride(0), *b.stride()) if not descriptors else (0, 0, 0, 0)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STRIP=min(config.block_n, _strip(a, columns, False, True)),
        GROUPS=max(_LEAST_LANES, next_power_of_2(groups)),
        ACTIVATION=activation or "none",
        PRECISION=precision if a.dtype == torch.float32 else "ieee",
        COLUMNS_OF_16=columns % 16 == 0,
        DEPTH_OF_16=depth % 16 == 0,
        DESCRIPTORS=descriptors,
        TURNED=turned,
        OUT_DTYPE=launch.TRITON_TYPES[a.dtype],
        warps=config.warps,
        stages=config.stages,
    )
    return out, z


@replayed
def grouped_wgrad(
    dz: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    *,
    main_grad: torch.Tensor | None = None,
    precision: str = "ieee",
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """Return dw[e] = dz[rows of e].T @ x[rows of e] for each group e; zeros for a group without rows.

    Args:
        dz: [R, N], bf16, fp16 or fp32, with contiguous rows.
        x: [R, K], of dz's type, with contiguous rows.
        offsets: [E + 1] int32, contiguous: the first row of each group, and the end of the last.
        main_grad: [E, N, K] fp32, contiguous; dw is added to it, and it is returned.
        precision, config: as in `grouped_matmul`.

    Raises:
        ValueError, TypeError: the kernel does not take an argument. Raised before any launch.
    """
    op = "grouped_wgrad"
    if dz.dim() != 2 or x.dim() != 2 or dz.size(0) != x.size(0):
        raise ValueError(f"{op}: dz {tuple(dz.shape)} and x {tuple(x.shape)} must be [R, N] and [R, K]")
    groups, rows, columns = offsets.numel() - 1, dz.size(1), x.size(1)
    _check(op, groups, offsets, precision, dz=dz, x=x)
    if main_grad is not None:
        launch.check_memory(op, dz=dz, main_grad=main_grad)
        launch.check_dtype(op, (torch.float32,), main_grad=main_grad)
        launch.check_shape(op, (groups, rows, columns), main_grad=main_grad)
        if not main_grad.is_contiguous():
            raise ValueError(f"{op}: main_grad has strides {main_grad.stride()}; make it contiguous")
    out = main_grad if main_grad is not None else launch.empty((groups, rows, columns), dz.dtype, dz.device)
    odd = rows % 16 != 0 or columns % 16 != 0
    descriptors, processors = not odd and _describes(dz, x), launch.multiprocessors(dz.device)
    tiles = tiles_of(launch.architecture_of(dz.device), dz.dtype, descriptors=descriptors)
    units = [groups * cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n) for tile in tiles]
    guess = _guess(tiles, [each >= processors for each in units], odd)
    problem = wgrad_problem_of(dz, x, groups, main_grad is not None)
    config = _choose(dz, problem, config, tiles, guess)
    programs = groups * cdiv(rows, config.block_m) * cdiv(columns, config.block_n)
    stored = descriptors and launch.describable(out)
    crowded = config.block_k > 64 and main_grad is not None
    strip = min(config.block_n, _strip(dz, columns, False, crowded or not stored))
    if stored and main_grad is None:
        strip = _widest_strip(strip, config, dz, out)
    launch.launch(
        _grouped_wgrad_kernel,
        (programs,),
        _by_groups(dz, [1, config.block_k, config.block_m]) if descriptors else dz,
        _by_groups(x, [1, config.block_k, config.block_n]) if descriptors else x,
        offsets,
        main_grad,
        TensorDescriptor.from_tensor(out, [1, config.block_m, strip]) if stored else out,
        rows,
        columns,
        groups,
        programs,
        *((dz.stride(0), x.stride(0)) if not descriptors else (0, 0)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STRIP=strip,
        PRECISION=precision if dz.dtype == torch.float32 else "ieee",
        ROWS_OF_16=rows % 16 == 0,
        COLUMNS_OF_16=columns % 16 == 0,
        DESCRIPTORS=descriptors,
        STORE_DESCRIPTOR=stored,
        OUT_DTYPE=launch.TRITON_TYPES[out.dtype],
        warps=config.warps,
        stages=config.stages,
    )
    return out


def _check(op: str, groups: int, offsets: torch.Tensor, precision: str, **operands: torch.Tensor | None) -> None:
    launch.check_memory(op, **operands, offsets=offsets)
    first = next(operand for operand in operands.values() if operand is not None)
    launch.check_dtype(op, launch.DTYPES, **operands)
    launch.check_dtype(op, (first.dtype,), **operands)
    launch.check_dtype(op, (torch.int32,), offsets=offsets)
    launch.check_shape(op, (groups + 1,), offsets=offsets)
    if not offsets.is_contiguous():
        raise ValueError(f"{op}: offsets has strides {offsets.stride()}; make it contiguous")
    if not 1 <= groups <= MOST_GROUPS:
        raise ValueError(
            f"{op}: {groups} groups must be 1 to {MOST_GROUPS}; call it for a part of the experts at a time"
        )
    for name, operand in operands.items():
        if operand is not None and operand.dim() == 2 and operand.size(1) > 1 and operand.stride(1) != 1:
            raise ValueError(f"{op}: {name} has strides {operand.stride()}; its rows must be contiguous")
        if operand is not None and max(operand.shape) >= 2**31 - 2**10:
            raise ValueError(f"{op}: {name} has a dimension of {max(operand.shape)}, which does not fit 31 bits")
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision={precision!r} is not one of {', '.join(map(repr, PRECISIONS))}")


def _describes(*operands: torch.Tensor) -> bool:
    """Return True if the tensor copy engine loads the operands, each as it is stored."""
    return launch.has_copy_engine(operands[0].device) and all(map(launch.describable, operands))


def _described(operand: torch.Tensor, block: list[int], descriptors: bool):
    return TensorDescriptor.from_tensor(operand, block) if descriptors else operand


def _by_groups(rows: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return a descriptor of [R, N] as [R, R, N]: [i, j] is row i + j.

    With the first row of a group as i, rows before the group have a negative j, for which zeros come (CUDA programming
    guide, on negative indices). A descriptor of [R, N] ends with the matrix alone, so the rows of an expert that fill
    no block took a second loop, without copies ahead, and up to 100 registers more.
    """
    count, width = rows.shape
    return TensorDescriptor(rows, [count, count, width], [rows.stride(0), rows.stride(0), 1], block)


def tiles_of(
    architecture: str, dtype: torch.dtype, *, gated: bool = False, descriptors: bool | None = None
) -> tuple[MatmulConfig, ...]:
    """Return the tile configurations that exist.

    Args:
        gated: of products with two sums.
        descriptors: whether the tensor copy engine loads the operands; None: it does where kernels use it.
    """
    if descriptors is None:
        descriptors = architecture not in launch.WITHOUT_COPY_ENGINE
    every = listed(architecture, dtype, narrow=gated or not descriptors)
    return tuple(tile for tile in every if not tile.rest_n)


def _guess(tiles: Sequence[MatmulConfig], enough: Sequence[bool], odd: bool) -> MatmulConfig:
    """Return the largest tile that has enough programs, else the smallest one.

    Columns that 16 does not divide have an address each, so the registers hold half as many of the smallest.
    """
    if odd:
        return replace(tiles[-1], block_k=max(16, tiles[-1].block_k // 2))
    return next((tile for tile, many in zip(tiles, enough, strict=True) if many), tiles[-1])


def _choose(
    a: torch.Tensor,
    problem: GroupedProblem,
    explicit: MatmulConfig | None,
    tiles: Sequence[MatmulConfig],
    guess: MatmulConfig,
) -> MatmulConfig:
    choice = choose("grouped_matmul", launch.architecture_of(a.device), problem.key(), explicit, tiles, guess)
    return chosen(choice, tiles, guess)


@triton.jit(do_not_specialize=["columns", "depth", "groups", "programs"])
def _grouped_matmul_kernel(
    a,  # [R, K], contiguous rows
    b,  # [E, K, N]; its descriptor is of [E, N, K] where TURNED
    b_up,  # [E, K, N] with b's strides, or None
    bias,  # [E, N] or [E, 2N], contiguous, or None
    out,  # [R, N], contiguous
    z,  # [R, N or 2N], contiguous, or None
    offsets,  # [E + 1]
    columns,
    depth,
    groups,
    programs,
    stride_a,
    stride_b_group,
    stride_b_row,
    stride_b_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of 2 that is at least groups
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS_OF_16: tl.constexpr,
    DEPTH_OF_16: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TURNED: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
):
    if COLUMNS_OF_16:
        columns = columns // 16 * 16
    if DEPTH_OF_16:
        depth = depth // 16 * 16
    # 1. Count the tiles of rows of each group.
    lane = tl.arange(0, GROUPS)
    begin = tl.load(offsets + lane, mask=lane < groups, other=0)
    end = tl.load(offsets + lane + 1, mask=lane < groups, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    done = tl.cumsum(tiles, 0)  # tiles up to the end of each group
    tiles_n = tl.cdiv(columns, BLOCK_N)
    width = columns
    if b_up is not None:
        width = 2 * columns
    for unit in tl.range(tl.program_id(0), tl.sum(tiles, 0) * tiles_n, programs):
        # 2. Find the tile's group and its rows.
        group = tl.sum((done * tiles_n <= unit).to(tl.int32), 0)
        first = tl.load(offsets + group)
        last = tl.load(offsets + group + 1)
        high = (last - first + BLOCK_M - 1) // BLOCK_M
        within = unit - tl.sum(tl.where(lane < group, tiles, 0), 0) * tiles_n
        block = within // (_HEIGHT * tiles_n) * _HEIGHT
        height = tl.minimum(high - block, _HEIGHT)
        within = within % (_HEIGHT * tiles_n)
        row = first + (block + within % height) * BLOCK_M
        column = within // height * BLOCK_N

        # 3. Sum over K, in order.
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if b_up is not None:
            total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        else:
            total_up = None
        for k in range(0, depth, BLOCK_K):
            x = _load(a, row, k, last, depth, stride_a, 1, BLOCK_M, BLOCK_K, DESCRIPTORS, False)
            w = _load_of(b, group, k, column, depth, columns, stride_b_group, stride_b_row, stride_b_column,
                         BLOCK_K, BLOCK_N, DESCRIPTORS, TURNED)  # fmt: skip
            total = launch.dot(x, w, total, PRECISION)
            if b_up is not None:
                w_up = _load_of(b_up, group, k, column, depth, columns, stride_b_group, stride_b_row, stride_b_column,
                                BLOCK_K, BLOCK_N, DESCRIPTORS, TURNED)  # fmt: skip
                total_up = launch.dot(x, w_up, total_up, PRECISION)

        # 4. Write the rows of this group.
        if bias is not None:
            own_bias = bias + group.to(tl.int64) * width
        else:
            own_bias = None
        _emit(total, total_up, own_bias, None, out, None, z, 0, row, column, last, columns, 1, 0, 0, columns, 1, width,
              BLOCK_M, BLOCK_N, STRIP, ACTIVATION, False, False, OUT_DTYPE, False)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns", "groups", "programs"])
def _grouped_wgrad_kernel(
    dz,  # [R, N], contiguous rows
    x,  # [R, K], contiguous rows
    offsets,  # [E + 1]
    addend,  # `out`, or None
    out,  # [E, N, K], contiguous
    rows,  # N
    columns,  # K
    groups,
    programs,
    stride_dz,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS_OF_16: tl.constexpr,
    COLUMNS_OF_16: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    STORE_DESCRIPTOR: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
):
    if ROWS_OF_16:
        rows = rows // 16 * 16
    if COLUMNS_OF_16:
        columns = columns // 16 * 16
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    for unit in tl.range(tl.program_id(0), groups * tiles, programs):
        group = unit // tiles
        row = (unit % tiles) // tiles_n * BLOCK_M
        column = (unit % tiles_n) * BLOCK_N
        first = tl.load(offsets + group)
        count = tl.load(offsets + group + 1) - first
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        own = group.to(tl.int64) * rows * columns
        own_addend = None
        if addend is not None:
            own_addend = addend + own
            # Before the sum, which is short. In its loop, Triton's pipeline for sm_100 does not take the instruction.
            _ask_for(own_addend, 0, row, column, rows, columns, columns, 1, BLOCK_M, BLOCK_N)
        start = 0
        if DESCRIPTORS:  # A block that is not whole comes first: they give zeros before the group's first row.
            start = count - tl.cdiv(count, BLOCK_K) * BLOCK_K
        for r in range(start, count, BLOCK_K):
            g = _load_of(dz, first, row, r, rows, count, stride_dz, 1, stride_dz, BLOCK_M, BLOCK_K, DESCRIPTORS, True)
            w = _load_of(x, first, r, column, count, columns, stride_x, stride_x, 1, BLOCK_K, BLOCK_N, DESCRIPTORS,
                         False)  # fmt: skip
            total = launch.dot(g, w, total, PRECISION)
        own_out = out
        if not STORE_DESCRIPTOR:
            own_out = out + own
        _emit(total, None, None, own_addend, own_out, None, None, group, row, column, rows, columns, 0, columns, 1,
              columns, 1, 0, BLOCK_M, BLOCK_N, STRIP, "none", False, STORE_DESCRIPTOR, OUT_DTYPE, False)  # fmt: skip


@triton.jit
def _load_of(matrices, group, row, column, rows, columns, stride_group, stride_row, stride_column, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """Load the tile [ROWS, COLUMNS] at (row, column) of the group's matrix, with zeros outside the matrix."""
    if DESCRIPTOR:
        if TURNED:
            tile = matrices.load([group, column, row]).reshape(COLUMNS, ROWS).T
        else:
            tile = matrices.load([group, row, column]).reshape(ROWS, COLUMNS)
    else:
        tile = _load(matrices + group.to(tl.int64) * stride_group, row, column, rows, columns, stride_row,
                     stride_column, ROWS, COLUMNS, False, False)  # fmt: skip
    return tile


def variants(architecture: str) -> None:
    """Call the launchers once for each variant to compile ahead of time, on meta tensors; see `matmul.variants`.

    They serve up to 64 experts of silu with a gate, of sizes that 16 divides or not, and up to 128 of bf16 of such that
    16 divides: in the tiles that the heuristic takes, and up to 64 in every tile that a table may choose. Others are
    compiled at their first call.
    """

    def layer(dtype, odd, experts, tokens=4096, each: Sequence[MatmulConfig | None] = (None,), gated=True):
        hidden, inner = 1024 + odd, 512 + odd

        def matrix(*shape, dtype=dtype):
            return torch.empty(*shape, dtype=dtype, device="meta")

        offsets = matrix(experts + 1, dtype=torch.int32)
        x, up, down = matrix(tokens, hidden), matrix(experts, 2 * inner, hidden), matrix(experts, hidden, inner)
        y, dz = matrix(tokens, inner), matrix(tokens, 2 * inner)
        gate_t, up_t = (half.transpose(1, 2) for half in up.chunk(2, 1))
        for config in each:
            if gated:
                grouped_matmul(x, gate_t, offsets, b_up=up_t, activation="silu", keep_z=True, config=config)
                continue
            grouped_matmul(y, down.transpose(1, 2), offsets, config=config)
            grouped_matmul(dz, up, offsets, config=config)
            main_grad = matrix(experts, 2 * inner, hidden, dtype=torch.float32)
            grouped_wgrad(dz, x, offsets, config=config)
            grouped_wgrad(dz, x, offsets, main_grad=main_grad, config=config)

    for gated in (True, False):
        of_experts = ((torch.bfloat16, 0, 8), (torch.bfloat16, 0, 128), (torch.bfloat16, 1, 8), (torch.float32, 0, 8))
        for dtype, odd, experts in of_experts:
            layer(dtype, odd, experts, tokens=128 * experts, gated=gated)
        for rows in (16, 1024):  # of an expert: the smallest and the largest tile
            layer(torch.bfloat16, 0, 128, tokens=128 * rows, gated=gated)
        layer(torch.bfloat16, 0, 8, each=tiles_of(architecture, torch.bfloat16, gated=gated), gated=gated)
