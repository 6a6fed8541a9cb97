"""References for tests and benches: every op in plain PyTorch. Pass fp64 for the exact result."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.ops.activation import ACTIVATIONS

REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
}


def linear(x, weight, bias=None, activation: str | None = None) -> torch.Tensor:
    """Return activation(x @ weight.T + bias)."""
    y = F.linear(x, weight, bias)
    return ACTIVATIONS[activation].apply(y) if activation else y


def gated_linear(x, gate, up, bias=None, activation: str = "silu") -> torch.Tensor:
    """Return activation(x @ gate.T + bias[:F]) * (x @ up.T + bias[F:]), with gate and up [F, K]."""
    bias_gate, bias_up = bias.chunk(2) if bias is not None else (None, None)
    return linear(x, gate, bias_gate, activation) * linear(x, up, bias_up)


def embedding(tokens, weight, padding_idx: int | None = None) -> torch.Tensor:
    return F.embedding(tokens, weight, padding_idx)


def cross_entropy(logits, target, **options) -> torch.Tensor:
    """Return the loss of logits [..., V] and target [...]; options as in torch.nn.functional.cross_entropy."""
    loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), target.reshape(-1), **options)
    return loss.view(target.shape) if loss.dim() else loss


def fused_sum(parts: list[torch.Tensor], wire_dtype=None, scale: float = 1.0, average: bool = False) -> torch.Tensor:
    """Sum, average and scale in the accumulator's type; round the parts and the result to wire_dtype."""
    dtype = parts[0].dtype
    wire = wire_dtype or dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = reduce([part.to(wire).to(wide) for part in parts], "avg" if average else "sum")
    return (total * torch.tensor(scale, dtype=wide)).to(wire).to(dtype)


def reduce(parts: list[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Reduce in rank order, as collectives do: accumulate 16-bit floating point in fp32 and round once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        if dtype == torch.bool and op in ("sum", "product"):
            total = total | part if op == "sum" else total & part
        else:
            total = REDUCTIONS[op](total, part.to(wide))
    if op == "avg":
        total = total.div(len(parts), rounding_mode=None if wide.is_floating_point else "trunc")
    return total.to(dtype)


def routed(x, index, weights, expert: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the sum of weights * expert(number, its tokens) over the experts that `index` [T, k] names, one by one."""
    y = torch.zeros_like(x)
    for number in range(int(index.max()) + 1):
        token, choice = torch.where(index == number)
        y = y.index_add(0, token, expert(number, x[token]) * weights[token, choice, None]) if len(token) else y
    return y
