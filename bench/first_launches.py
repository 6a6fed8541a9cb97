"""The first launches on a GPU: every kernel that needs one device, beside fp64, and fifty times for equal bits.

Sizes are small and odd, and smaller still in the interpreter. A kernel that raises or is wrong costs its own row and
ends nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from weft.bench.table import Row
from weft.kernels import launch
from weft.kernels.bucket import PackedBucket, Statistics, reduce
from weft.kernels.config import MatmulConfig
from weft.kernels.matmul import matmul
from weft.kernels.matmul_tiles import candidates, listed
from weft.ops import kernel_choice
from weft.ops.attention import attention
from weft.ops.cross_entropy import fused_cross_entropy
from weft.ops.linear_cross_entropy import fused_linear_cross_entropy
from weft.ops.matmul import fused_linear, gated_linear
from weft.testing import cases, reference
from weft.testing.tolerance import error_in_tolerances

TIMES = 50
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Check:
    """A call to check.

    Attributes:
        name: kernel and variant.
        shape: sizes and types.
        ours: returns the results.
        plain: returns the same results by PyTorch, from operands in the given type.
    """

    name: str
    shape: str
    ours: Callable[[], Tensors]
    plain: Callable[[torch.dtype], Tensors]


def rows(device: torch.device, times: int = TIMES) -> Iterator[Row]:
    """Yield a row for each check, as it is done."""
    for checks in (_products, _attentions, _losses, _buckets):
        for check in checks(device):
            yield _row(check, times)


def _row(check: Check, times: int) -> Row:
    of: dict[str, str | int] = {"op": check.name, "shape": check.shape}
    try:
        with kernel_choice.prefer("kernel"):
            first = check.ours()
            plain, exact = check.plain(first[0].dtype), check.plain(torch.float64)
            error = max(error_in_tolerances(*each) for each in zip(first, plain, exact, strict=True))
            unequal = 0
            for _ in range(times):
                unequal += not all(torch.equal(a, b) for a, b in zip(first, check.ours(), strict=True))
    except Exception as error_of_kernel:  # a kernel that fails must not hide the others
        return Row(of, remark=f"FAULT: {type(error_of_kernel).__name__}: {str(error_of_kernel).strip()[:500]}")
    faults = [f"off by {error:.3g} tolerances"] if not error <= 1 else []
    faults += [f"other bits in {unequal} of {times} calls"] if unequal else []
    remark = f"FAULT: {', '.join(faults)}" if faults else ""
    return Row(of, facts={"error_in_tolerances": error, "unequal_calls": unequal}, remark=remark)


def _is_small(device: torch.device) -> bool:
    return device.type == "cpu"


def _types(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if _is_small(device) else (torch.bfloat16, torch.float16)


def is_fault(row: Row) -> bool:
    return row.remark.startswith("FAULT")


def _drawn(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


def _with_gradients(function: Callable, *operands: torch.Tensor | None) -> Tensors:
    """Return the result of the function and the gradients of its operands, of a sum with uneven weights."""
    leaves = [None if t is None else t.detach().requires_grad_(t.is_floating_point()) for t in operands]
    result = function(*leaves)
    weights = torch.linspace(0.5, 2, result.numel(), device=result.device, dtype=torch.float64).view(result.shape)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return result.detach(), *torch.autograd.grad(result, wanted, weights.to(result.dtype))


def _check(name: str, ours: Callable, plain: Callable, operands: Sequence[torch.Tensor | None], dtype) -> Check:
    """Return the check of a function and its gradients; floating-point operands are rounded to dtype first."""
    shapes = " ".join("x".join(map(str, t.shape)) for t in operands if t is not None)

    def of_type(to: torch.dtype) -> list[torch.Tensor | None]:
        return [t if t is None or not t.is_floating_point() else t.to(dtype).to(to) for t in operands]

    return Check(
        name,
        f"{shapes} {str(dtype).removeprefix('torch.')}",
        lambda: _with_gradients(ours, *of_type(dtype)),
        lambda to: _with_gradients(plain, *of_type(to if to == torch.float64 else dtype)),
    )


def _products(device: torch.device) -> Iterator[Check]:
    sizes = [(5, 3, 7), (33, 24, 40)] if _is_small(device) else [*cases.MATMULS, (1000, 776, 520)]
    for dtype in _types(device):
        for m, n, k in sizes:
            x, weight, up = (_drawn(device, *shape) for shape in ((m, k), (n, k), (n, k)))
            bias = _drawn(device, n)
            for activation in (None, "gelu"):
                yield _check(
                    f"linear {activation or ''}".strip(),
                    partial(fused_linear, activation=activation),
                    partial(reference.linear, activation=activation),
                    (x, weight, bias),
                    dtype,
                )
            yield _check("gated linear", gated_linear, reference.gated_linear, (x, weight, up), dtype)
    m, n, k = sizes[-1]
    a, b = (_drawn(device, *shape).bfloat16() for shape in ((m, k), (k, n)))
    total = _drawn(device, m, n)
    for tile in candidates(listed(launch.architecture_of(device), torch.bfloat16), k):
        yield _tile(a, b, total, tile)


def _tile(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor, tile: MatmulConfig) -> Check:
    """Return the check of a tile configuration, with a sum that is added to."""

    def plain(dtype: torch.dtype) -> Tensors:
        return ((a.double() @ b.double() + total.double()).to(dtype),)

    def ours() -> Tensors:
        out = total.clone()
        return (matmul(a, b, addend=out, out=out, config=tile)[0],)

    return Check("matmul added to fp32", f"{len(a)}x{b.size(1)}x{len(b)} {tile}", ours, plain)


def _attentions(device: torch.device) -> Iterator[Check]:
    queries, keys = (20, 35) if _is_small(device) else (700, 1100)
    head_dims = ((24, 16),) if _is_small(device) else ((64, 64), (128, 128), (192, 128), (256, 256), (80, 40))
    for dtype in _types(device):
        for head_dim, value_dim in head_dims:
            q = _drawn(device, 2, 4, queries, head_dim)
            k, v = _drawn(device, 2, 2, keys, head_dim), _drawn(device, 2, 2, keys, value_dim)
            for options in ({}, {"causal": True}, {"causal": True, "window": 33}, {"softcap": 5.0}):
                name = " ".join(["attention", *(f"{key} {value}" for key, value in options.items())])
                yield _check(name, partial(attention, **options), partial(_attention, **options), (q, k, v), dtype)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    k, v = (t.repeat_interleave(q.size(1) // k.size(1), 1) for t in (k, v))
    scores = q @ k.mT * q.size(-1) ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.size(2), device=q.device)[:, None] - torch.arange(k.size(2), device=q.device)
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if window:
        scores = scores.masked_fill(distance >= window, -torch.inf)
    return scores.softmax(-1) @ v


def _losses(device: torch.device) -> Iterator[Check]:
    few = 70 if _is_small(device) else 2100
    for dtype in (*_types(device), torch.float32):
        for tokens, classes in ((3, 7), (5, 300)) if _is_small(device) else ((3, 7), (33, 4097), (130, 16_033)):
            logits = 4 * _drawn(device, tokens, classes)
            target = torch.arange(tokens, device=device) * (classes // tokens)
            target[1] = -100
            for smoothing in (0.0, 0.1):
                options: dict[str, Any] = {"label_smoothing": smoothing}
                yield _check(
                    f"cross entropy smoothing {smoothing}",
                    lambda logits, options=options, target=target: fused_cross_entropy(logits, target, **options),
                    lambda logits, options=options, target=target: _loss(logits, target, **options),
                    (logits,),
                    dtype,
                )
        x, weight = _drawn(device, 33, 24), _drawn(device, few, 24)
        target = torch.arange(33, device=device) * (few // 33)
        yield _check(
            "linear cross entropy",
            lambda x, weight, target=target: fused_linear_cross_entropy(x, weight, target),
            lambda x, weight, target=target: _loss(F.linear(x, weight), target),
            (x, weight),
            dtype,
        )


def _loss(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target, **options)


def _buckets(device: torch.device) -> Iterator[Check]:
    for dtype, wire in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32,) * 2):
        tensors = [_drawn(device, *shape).to(dtype) for shape in ((3,), (129, 65), (5000,), (1,))]
        places = PackedBucket(tensors)

        def packed(places=places, tensors=tensors, wire=wire, dtype=dtype) -> Tensors:
            statistics, flat = Statistics(device), places.empty(wire)
            places.pack(tensors, flat, 0.5, statistics)
            back = [torch.empty_like(t) for t in tensors]
            places.unpack(flat, back, 2.0)
            total = torch.empty(len(flat), dtype=dtype, device=device)
            reduce([flat, flat, flat], total, 1.0)
            return *back, statistics.squared_norm, total.double().square().sum()

        def plain(to, tensors=tensors, wire=wire, dtype=dtype) -> Tensors:
            halves = [(0.5 * t.float()).to(wire) for t in tensors]
            sums = [(3 * half.float()).to(dtype).double().square().sum() for half in halves]
            norms = sum(half.double().square().sum() for half in halves)
            return *((2 * half.float()).to(dtype) for half in halves), norms, sum(sums)

        yield Check("bucket", f"{len(tensors)} tensors {dtype} as {wire}", packed, plain)
