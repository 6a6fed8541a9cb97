"""weft bench grouped_matmul: the products of a mixture's experts on a GPU, against torch's grouped_mm.

Experts are those of published models, with as many tokens for each expert as the gate happens to choose: uneven.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from weft.bench.device_time import LIMIT, Contest, measure
from weft.bench.table import Row
from weft.kernels.grouped_matmul import grouped_matmul, grouped_wgrad
from weft.testing.tolerance import assert_close

__all__ = ["LIMIT", "MIXTURES", "contests", "run", "uneven_offsets"]

# Experts, chosen for each token, hidden and intermediate size: from the models' own config.json files.
MIXTURES = {"mixtral-8x7b": (8, 2, 4096, 14336), "qwen3-30b-a3b": (128, 8, 2048, 768)}
_TOKENS = 4096


def run(options: argparse.Namespace) -> list[Row]:
    return measure(contests(torch.device("cuda")), options.rounds)


def contests(device: torch.device, mixtures=MIXTURES, tokens: int = _TOKENS) -> Iterator[Contest]:
    """Yield the product up, its dgrad and its wgrad for each mixture."""
    for name, (experts, chosen, hidden, inner) in mixtures.items():
        offsets = uneven_offsets(experts, tokens * chosen, device)
        x = torch.randn(tokens * chosen, hidden, device=device).bfloat16()
        dy = torch.randn(tokens * chosen, inner, device=device).bfloat16()
        w = (torch.randn(experts, inner, hidden, device=device) / hidden**0.5).bfloat16()
        bounds = list(zip(offsets.tolist()[:-1], offsets.tolist()[1:], strict=True))
        shape = f"{name}: {len(x)} rows, {experts} x {inner}x{hidden} bfloat16"
        operations = 2.0 * len(x) * hidden * inner
        calls: dict[str, tuple[Callable, Callable, Callable]] = {
            "forward": (
                lambda x=x, w=w, offsets=offsets: grouped_matmul(x, w.transpose(1, 2), offsets)[0],
                partial(F.grouped_mm, x, w.transpose(1, 2), offs=offsets[1:]),
                lambda a, b, w=w, x=x, to=None: x[a:b].to(to) @ w[0].t().to(to),
            ),
            "dgrad": (
                lambda dy=dy, w=w, offsets=offsets: grouped_matmul(dy, w, offsets)[0],
                partial(F.grouped_mm, dy, w, offs=offsets[1:]),
                lambda a, b, w=w, dy=dy, to=None: dy[a:b].to(to) @ w[0].to(to),
            ),
            "wgrad": (
                lambda dy=dy, x=x, offsets=offsets: grouped_wgrad(dy, x, offsets)[0],
                partial(F.grouped_mm, dy.t(), x, offs=offsets[1:]),
                lambda a, b, dy=dy, x=x, to=None: dy[a:b].t().to(to) @ x[a:b].to(to),
            ),
        }
        for kind, (ours, theirs, plain) in calls.items():

            def check(kind=kind, ours=ours, plain=plain, first=bounds[0]):
                result = ours() if kind == "wgrad" else ours()[slice(*first)]
                assert_close(result, plain(*first, to=torch.bfloat16), plain(*first, to=torch.float64), kind)

            moved = 2 * (x.numel() + dy.numel() + w.numel())
            yield Contest(f"grouped {kind}", shape, ours, {"grouped_mm": theirs}, check, operations, moved)


def uneven_offsets(experts: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return the first row of each expert and the end of the last, as a gate may happen to choose them."""
    generator = torch.Generator().manual_seed(experts)
    chosen = torch.multinomial(torch.rand(experts, generator=generator) + 0.5, rows, True)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)
    return torch.cat([ends.new_zeros(1), ends]).to(device)
