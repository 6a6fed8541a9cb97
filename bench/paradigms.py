"""weft bench paradigms: one model's training step on two and on four CPU ranks, split in every way.

The model is a small Llama; a step is forward, backward and AdamW. Every rank has one thread. If four ranks share two
cores, their times show the cost of a paradigm, not the gain from four cores.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.bench.measure import alternate, slowest_rank
from weft.bench.memory import peak_mb
from weft.bench.suites import RefusedError
from weft.bench.table import Row
from weft.bench.traffic import counted
from weft.pipeline.timeline import Timeline
from weft.testing.models import Llama, loss_of
from weft.testing.ranks import run_ranks

LIMIT = "one process and one thread with the whole model and batch, over the number of ranks that have a core"
BATCH, SEQUENCE, MICROBATCHES, BLOCKS = 8, 256, 4, 8
ALONE = "one process"
_TOLERANCE = 1e-3  # relative, for the loss after two steps in fp32; a lost gradient or a lost mask exceeds it


class SmallModel(Llama):
    """Llama of 6.4 million parameters: 8 blocks, 256 wide, 8 heads of queries and 4 of keys, bytes as words."""

    HEAD, KV_HEADS, HIDDEN, WORDS = 32, 4, 768, 256


@dataclass(frozen=True)
class Paradigm:
    """One way to use the ranks.

    Attributes:
        sizes: Sizes for init_mesh; empty for one process.
        schedule: Schedule for weft.Pipeline; None for weft.parallelize alone.
        microbatches: Micro-batches of the pipeline.
        sharded: Whether the optimizer's state is sharded over "dp" (ZeRO-1).
    """

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    schedule: str | None = None
    microbatches: int = MICROBATCHES
    sharded: bool = False


PARADIGMS = {
    2: [
        Paradigm("data", {"dp": 2}),
        Paradigm("data, sharded optimizer", {"dp": 2}, sharded=True),
        Paradigm("layer-wise", {"pp": 2}),
        Paradigm("pipeline, afab", {"pp": 2}, "afab"),
        Paradigm("pipeline, 1f1b", {"pp": 2}, "1f1b"),
        Paradigm("pipeline, 1f1b, 8 micro-batches", {"pp": 2}, "1f1b", microbatches=8),
        Paradigm("pipeline, interleaved, 8 micro-batches", {"pp": 2}, "interleaved", microbatches=8),
        Paradigm("tensor", {"tp": 2}),
        Paradigm("sequence (context)", {"cp": 2}),
    ],
    4: [
        Paradigm("data", {"dp": 4}),
        Paradigm("data, sharded optimizer", {"dp": 4}, sharded=True),
        Paradigm("layer-wise", {"pp": 4}),
        Paradigm("pipeline, 1f1b", {"pp": 4}, "1f1b"),
        Paradigm("tensor", {"tp": 4}),
        Paradigm("sequence (context)", {"cp": 4}),
        Paradigm("data x tensor", {"dp": 2, "tp": 2}),
        Paradigm("data x sequence", {"dp": 2, "cp": 2}),
        Paradigm("sequence x tensor", {"cp": 2, "tp": 2}),
        Paradigm("pipeline x data", {"pp": 2, "dp": 2}, "1f1b"),
        Paradigm("pipeline x tensor", {"pp": 2, "tp": 2}, "1f1b"),
        Paradigm("pipeline x sequence", {"pp": 2, "cp": 2}, "1f1b"),
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="paradigms whose name contains this")


def run(options: argparse.Namespace) -> Iterator[Row]:
    if options.world != 2:
        raise RefusedError("weft bench paradigms runs on two and on four ranks; it takes no --world")
    (alone_peak,) = run_ranks(_peak, 1, Paradigm(ALONE), timeout_s=600)
    for world, paradigms in PARADIGMS.items():
        chosen = [paradigm for paradigm in paradigms if not options.only or options.only in paradigm.name]
        if not chosen:
            continue
        per_rank = run_ranks(_measure, world, chosen, options.rounds, timeout_s=3600, group_timeout_s=600)
        times = slowest_rank([samples for samples, _ in per_rank])
        for paradigm in chosen:
            figures = [of_rank[paradigm.name] for _, of_rank in per_rank]
            error = max(figure.error for figure in figures)
            if not error < _TOLERANCE:
                raise AssertionError(f"{paradigm.name} on {world} ranks: the loss is off by {error:.1e}; not measured")
            peak = max(run_ranks(_peak, world, paradigm, timeout_s=600, group_timeout_s=120))
            sent = max(figure.sent_bytes for figure in figures)
            mesh = " ".join(f"{name}={size}" for name, size in paradigm.sizes.items())
            facts = {
                "peak_mb": peak,
                "alone_peak_mb": alone_peak,
                "sent_bytes": sent,
                "bubble": figures[0].bubble,  # measured
                "formula": figures[0].formula,  # for equal stages and free messages
                "error": error,
            }
            of: dict[str, str | int] = {"paradigm": paradigm.name, "world": world, "mesh": mesh}
            yield Row(of, {"ours": times[paradigm.name], ALONE: times[ALONE]}, ALONE, facts)


@dataclass(frozen=True)
class _Figures:
    """Figures of one paradigm on one rank."""

    error: float
    sent_bytes: int
    bubble: float | None
    formula: float | None


def _measure(rank: int, paradigms: list[Paradigm], rounds: int) -> tuple[dict[str, list[float]], dict[str, _Figures]]:
    alone, _ = _step_of(Paradigm(ALONE))
    exact = [alone() for _ in range(2)][-1]
    contenders: dict[str, Callable] = {ALONE: alone if rank == 0 else lambda: None}
    figures = {}
    for paradigm in paradigms:
        step, timeline = _step_of(paradigm)
        step()
        with counted() as sent:
            loss = step()
        ran = timeline() if timeline else None
        bubble, formula = (ran.bubble, ran.formula) if ran else (None, None)
        figures[paradigm.name] = _Figures(abs(loss - exact) / exact, sent.bytes, bubble, formula)
        contenders[paradigm.name] = step
    return alternate(contenders, meet=dist.barrier, rounds=rounds, calls=1), figures


def _peak(rank: int, paradigm: Paradigm) -> float:
    def three_steps(look: Callable[[], None]) -> None:
        step, _ = _step_of(paradigm)
        for _ in range(3):
            step()
            look()
        dist.barrier()

    return peak_mb(three_steps)


def _step_of(paradigm: Paradigm) -> tuple[Callable[[], float], Callable | None]:
    """Return a training step, which returns the whole batch's loss, and for a pipeline a function for its timeline."""
    torch.manual_seed(0)
    model: nn.Module = SmallModel(BLOCKS)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(SmallModel.WORDS, (2, BATCH, SEQUENCE), generator=generator)
    if not paradigm.sizes:
        return _plain_step(model, torch.optim.AdamW(model.parameters()), tokens, targets, None), None
    mesh = weft.init_mesh(**paradigm.sizes, device_type="cpu")
    replicas = mesh["dp"]
    local = slice(*(BATCH // replicas.size() * (replicas.get_local_rank() + end) for end in (0, 1)))
    tokens, targets = tokens[local], targets[local]
    if paradigm.schedule:
        model = weft.parallelize(model, mesh["cp", "tp"])
        pipe = weft.Pipeline(model, mesh, schedule=paradigm.schedule, microbatches=paradigm.microbatches, loss=loss_of)
        optimizer = torch.optim.AdamW(pipe.parameters())

        def step() -> float:
            optimizer.zero_grad()
            loss = pipe.step(tokens, targets)
            optimizer.step()
            return loss.item()

        def timeline() -> Timeline:
            pipe.step(tokens, targets, record_timeline=True)
            return pipe.timeline()

        return step, timeline
    if paradigm.sharded:
        sharded = weft.DataParallel(model, group=replicas, shard_optimizer=True)
        return _plain_step(sharded, sharded.optimizer(torch.optim.AdamW), tokens, targets, replicas), None
    model = weft.parallelize(model, mesh)
    return _plain_step(model, torch.optim.AdamW(model.parameters()), tokens, targets, replicas), None


def _plain_step(model, optimizer, tokens, targets, replicas) -> Callable[[], float]:
    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return (loss.detach() if replicas is None else weft.all_reduce(loss.detach(), op="avg", group=replicas)).item()

    return step
