"""Activations and their derivatives as parts of other kernels, in fp32; a gated one is two kernels of its own.

gelu        z Phi(z), Phi the normal distribution function (Hendrycks and Gimpel 2016), to 1e-7 by a formula of
            Abramowitz and Stegun 1964 (7.1.26): a library's erf takes about thirty times the machine code
gelu_tanh   its approximation z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2
relu        max(z, 0)
silu        z sigmoid(z)
gated       y = act(gate) * up, with z [M, 2F] = gate [M, F] beside up [M, F] (Shazeer 2020; SwiGLU is silu)

`gated_forward` reads 2 M F elements (gate, up) and writes M F; `gated_backward` reads 3 M F (dy, gate, up) and writes
2 M F (dgate, dup). Each takes 10 to 20 M F operations.
Tests: tests/kernels/test_matmul.py.
"""

import torch

from weft.kernels import launch
from weft.kernels.language import cdiv, tl, triton
from weft.kernels.replay import replayed

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")

_BLOCK = 1024  # elements per program: with 4 warps 8 per thread, one 16-byte access of 16-bit elements


def check_activation(op: str, activation: str | None) -> str:
    """Return the activation's name for a kernel ("none" for None); raise ValueError if it does not exist."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r} is not one of None, {', '.join(map(repr, ACTIVATIONS))}")
    return activation or "none"


@replayed
def gated_forward(z: torch.Tensor, activation: str) -> torch.Tensor:
    """Return y [M, F] = act(z[:, :F]) * z[:, F:], rounded once.

    Args:
        z: [M, 2F], any strides.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    op = "gated_forward"
    check_activation(op, activation)
    launch.check_memory(op, z=z)
    launch.check_dtype(op, z=z)
    if z.dim() != 2 or z.size(1) % 2:
        raise ValueError(f"{op}: z {tuple(z.shape)} must be a matrix [M, 2F]; flatten the leading dimensions")
    rows, features = z.size(0), z.size(1) // 2
    y = launch.empty((rows, features), z.dtype, z.device)
    columns = cdiv(features, _BLOCK)
    launch.launch(
        _gated_forward_kernel, (rows * columns,), z, y, features, *z.stride(), ACTIVATION=activation, BLOCK=_BLOCK
    )
    return y


@replayed
def gated_backward(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """Return dz [M, 2F] of y = act(z[:, :F]) * z[:, F:].

    Args:
        dy: [M, F], any strides.
        z: [M, 2F], any strides.

    Raises:
        ValueError, TypeError: the kernel does not take an argument.
    """
    op = "gated_backward"
    check_activation(op, activation)
    device = launch.check_memory(op, dy=dy, z=z)
    launch.check_dtype(op, dy=dy, z=z)
    if dy.dim() != 2:
        raise ValueError(f"{op}: dy must be a matrix [M, F], got {dy.dim()} dimensions; flatten the leading ones")
    rows, features = dy.shape
    launch.check_shape(op, (rows, 2 * features), z=z)
    dz = launch.empty((rows, 2 * features), z.dtype, device)
    columns = cdiv(features, _BLOCK)
    launch.launch(
        _gated_backward_kernel,
        (rows * columns,),
        dy,
        z,
        dz,
        features,
        *dy.stride(),
        *z.stride(),
        ACTIVATION=activation,
        BLOCK=_BLOCK,
    )
    return dz


@triton.jit
def activate(z, NAME: tl.constexpr):
    """Return act(z) of fp32 z; "none" is the identity."""
    if NAME == "gelu":
        distribution, _ = _normal(z)
        return z * distribution
    if NAME == "gelu_tanh":
        return z * tl.sigmoid(2 * _gelu_inner(z))  # (1 + tanh(u)) / 2 is sigmoid(2 u)
    if NAME == "relu":
        return tl.where(z > 0, z, z * 0)  # not max: NaN stays NaN
    if NAME == "silu":
        return z * tl.sigmoid(z)
    return z


@triton.jit
def derivative(z, NAME: tl.constexpr):
    """Return act'(z) of fp32 z."""
    if NAME == "gelu":
        distribution, exponential = _normal(z)
        return distribution + z * (0.3989422804014327 * exponential)
    if NAME == "gelu_tanh":
        u = 2 * _gelu_inner(z)
        s, rest = (
            tl.sigmoid(u),
            tl.sigmoid(-u),
        )  # not 1 - s, which is off by a rounding of 1 where the factors are large
        return s + 2 * z * s * rest * (0.7978845608028654 * (1 + 3 * 0.044715 * z * z))
    if NAME == "relu":
        return tl.where(z <= 0, 0.0, 1.0)
    if NAME == "silu":
        s = tl.sigmoid(z)
        return s * (1 + z * (1 - s))
    return z * 0 + 1


@triton.jit
def _normal(z):
    """Return Phi(z) and exp(-z^2 / 2). The tail is computed by itself, so that small values stay accurate."""
    exponential = tl.exp(-0.5 * z * z)
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(z))
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * polynomial * exponential
    return tl.where(z < 0, tail, 1 - tail), exponential


@triton.jit
def _gelu_inner(z):
    return 0.7978845608028654 * (z + 0.044715 * z * z * z)


@triton.jit
def _load_gated(z, features, stride_z_row, stride_z_column, BLOCK: tl.constexpr):
    """Return this program's row, columns and mask, with gate and up in fp32."""
    blocks = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    gate_pointers = z + row * stride_z_row + column * stride_z_column
    gate = tl.load(gate_pointers, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_pointers + features * stride_z_column, mask=inside, other=0.0).to(tl.float32)
    return row, column, inside, gate, up


@triton.jit
def _gated_forward_kernel(
    z,  # [M, 2F], gate beside up
    y,  # [M, F], contiguous
    features,
    stride_z_row,
    stride_z_column,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside, gate, up = _load_gated(z, features, stride_z_row, stride_z_column, BLOCK)
    result = launch.rounded(activate(gate, ACTIVATION) * up, y.dtype.element_ty)
    tl.store(y + row * features + column, result, mask=inside)


@triton.jit
def _gated_backward_kernel(
    dy,  # [M, F]
    z,  # [M, 2F], gate beside up
    dz,  # [M, 2F], contiguous
    features,
    stride_dy_row,
    stride_dy_column,
    stride_z_row,
    stride_z_column,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside, gate, up = _load_gated(z, features, stride_z_row, stride_z_column, BLOCK)
    g = tl.load(dy + row * stride_dy_row + column * stride_dy_column, mask=inside, other=0.0).to(tl.float32)
    dz_pointers = dz + row * (2 * features) + column
    dgate = launch.rounded(g * up * derivative(gate, ACTIVATION), dz.dtype.element_ty)
    dup = launch.rounded(g * activate(gate, ACTIVATION), dz.dtype.element_ty)
    tl.store(dz_pointers, dgate, mask=inside)
    tl.store(dz_pointers + features, dup, mask=inside)
