"""The feed-forward of all experts of a rank, by grouped products on GPUs: torch's grouped_mm or weft's kernel.

Nothing here reads a tensor on the host: rows of an expert are found by offsets on the device. torch's grouped_mm does
that on Hopper and Blackwell, for bf16 whose rows lie at 16 bytes; elsewhere it waits for the number of rows of each
expert. It adds neither a bias nor to a `main_grad`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.ops import kernel_choice
from weft.ops.activation import Activation, activation_of
from weft.ops.autocast import cast_operands, without_autocast
from weft.ops.backward import first_order
from weft.ops.kernel_choice import Algorithm
from weft.ops.matmul import check_main_grad

_LIBRARY_GROUPS = 1024  # grouped_mm takes fewer
_LIBRARY_FAMILIES = (9, 10)  # major numbers of the capabilities on which grouped_mm reads the offsets on the device


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
    """Return whether `expert_mlps` computes experts with this weight [E, ...], and why not.

    Its products are grouped_mm's or the kernel's, as `algorithms` says.
    """
    if not kernel_choice.on_kernel(weight.device):
        return kernel_choice.excluded(weight.device)
    if weight.dtype == torch.float64:
        return Algorithm(False, "the kernels do not take fp64")
    most = _kernel().MOST_GROUPS
    if weight.size(0) > most:
        return Algorithm(False, f"the kernels take {most} experts on a rank, there are {weight.size(0)}")
    return Algorithm(True, "grouped products over offsets on the device")


def algorithms(weights: ExpertWeights, rows: int) -> dict[str, Algorithm]:
    """Return the implementation of "forward", "dgrad" and "wgrad" for that many rows, as `weft.explain` shows it."""
    whole = algorithm(weights.up)
    if not whole.kernel:
        return dict.fromkeys(("forward", "dgrad", "wgrad"), whole)
    up, adds = weights.up, getattr(weights.up, "main_grad", None) is not None
    x, dz = (torch.empty(rows, up.size(dim), dtype=up.dtype, device="meta") for dim in (2, 1))
    problems = {
        "forward": _kernel().problem_of(x, *_gate_and_up(up, weights.gated), weights.activation),
        "dgrad": _kernel().problem_of(dz, up),
        "wgrad": _kernel().wgrad_problem_of(dz, x, up.size(0), adds),
    }
    biases = {"forward": weights.up_bias}
    operands = {"forward": (x, up), "dgrad": (dz, up), "wgrad": (dz, x)}
    return {
        name: _algorithm(problem, up.device, operands[name], biases.get(name)) for name, problem in problems.items()
    }


def _algorithm(problem, device: torch.device, operands: Sequence[torch.Tensor], bias=None) -> Algorithm:
    """Return the implementation of a grouped product, a `GroupedProblem`, and the reason."""
    refusal = _why_not_library(problem, device, operands, bias)
    return Algorithm(True, refusal) if refusal else kernel_choice.grouped_algorithm(problem, device)


def _why_not_library(problem, device: torch.device, operands: Sequence[torch.Tensor], bias) -> str | None:
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    if _family(device) not in _LIBRARY_FAMILIES or problem.dtype != "bfloat16":
        return f"torch's grouped_mm waits for the number of rows of each expert in {problem.dtype} on this device"
    if bias is not None or problem.fused == "main_grad":
        return "torch's grouped_mm adds neither a bias nor to a main_grad"
    if problem.columns % 8 or problem.depth % 8 or not all(map(_lies_at_16_bytes, operands)):
        return "torch's grouped_mm needs rows at multiples of 16 bytes"
    if problem.groups >= _LIBRARY_GROUPS:
        return f"torch's grouped_mm takes fewer than {_LIBRARY_GROUPS} experts"
    return None if problem.rows else "there are no rows"


def _lies_at_16_bytes(operand: torch.Tensor) -> bool:
    strides = operand.stride()
    return operand.storage_offset() % 8 == 0 and 1 in strides[1:] and all(s == 1 or s % 8 == 0 for s in strides)


def _family(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


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

    forward   z, h = grouped(x, up.T), with the activation in the kernel's epilogue;  y = grouped(h, down.T)
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
        x = x.contiguous()
        h, z = _up(x, up, up_bias, offsets, activation, gated)
        y = _product(h, down.transpose(1, 2), offsets, down_bias)
        ctx.save_for_backward(x, z, up, down, offsets)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        from weft.kernels.activation import gated_backward

        dy = dy.contiguous()
        x, z, up, down, offsets = ctx.saved_tensors
        needs_x, needs_up, needs_up_bias, needs_down, needs_down_bias, *_ = ctx.needs_input_grad
        name = ctx.activation.name
        dx = d_up = d_up_bias = d_down = d_down_bias = None
        if needs_down:
            h = _activated(z, ctx.activation, ctx.gated)
            d_down = _wgrad(dy, h, offsets, ctx.main_grads[1])
        if needs_down_bias:
            d_down_bias = _sums(dy, offsets)
        if needs_x or needs_up or needs_up_bias:
            dh = _product(dy, down, offsets)
            dz = gated_backward(dh, z, name) if ctx.gated else ctx.activation.backward(dh, z)
            dx = _product(dz, up, offsets) if needs_x else None
            d_up = _wgrad(dz, x, offsets, ctx.main_grads[0]) if needs_up else None
            d_up_bias = _sums(dz, offsets) if needs_up_bias else None
        return dx, d_up, d_up_bias, d_down, d_down_bias, None, None, None, None


def _up(x, up, bias, offsets, activation: Activation, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h and z."""
    gate, of_up = _gate_and_up(up, gated)
    problem = _kernel().problem_of(x, gate, of_up, activation.name)
    if _algorithm(problem, x.device, (x, up), bias).kernel:
        return _kernel().grouped_matmul(
            x, gate, offsets, b_up=of_up, bias=bias, activation=activation.name, keep_z=True
        )
    z = F.grouped_mm(x, up.transpose(1, 2), offs=offsets[1:])
    return _activated(z, activation, gated), z


