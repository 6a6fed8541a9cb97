"""The products of a linear layer, computed by weft's kernel or by ATen as `kernel_choice` decides.

Parallel layers call the functions at the top between their collectives, with x [..., K] and weight [N, K].
`fused_linear` and `gated_linear` are the same products for one device: differentiable, and operators for torch.compile.
"""

import torch
import torch.nn.functional as F

from weft.ops import kernel_choice
from weft.ops.activation import ACTIVATIONS, Activation, activation_of
from weft.ops.autocast import cast_operands
from weft.ops.backward import as_matrix, first_order
from weft.ops.library import register


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = act(z) and z = x @ weight.T + bias; without an activation both are one tensor."""
    if kernel_choice.on_kernel(x.device):
        name = activation.name if activation else None
        a, b = as_matrix(x), weight.t()
        if _takes_kernel(a, b, activation=name):
            y, z = _kernel().matmul(a, b, bias=bias, activation=name, keep_z=activation is not None)
            y = y.view(*x.shape[:-1], b.size(1))
            return y, (y if z is None else z.view(y.shape))
    z = F.linear(x, weight, bias)
    return (z, z) if activation is None else (activation.apply(z), z)


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b.

    Args:
        a: [..., K].
        b: [K, N].
    """
    if kernel_choice.on_kernel(a.device):
        matrix = as_matrix(a)
        if _takes_kernel(matrix, b):
            return _kernel().matmul(matrix, b)[0].view(*a.shape[:-1], b.size(1))
    return a @ b


