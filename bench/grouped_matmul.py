"""weft bench grouped_matmul: the products of a mixture's experts on a GPU, against torch's grouped_mm.

Experts are those of published models, with as many tokens for each expert as the gate happens to choose: uneven.
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from weft.bench.device_time import LIMIT, Contest, contest_of, measure
from weft.bench.table import Row
from weft.kernels.config import MatmulConfig
from weft.kernels.grouped_matmul import grouped_matmul, grouped_wgrad
from weft.tools.tuning import TileCalls

__all__ = ["LIMIT", "MIXTURES", "contests", "run", "uneven_offsets"]

# Experts, chosen for each token, hidden and intermediate size: from the models' own config.json files.
MIXTURES = {"mixtral-8x7b": (8, 2, 4096, 14336), "qwen3-30b-a3b": (128, 8, 2048, 768)}
_TOKENS = 4096
_CHECKED = 64  # rows that are compared with fp64


def run(options: argparse.Namespace) -> list[Row]:
    return measure(contests(torch.device("cuda")), options.rounds)


def contests(device: torch.device, mixtures=MIXTURES, tokens: int = _TOKENS) -> Iterator[Contest]:
    """Yield the product up, its dgrad and its wgrad for each mixture."""
    for name, (experts, chosen, hidden, inner) in mixtures.items():
        offsets = uneven_offsets(experts, tokens * chosen, device)
        x = torch.randn(tokens * chosen, hidden, device=device).bfloat16()
        dy = torch.randn(tokens * chosen, inner, device=device).bfloat16()
        w = (torch.randn(experts, inner, hidden, device=device) / hidden**0.5).bfloat16()
        shape = f"{name}: {len(x)} rows, {experts} x {inner}x{hidden} bfloat16"
        products = {
            "forward": product_calls(x, w.transpose(1, 2), offsets),
            "dgrad": product_calls(dy, w, offsets),
            "wgrad": wgrad_calls(dy, x, offsets),
        }
        moved = 2 * (x.numel() + dy.numel() + w.numel())
        for kind, calls in products.items():
            operations = 2.0 * len(x) * hidden * inner
            yield contest_of(f"grouped {kind}", shape, calls, x.dtype, "grouped_mm", operations, moved)


def product_calls(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> TileCalls[MatmulConfig]:
    """Return calls of each expert's rows of a [rows, K] times its b [experts, K, N]."""
    first = slice(0, min(_CHECKED, offsets.tolist()[1]))
    return TileCalls(
        lambda tile: grouped_matmul(a, b, offsets, config=tile)[0],
        partial(F.grouped_mm, a, b, offs=offsets[1:]),
        a[first].double() @ b[0].double(),
    )


def wgrad_calls(g: torch.Tensor, h: torch.Tensor, offsets: torch.Tensor) -> TileCalls[MatmulConfig]:
    """Return calls of g.T @ h [experts, N, K] over each expert's rows of g [rows, N] and h [rows, K]."""
    first = slice(0, offsets.tolist()[1])
    return TileCalls(
        lambda tile: grouped_wgrad(g, h, offsets, config=tile),
        partial(F.grouped_mm, g.t(), h, offs=offsets[1:]),
        (g[first].double().t() @ h[first].double()).unsqueeze(0),
    )


def uneven_offsets(experts: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return the first row of each expert and the end of the last, as a gate may happen to choose them."""
    generator = torch.Generator().manual_seed(experts)
    chosen = torch.multinomial(torch.rand(experts, generator=generator) + 0.5, rows, True)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)
    return torch.cat([ends.new_zeros(1), ends]).to(device)