def _gate_and_up(up: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the two matrices [E, H, I] of a fused one, or the one and None."""
    weight = up.transpose(1, 2)
    return weight.chunk(2, 2) if gated else (weight, None)  # type: ignore[return-value]


def _activated(z, activation: Activation, gated: bool) -> torch.Tensor:
    from weft.kernels.activation import gated_forward

    return gated_forward(z, activation.name) if gated else activation.apply(z)


def _product(a, b, offsets, bias=None) -> torch.Tensor:
    """Return a[r] @ b[e] + bias[e] for each row r of each expert e."""
    if _algorithm(_kernel().problem_of(a, b), a.device, (a, b), bias).kernel:
        return _kernel().grouped_matmul(a, b, offsets, bias=bias)[0]
    return F.grouped_mm(a, b, offs=offsets[1:])


def _wgrad(dz, x, offsets, main_grad) -> torch.Tensor | None:
    problem = _kernel().wgrad_problem_of(dz, x, offsets.numel() - 1, main_grad is not None)
    if _algorithm(problem, dz.device, (dz, x)).kernel:
        dw = _kernel().grouped_wgrad(dz, x, offsets, main_grad=main_grad)
        return None if main_grad is not None else dw
    dw = F.grouped_mm(dz.t(), x, offs=offsets[1:])
    if _family(dz.device) != 9:  # pytorch/pytorch#172439: not 0 for an expert without rows
        dw.masked_fill_((offsets[1:] == offsets[:-1]).view(-1, 1, 1), 0)
    return dw


def _sums(dz, offsets) -> torch.Tensor:
    """Return [E, N], the sums of each expert's rows."""
    return _kernel().grouped_wgrad(dz, dz.new_ones(dz.size(0), 1), offsets).squeeze(2)


def _kernel():
    """Return the kernels' module; it is imported only where a kernel runs."""
    from weft.kernels import grouped_matmul

    return grouped_matmul
