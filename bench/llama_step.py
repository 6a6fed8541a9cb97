"""weft bench llama_step: a training step of four layers of Llama 3 8B on one GPU, plain torch beside weft on one rank.

A step is forward, loss, backward and AdamW in bf16. It shows what weft's layers cost where nothing is split: time,
memory, and calls of Python functions on the calling thread, which forward and the optimizer make.
"""

import argparse
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import weft
from weft.bench.device_time import alternate, keep, peak_bytes
from weft.bench.host_calls import calls_of
from weft.bench.measure import Quantiles
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.ops import kernel_choice
from weft.testing.models import Llama, loss_of

LIMIT = "none: the ratio is to the plain model's step"
PLAIN = "plain torch"
_TOLERANCE = 0.02  # of the loss after two steps, in bf16


class Llama3(Llama):
    """Llama of four of Llama 3 8B's layers, with its vocabulary: 1.9 billion parameters."""

    HEAD, KV_HEADS, GROUP, HIDDEN, WORDS = 128, 8, 4, 14336, 128256


@dataclass(frozen=True)
class LlamaCase:
    """Options of weft.parallelize, and the preference between our kernels and the library's."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    prefer: str = "auto"


CASES = [LlamaCase("defaults"), LlamaCase("our kernels", prefer="kernel"), LlamaCase("invariant=4", {"invariant": 4})]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--sequence", type=positive, default=2048)


def run(options) -> list[Row]:
    return [keep(row_of(case, Llama3, options, torch.device("cuda"), alternate)) for case in CASES]


def row_of(case: LlamaCase, model: type[Llama], options, device: torch.device, alternate: Callable) -> Row:
    """Return the times of a step of `case` and of the plain model's; raise AssertionError if their losses differ."""
    tokens = torch.randint(0, model.WORDS, (options.batch, options.sequence), device=device)
    steps = {"ours": step_of(model, tokens, case), PLAIN: step_of(model, tokens, None)}
    losses = [[float(step()) for _ in range(2)] for step in steps.values()]
    assert abs(losses[0][1] - losses[1][1]) < _TOLERANCE * losses[1][1], f"{case.name}: losses {losses}"
    times: dict[str, Quantiles] = alternate(steps, options.rounds)
    facts = {
        "tokens_per_s": {name: tokens.numel() / each.p50_us * 1e6 for name, each in times.items()},
        "peak_bytes": {name: peak_bytes(step) for name, step in steps.items()},
        "calls": {name: calls_of(step) for name, step in steps.items()},
    }
    shape = f"{options.batch} x {options.sequence} tokens"
    return Row({"op": f"step of four layers, {case.name}", "shape": shape}, times, PLAIN, facts)


def step_of(model: type[Llama], tokens: torch.Tensor, case: LlamaCase | None) -> Callable[[], torch.Tensor]:
    """Return a training step, of the plain model if there is no case."""
    torch.manual_seed(0)
    with tokens.device:
        made: torch.nn.Module = model(4).bfloat16()
    if case is not None:
        made = weft.parallelize(made, weft.init_mesh(tp=1, device_type=tokens.device.type), **case.options)
    optimizer = torch.optim.AdamW(made.parameters(), 1e-4, fused=True)
    preference = partial(kernel_choice.prefer, case.prefer) if case is not None else contextlib.nullcontext

    def step() -> torch.Tensor:
        with preference():
            loss = loss_of(made(tokens), tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
