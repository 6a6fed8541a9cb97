"""The feed-forward of all experts of a rank, by grouped products on GPUs.

Nothing here reads a tensor on the host: rows of an expert are found by offsets on the device.
"""

from dataclasses import dataclass

import torch

from weft.ops import kernel_choice
from weft.ops.activation import Activation, activation_of
from weft.ops.autocast import cast_operands, without_autocast
from weft.ops.backward import first_order
from weft.ops.kernel_choice import Algorithm
from weft.ops.matmul import check_main_grad

_TAKEN = Algorithm(True, "grouped products over offsets on the device")


@dataclass(frozen=True)
class ExpertWeights:
    """Fused weights of E experts.

    Attributes:
        up: [E, I, H], or [E, 2 I, H] with a gate: gate above up.
        down: [E, H, I].
        up_bias, down_bias: [E, I or 2 I] and [E, H], or None.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        gated: whether up has a gate.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: str
    gated: bool


def algorithm(weight: torch.Tensor) -> Algorithm:
    """Return the implementation for experts with this weight [E, ...], and the reason."""
    if not kernel_choice.on_kernel(weight.device):
        return kernel_choice.excluded(weight.device)
    if weight.dtype == torch.float64:
        return Algorithm(False, "the kernels do not take fp64")
    most = _kernel().MOST_GROUPS
    if weight.size(0) > most:
        return Algorithm(False, f"the kernels take {most} experts on a rank, there are {weight.size(0)}")
    return _TAKEN


def expert_mlps(rows: torch.Tensor, expert: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Return down_e @ (act(gate_e @ x) * (up_e @ x)), or down_e @ act(up_e @ x), for each row x of expert e.

    Args:
        rows: [R, H].
        expert: [R], the expert of each row, in ascending order.

    Returns:
        [R, H].
    """
    numbers = torch.arange(weights.up.size(0) + 1, device=expert.device)
    offsets = torch.searchsorted(expert, numbers.to(expert.dtype)).to(torch.int32)
    operands = cast_operands(rows, weights.up, weights.up_bias, weights.down, weights.down_bias)
    main_grads = getattr(weights.up, "main_grad", None), getattr(weights.down, "main_grad", None)
    activation = activation_of(weights.activation)
    with without_autocast(rows.device.type):
        return ExpertMLPFunction.apply(*operands, offsets, activation, weights.gated, main_grads)


class ExpertMLPFunction(torch.autograd.Function):
    """y = h @ down_e.T + d_e, h = act(z) (gated: act(z_gate) * z_up), z = x @ up_e.T + b_e, for rows of expert e.

    x [R, H]        up [E, I or 2I, H]        z [R, I or 2I]        h [R, I]        down [E, H, I]        y [R, H]

    forward   z, h = grouped(x, up.T), with the activation in the epilogue;  y = grouped(h, down.T)
    dgrad     dh = grouped(dy, down);  dz = act'(z) dh;  dx = grouped(dz, up)
    wgrad     d_down_e = dy_e.T @ h_e,  d_up_e = dz_e.T @ x_e
    dbias     the same with a column of ones in place of h and x

    Saves x, z and the weights; h is computed again from z. If a weight has an fp32 `main_grad`, its gradient is added
    to that and the weight gets none.
    """

    @staticmethod
    def forward(ctx, x, up, up_bias, down, down_bias, offsets, activation: Activation, gated: bool, main_grads):
        ctx.activation, ctx.gated, ctx.main_grads = activation, gated, main_grads
        for weight, main_grad in zip((up, down), main_grads, strict=True):
            if main_grad is not None:
                check_main_grad(main_grad, weight.shape)
        kernel, x = _kernel(), x.contiguous()
        first, second = up.transpose(1, 2), None
        if gated:
            first, second = first.chunk(2, 2)
        h, z = kernel.grouped_matmul(
            x, first, offsets, b_up=second, bias=up_bias, activation=activation.name, keep_z=True
        )
        y, _ = kernel.grouped_matmul(h, down.transpose(1, 2), offsets, bias=down_bias)
        ctx.save_for_backward(x, z, up, down, offsets)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        from weft.kernels.activation import gated_backward, gated_forward

        kernel, dy = _kernel(), dy.contiguous()
        x, z, up, down, offsets = ctx.saved_tensors
        needs_x, needs_up, needs_up_bias, needs_down, needs_down_bias, *_ = ctx.needs_input_grad
        name = ctx.activation.name
        dx = d_up = d_up_bias = d_down = d_down_bias = None
        if needs_down:
            h = gated_forward(z, name) if ctx.gated else ctx.activation.apply(z)
            d_down = _wgrad(dy, h, offsets, ctx.main_grads[1])
        if needs_down_bias:
            d_down_bias = _sums(dy, offsets)
        if needs_x or needs_up or needs_up_bias:
            dh, _ = kernel.grouped_matmul(dy, down, offsets)
            dz = gated_backward(dh, z, name) if ctx.gated else ctx.activation.backward(dh, z)
            dx = kernel.grouped_matmul(dz, up, offsets)[0] if needs_x else None
            d_up = _wgrad(dz, x, offsets, ctx.main_grads[0]) if needs_up else None
            d_up_bias = _sums(dz, offsets) if needs_up_bias else None
        return dx, d_up, d_up_bias, d_down, d_down_bias, None, None, None, None


def _wgrad(dz, x, offsets, main_grad) -> torch.Tensor | None:
    dw = _kernel().grouped_wgrad(dz, x, offsets, main_grad=main_grad)
    return None if main_grad is not None else dw


def _sums(dz, offsets) -> torch.Tensor:
    """Return [E, N], the sums of each expert's rows."""
    return _kernel().grouped_wgrad(dz, dz.new_ones(dz.size(0), 1), offsets).squeeze(2)


def _kernel():
    """Return the kernels' module; it is imported only where a kernel runs."""
    from weft.kernels import grouped_matmul

    return grouped_matmul
