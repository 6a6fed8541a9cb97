"""permute and unpermute: rows of tokens in the order of experts, and the sums of each token's rows.

    permute     rows[r] = x[token[r]]                                 reads and writes R H elements
    unpermute   y[t]    = sum over k of scale[p] rows[p],             reads R H, writes T H
                p = place[t, k]; -1 is no row; scale may be absent
    backward    drows[r]  = scale[r] dy[token[r]]                     reads 2 R H, writes R H
                dscale[r] = sum over h of rows[r, h] dy[token[r], h]

Without a scale, each of the first two is the other's gradient. All convert the type in the same pass. Sums are in fp32,
in order (over h: lanes of a program, then a fixed tree), and rounded once; each element of a result is written by one
program, without atomics, so every run gives the same bits.

It was run in the interpreter and compiled; it was never timed. Tests: tests/kernels/test_permute.py.
"""

import torch

from weft.kernels import launch
from weft.kernels.language import cdiv, tl, triton
from weft.kernels.replay import replayed

_BLOCK = 1024  # elements per program: with 4 warps 8 per thread, one 16-byte access of 16-bit elements


@replayed
def permute(x: torch.Tensor, token: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return rows [R, H] = x[token], of type `dtype` (x's by default).

    Args:
        x: [T, H], bf16, fp16 or fp32, any strides.
        token: [R] int64, contiguous, each from 0 to T - 1 (not checked).

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    _check("permute", x, token, 1, dtype)
    rows = launch.empty((token.size(0), x.size(1)), dtype or x.dtype, x.device)
    columns = cdiv(x.size(1), _BLOCK)
    launch.launch(_permute_kernel, (token.size(0) * columns,), x, token, rows, x.size(1), *x.stride(), BLOCK=_BLOCK)
    return rows


@replayed
def unpermute(
    rows: torch.Tensor, place: torch.Tensor, dtype: torch.dtype | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return y [T, H], the sums of each token's rows, of type `dtype` (that of rows by default).

    Args:
        rows: [R, H], bf16, fp16 or fp32, any strides.
        place: [T, K] int64, contiguous: a token's rows in the order of the sum, from 0 to R - 1 (not checked), or -1.
        scale: [R], bf16, fp16 or fp32, contiguous: the weight of each row; None is 1.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    _check("unpermute", rows, place, 2, dtype)
    _check_scale("unpermute", rows, scale)
    y = launch.empty((place.size(0), rows.size(1)), dtype or rows.dtype, rows.device)
    columns = cdiv(rows.size(1), _BLOCK)
    launch.launch(
        _unpermute_kernel,
        (place.size(0) * columns,),
        rows,
        place,
        scale,
        y,
        rows.size(1),
        place.size(1),
        *rows.stride(),
        BLOCK=_BLOCK,
    )
    return y


@replayed
def unpermute_backward(
    dy: torch.Tensor, rows: torch.Tensor, token: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (drows [R, H], of the type of rows; dscale [R], of that of scale).

    Args:
        dy: [T, H], bf16, fp16 or fp32, any strides.
        rows: [R, H], bf16, fp16 or fp32, any strides.
        token: [R] int64, contiguous: the token of each row, from 0 to T - 1 (not checked).
        scale: [R], as in `unpermute`.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    op = "unpermute_backward"
    _check(op, dy, token, 1, None)
    launch.check_memory(op, dy=dy, rows=rows)
    launch.check_dtype(op, rows=rows)
    launch.check_shape(op, (token.size(0), dy.size(1)), rows=rows)
    _check_scale(op, rows, scale)
    drows = launch.empty(tuple(rows.shape), rows.dtype, rows.device)
    dscale = launch.empty((rows.size(0),), scale.dtype, rows.device)
    launch.launch(
        _unpermute_backward_kernel,
        (rows.size(0),),
        dy,
        rows,
        token,
        scale,
        drows,
        dscale,
        rows.size(1),
        *dy.stride(),
        *rows.stride(),
        BLOCK=_BLOCK,
    )
    return drows, dscale


def _check_scale(op: str, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    launch.check_memory(op, rows=rows, scale=scale)
    launch.check_dtype(op, scale=scale)
    launch.check_shape(op, (rows.size(0),), scale=scale)
    if scale is not None and not scale.is_contiguous():
        raise ValueError(f"{op}: scale has strides {scale.stride()}; make it contiguous")


def _check(op: str, x: torch.Tensor, index: torch.Tensor, dimensions: int, dtype: torch.dtype | None) -> None:
    launch.check_memory(op, x=x, index=index)
    launch.check_dtype(op, x=x)
    launch.check_dtype(op, (torch.int64,), index=index)
    if x.dim() != 2 or index.dim() != dimensions or not index.is_contiguous():
        raise ValueError(
            f"{op}: the rows have shape {tuple(x.shape)} and the index {tuple(index.shape)}, strides {index.stride()}; "
            f"they must be a matrix and {dimensions} contiguous dimensions"
        )
    if dtype is not None and dtype not in launch.DTYPES:
        raise TypeError(f"{op}: dtype={dtype} must be one of {', '.join(map(str, launch.DTYPES))}")


@triton.jit
def _permute_kernel(
    x,  # [T, H]
    token,  # [R]
    rows,  # [R, H], contiguous
    features,
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(features, BLOCK)
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    value = tl.load(x + tl.load(token + row) * stride_row + column * stride_column, mask=inside, other=0.0)
    value = launch.rounded(value.to(tl.float32), rows.dtype.element_ty)
    tl.store(rows + row.to(tl.int64) * features + column, value, mask=inside)


@triton.jit(do_not_specialize=["chosen"])
def _unpermute_kernel(
    rows,  # [R, H]
    place,  # [T, K]
    scale,  # [R], or None
    y,  # [T, H], contiguous
    features,
    chosen,
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(features, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(chosen):
        row = tl.load(place + token * chosen + k)
        value = tl.load(rows + row * stride_row + column * stride_column, mask=inside & (row >= 0), other=0.0)
        value = value.to(tl.float32)
        if scale is not None:
            value *= tl.load(scale + row, mask=row >= 0, other=0.0).to(tl.float32)
        total += value
    tl.store(y + token * features + column, launch.rounded(total, y.dtype.element_ty), mask=inside)


@triton.jit
def _unpermute_backward_kernel(
    dy,  # [T, H]
    rows,  # [R, H]
    token,  # [R]
    scale,  # [R]
    drows,  # [R, H], contiguous
    dscale,  # [R]
    features,
    stride_dy_row,
    stride_dy_column,
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own_scale = tl.load(scale + row).to(tl.float32)
    source = dy + tl.load(token + row) * stride_dy_row
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, features, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < features
        gradient = tl.load(source + column * stride_dy_column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + row * stride_row + column * stride_column, mask=inside, other=0.0).to(tl.float32)
        total += value * gradient
        own = launch.rounded(own_scale * gradient, drows.dtype.element_ty)
        tl.store(drows + row * features + column, own, mask=inside)
    tl.store(dscale + row, launch.rounded(tl.sum(total, 0), dscale.dtype.element_ty))


def variants(architecture: str) -> None:
    """Call the launchers once for each variant to compile ahead of time, on meta tensors; see `matmul.variants`."""
    del architecture
    index = torch.empty(4096, dtype=torch.int64, device="meta")
    for features in (1024, 1025):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.empty(2048, features, dtype=dtype, device="meta")
            scale = torch.empty(4096, dtype=dtype, device="meta")
            y = permute(x, index)
            unpermute(y, index.view(-1, 2))
            unpermute(y, index.view(-1, 2), scale=scale)
            unpermute_backward(x, y, index, scale)
