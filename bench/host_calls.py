"""weft bench host_calls: calls of Python functions in a training step, split in every way, beside the plain model's.

The number is the same on every machine. It is the price of what stands around the model's arithmetic: layers, hooks,
modes and checks. The model is a GPT. A step is forward, backward and AdamW, after the steps that learn and check.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.bench.measure import alternate, slowest_rank
from weft.bench.suites import RefusedError
from weft.bench.table import Row
from weft.testing.models import loss_of
from weft.testing.ranks import run_ranks

LIMIT = "the plain model's step: the calls of torch's own modules, of autograd and of the optimizer"
BATCH, SEQUENCE, WIDTH, HEAD, BLOCKS, WORDS = 8, 128, 256, 32, 6, 1000
MICROBATCHES, WARM_UP = 4, 6
PLAIN = "one process"


class GPTBlock(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, head: int = HEAD, gelu: str = "none"):
        super().__init__()
        self.norm1, self.norm2, self.head, self.gelu = nn.LayerNorm(width), nn.LayerNorm(width), head, gelu
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # [batch, sequence, width]
        y = self.norm1(x)
        q, k, v = (
            project(y).view(*y.shape[:2], -1, self.head).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class GPT(nn.Module):
    """GPT with learned positions: 5.3 million parameters at the bench's sizes."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock(WIDTH) for _ in range(BLOCKS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):  # [batch, sequence] -> [batch, sequence, WORDS]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


PLAN = {
    "tokens": "vocabulary",
    **{f"blocks.*.{name}": {"style": "column", "unit": HEAD} for name in ("query", "key", "value")},
    "blocks.*.output": {"style": "row", "unit": HEAD},
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "logits": {"style": "column", "gather_output": True},
}


@dataclass(frozen=True)
class StepCase:
    """One way to use one or two ranks.

    Attributes:
        sizes: Sizes for init_mesh; None for the plain model.
        options: Options of weft.parallelize.
    """

    name: str
    sizes: Mapping[str, int] | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return max((self.sizes or {}).values(), default=1)


_PIPELINE = {"microbatches": MICROBATCHES, "loss": loss_of}
_UNITS = {"invariant": 4}
CASES = [
    StepCase(PLAIN, None),
    StepCase("one rank", {"tp": 1}, {"plan": PLAN}),
    StepCase("tp=2", {"tp": 2}, {"plan": PLAN}),
    StepCase("dp=2", {"dp": 2}),
    StepCase("pp=2", {"pp": 2}, {"pipeline": _PIPELINE}),
    StepCase("cp=2", {"cp": 2}),
    StepCase("invariant=4", {}, _UNITS),
    StepCase("invariant=4, tp=2", {"tp": 2}, _UNITS),
    StepCase("invariant=4, dp=2", {"dp": 2}, _UNITS),
    StepCase("invariant=4, cp=2 in two units", {"cp": 2}, {**_UNITS, "context": {"units": 2}}),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="cases whose name contains this")


def run(options: argparse.Namespace) -> Iterator[Row]:
    if options.world != 2:
        raise RefusedError("weft bench host_calls runs on one and on two ranks; it takes no --world")
    ((calls, _),) = run_ranks(_measure, 1, CASES[:1], 1)
    plain_calls = calls[PLAIN]
    for world in (1, 2):
        chosen = [case for case in CASES[1:] if case.world == world and (options.only or "") in case.name]
        if not chosen:
            continue
        per_rank = run_ranks(_measure, world, [CASES[0], *chosen], options.rounds, timeout_s=1200)
        times = slowest_rank([samples for _, samples in per_rank])
        for case in chosen:
            facts = {
                "calls": max(calls[case.name] for calls, _ in per_rank),
                "plain_calls": plain_calls,
                "tokens_per_s": BATCH * SEQUENCE / times[case.name].p50_us * 1e6,
            }
            of: dict[str, str | int] = {"name": case.name, "world": world}
            yield Row(of, {"ours": times[case.name], PLAIN: times[PLAIN]}, PLAIN, facts)


def _measure(rank: int, cases: list[StepCase], rounds: int) -> tuple[dict[str, int], dict[str, list[float]]]:
    counts, contenders = {}, {}
    for case in cases:
        step = step_of(case)
        contenders[case.name] = step if case.sizes is not None or rank == 0 else lambda: None
        counts[case.name] = calls_of(step)
    return counts, alternate(contenders, meet=dist.barrier, rounds=rounds, calls=1)


def calls_of(step: Callable[[], object]) -> int:
    """Return the number of calls of Python functions in a step, after the steps that learn and check."""
    for _ in range(WARM_UP):
        step()
    count = 0

    def seen(frame, event, argument) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()  # what an earlier case left behind would be counted where the collector happens to run
    gc.disable()
    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def step_of(case: StepCase) -> Callable[[], object]:
    """Return a training step on this rank's part of the batch."""
    torch.manual_seed(0)
    model: Any = GPT()
    tokens = torch.randint(WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    if case.sizes is not None:
        mesh = weft.init_mesh(**case.sizes, device_type="cpu")
        model = weft.parallelize(model, mesh, **case.options)
        tokens = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    optimizer = torch.optim.AdamW(model.parameters())
    in_stages = isinstance(model, weft.Pipeline)

    def step() -> None:
        if in_stages:
            model.step(tokens, tokens)
        else:
            loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