def wgrad(dz: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return dw = dz.T @ x, or add it in fp32 to an fp32 main_grad [N, K] and return None.

    Raises:
        TypeError: main_grad is not fp32.
        ValueError: main_grad does not have the weight's shape.
    """
    a, b = dz.reshape(-1, dz.size(-1)).t(), x.reshape(-1, x.size(-1))
    if main_grad is None:
        return _kernel().matmul(a, b)[0] if kernel_choice.on_kernel(dz.device) and _takes_kernel(a, b) else a @ b
    check_main_grad(main_grad, (a.size(0), b.size(1)))
    accumulate(a, b, main_grad)
    return None


def accumulate(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> None:
    """Add a @ b to total, which is fp32 (fp64 if they are), without rounding the product first."""
    if total.dtype == torch.float32 and kernel_choice.on_kernel(a.device) and _takes_kernel(a, b, adds=True):
        _kernel().matmul(a, b, addend=total, out=total)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def check_main_grad(main_grad: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check that a main_grad is fp32 (TypeError) and has the weight's shape (ValueError)."""
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad is {main_grad.dtype}; it must be torch.float32")
    if main_grad.shape != shape:
        raise ValueError(f"main_grad has shape {tuple(main_grad.shape)}; it must be the weight's {shape}")


def column_sums(dz: torch.Tensor) -> torch.Tensor:
    """Return dz.sum over all dimensions but the last."""
    return dz.reshape(-1, dz.size(-1)).sum(0)


def fused_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return activation(x @ weight.T + bias), with the activation in the product's epilogue; differentiable.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].
        activation: None, "gelu", "gelu_tanh", "relu" or "silu".

    Returns:
        [..., N].
    """
    activation_of(activation)
    return FusedLinearFunction.apply(*cast_operands(x, weight, bias), activation)


def gated_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Return activation(x @ gate.T + bias[:F]) * (x @ up.T + bias[F:]); differentiable (Shazeer 2020).

    Args:
        x: [..., K].
        gate, up: [F, K] each; they may be the two halves of one fused weight.
        bias: [2F].
        activation: "silu" (SwiGLU), "gelu", "gelu_tanh" or "relu".

    Returns:
        [..., F].

    Raises:
        ValueError: another activation, or None.
    """
    if activation_of(activation) is None:
        raise ValueError("gated_linear: activation=None has no gate; use two linear layers")
    return GatedLinearFunction.apply(*cast_operands(x, gate, up, bias), activation)


class FusedLinearFunction(torch.autograd.Function):
    """y = act(z), z = x @ w.T + b, on one device.

    x [M, K]        w [N, K]        b [N]        y [M, N]

    forward   y, z = linear(x, w, b)
    dact      dz = act'(z) dy
    dgrad     dx = dz @ w
    wgrad     dw = dz.T @ x
    dbias     db = dz.sum(0)

    Saves x and w, and z where there is an activation.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, activation):
        y, z = linear_operator(x, weight, bias, activation)
        ctx.activation = activation
        ctx.save_for_backward(x, weight, z if activation else None)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight, z = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dz = ACTIVATIONS[ctx.activation].backward(dy, z) if ctx.activation else dy
        dx = linear_dgrad_operator(dz, weight) if needs_x else None
        dw = linear_wgrad_operator(dz, x) if needs_weight else None
        db = column_sums(dz) if needs_bias else None
        return dx, dw, db, None


class GatedLinearFunction(torch.autograd.Function):
    """y = act(z_gate) * z_up, with z_gate = x @ w_gate.T + b[:F] and z_up = x @ w_up.T + b[F:], on one device.

    x [M, K]        w_gate, w_up [F, K]        b [2F]        z = z_gate beside z_up [M, 2F]        y [M, F]

    forward   y, z = gated_linear(x, w_gate, w_up, b)
    dact      dz = gated_backward(dy, z)
    dgrad     dx = dz_gate @ w_gate + dz_up @ w_up, rounded once
    wgrad     dw_gate = dz_gate.T @ x, dw_up = dz_up.T @ x
    dbias     db = dz.sum(0)

    Saves x, both weights and z.
    """

    @staticmethod
    def forward(ctx, x, gate, up, bias, activation):
        y, z = _gated_linear(x, gate, up, bias, activation)
        ctx.activation = activation
        ctx.save_for_backward(x, gate, up, z)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, gate, up, z = ctx.saved_tensors
        needs_x, needs_gate, needs_up, needs_bias, _ = ctx.needs_input_grad
        dz = _gated_backward(dy, z, ctx.activation)
        dz_gate, dz_up = dz.chunk(2, -1)
        dx = _gated_dgrad(dz, gate, up) if needs_x else None
        dgate = linear_wgrad_operator(dz_gate, x) if needs_gate else None
        dup = linear_wgrad_operator(dz_up, x) if needs_up else None
        db = column_sums(dz) if needs_bias else None
        return dx, dgate, dup, db, None


def _linear_operator(x, weight, bias, activation):
    y, z = forward(x, weight, bias, activation_of(activation))
    return y, (z if activation else y.new_empty(0))


def _linear_fake(x, weight, bias, activation):
    y = x.new_empty((*x.shape[:-1], weight.size(0)))
    return y, (torch.empty_like(y) if activation else y.new_empty(0))


def _gated_operator(x, gate, up, bias, activation):
    if kernel_choice.on_kernel(x.device):
        a, b, b_up = as_matrix(x), gate.t(), up.t()
        if _takes_kernel(a, b, b_up, activation=activation):
            y, z = _kernel().matmul(a, b, b_up=b_up, bias=bias, activation=activation, keep_z=True)
            return y.view(*x.shape[:-1], -1), z.view(*x.shape[:-1], -1)
    whole = _halves_of(gate, up)
    z = F.linear(x, torch.cat([gate, up]) if whole is None else whole, bias)
    return gated(z, activation), z


def gated(z: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(z_gate) * z_up for z = z_gate beside z_up [..., 2F]."""
    if kernel_choice.streams(z):
        from weft.kernels.activation import gated_forward

        return gated_forward(as_matrix(z), activation).view(*z.shape[:-1], -1)
    z_gate, z_up = z.chunk(2, -1)
    return ACTIVATIONS[activation].apply(z_gate) * z_up


def _gated_backward_operator(dy, z, activation):
    if kernel_choice.streams(z):
        from weft.kernels.activation import gated_backward

        return gated_backward(as_matrix(dy), as_matrix(z), activation).view(z.shape)
    z_gate, z_up = z.chunk(2, -1)
    apply, backward = ACTIVATIONS[activation].apply, ACTIVATIONS[activation].backward
    return torch.cat([backward(dy * z_up, z_gate), dy * apply(z_gate)], -1)


def _gated_dgrad_operator(dz, gate, up):
    whole = _halves_of(gate, up)
    if whole is not None:
        return multiply(dz, whole)
    dz_gate, dz_up = as_matrix(dz).chunk(2, -1)
    if kernel_choice.on_kernel(dz.device) and _takes_kernel(dz_gate, gate):
        wide, _ = _kernel().matmul(dz_gate, gate, out_dtype=torch.float32)
        return _kernel().matmul(dz_up, up, addend=wide, out_dtype=dz.dtype)[0].view(*dz.shape[:-1], -1)
    return dz @ torch.cat([gate, up])


def _halves_of(gate, up):
    """Return the weight [2F, K] if the two are its halves, else None."""
    adjacent = gate.is_contiguous() and up.is_contiguous() and gate._is_view() and gate._base is up._base
    if adjacent and up.storage_offset() == gate.storage_offset() + gate.numel():
        return gate.as_strided((2 * gate.size(0), gate.size(1)), gate.stride())
    return None


linear_operator = register(
    "linear(Tensor x, Tensor weight, Tensor? bias, str? activation) -> (Tensor, Tensor)", _linear_operator, _linear_fake
)
linear_dgrad_operator = register(
    "linear_dgrad(Tensor dz, Tensor weight) -> Tensor",
    multiply,
    lambda dz, weight: dz.new_empty((*dz.shape[:-1], weight.size(1))),
)
linear_wgrad_operator = register(
    "linear_wgrad(Tensor dz, Tensor x) -> Tensor",
    wgrad,
    lambda dz, x: dz.new_empty((dz.size(-1), x.size(-1))),
)
# With out= of another type than a's, which torch.compile does not trace.
accumulate_operator = register(
    "accumulate(Tensor a, Tensor b, Tensor(a!) total) -> ()", accumulate, lambda a, b, total: None
)
_gated_linear = register(
    "gated_linear(Tensor x, Tensor gate, Tensor up, Tensor? bias, str activation) -> (Tensor, Tensor)",
    _gated_operator,
    lambda x, gate, up, bias, activation: tuple(x.new_empty((*x.shape[:-1], n * gate.size(0))) for n in (1, 2)),
)
_gated_backward = register(
    "gated_backward(Tensor dy, Tensor z, str activation) -> Tensor",
    _gated_backward_operator,
    lambda dy, z, activation: z.new_empty(z.shape),
)
_gated_dgrad = register(
    "gated_dgrad(Tensor dz, Tensor gate, Tensor up) -> Tensor",
    _gated_dgrad_operator,
    lambda dz, gate, up: dz.new_empty((*dz.shape[:-1], gate.size(1))),
)


def _kernel():
    """Return the kernel's module; it is imported only where a kernel runs, since ATen's products need no triton."""
    from weft.kernels import matmul

    return matmul


def _takes_kernel(a, b, b_up=None, activation: str | None = None, adds: bool = False) -> bool:
    from weft.kernels.matmul_tiles import problem_of

    problem = problem_of(a, b, b_up, activation=activation or "none", adds=adds)
    return kernel_choice.algorithm(problem, a.device).kernel
