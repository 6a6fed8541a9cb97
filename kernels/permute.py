"""permute and unpermute: rows of tokens in the order of experts, and the sums of each token's rows.

    permute     rows[r] = x[token[r]]                        reads and writes R H elements
    unpermute   y[t]    = sum over k of rows[place[t, k]]    reads R H, writes T H; place -1 is no row

Each is the other's gradient. Both convert the type in the same pass. Sums are in fp32, in the order of k, and rounded
once; each element of a result is written by one program, without atomics, so every run gives the same bits.

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
def unpermute(rows: torch.Tensor, place: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return y [T, H], the sums of each token's rows, of type `dtype` (that of rows by default).

    Args:
        rows: [R, H], bf16, fp16 or fp32, any strides.
        place: [T, K] int64, contiguous: a token's rows in the order of the sum, from 0 to R - 1 (not checked), or -1.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    _check("unpermute", rows, place, 2, dtype)
    y = launch.empty((place.size(0), rows.size(1)), dtype or rows.dtype, rows.device)
    columns = cdiv(rows.size(1), _BLOCK)
    launch.launch(
        _unpermute_kernel,
        (place.size(0) * columns,),
        rows,
        place,
        y,
        rows.size(1),
        place.size(1),
        *rows.stride(),
        BLOCK=_BLOCK,
    )
    return y


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
        total += value.to(tl.float32)
    tl.store(y + token * features + column, launch.rounded(total, y.dtype.element_ty), mask=inside)


def variants(architecture: str) -> None:
    """Call the launchers once for each variant to compile ahead of time, on meta tensors; see `matmul.variants`."""
    del architecture
    index = torch.empty(4096, dtype=torch.int64, device="meta")
    for features in (1024, 1025):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.empty(2048, features, dtype=dtype, device="meta")
            permute(x, index)
            unpermute(x, index.view(2048, 2))
