"""weft bench invariance: training steps with invariant and without, on every kind of mesh, and their products.

Each step is beside the ordinary one on the same mesh. Memory is what the tensors of a step hold at its peak, with the
parameters and the optimizer's state. Each product is beside torch's, by every instruction set but the slowest.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import weft
from weft import _C
from weft.bench.host_calls import GPT, StepCase, calls_of, step_of
from weft.bench.measure import alternate, slowest_rank
from weft.bench.suites import RefusedError
from weft.bench.table import Row
from weft.ops import invariant
from weft.testing.models import Llama
from weft.testing.ranks import run_ranks

UNITS, BLOCKS, BATCH, SEQUENCE = 4, 2, 2, 256
PEER = "without invariant"
OF_TORCH = "torch.mm"
LIMIT = "the ordinary step: the same products by MKL or oneDNN, and sums in the order of ranks"
_GPT = "GPT of 6 layers of width 256, 1024 tokens float32"
_IN_UNITS = {"invariant": UNITS, "context": {"units": 2}}
# mesh: options with invariant
MESHES: list[tuple[str, Mapping[str, int], Mapping]] = [
    ("one process", {}, {"invariant": UNITS}),
    ("tp=2", {"tp": 2}, {"invariant": UNITS}),
    ("dp=2", {"dp": 2}, {"invariant": UNITS}),
    ("cp=2, sequence in 2 units", {"cp": 2}, _IN_UNITS),
    ("one process, sequence in 2 units", {}, _IN_UNITS),
]
# tokens, input features, output features: the first is the bench's GPT
LAYERS = [(1024, 256, 1024), (512, 1024, 4096), (256, 4096, 4096)]


class Llama1024(Llama):
    """Hidden size 1024, 16 query heads, 8 KV heads."""

    HEAD, KV_HEADS, HIDDEN, WORDS = 64, 8, 4096, 4096


def run(options: argparse.Namespace) -> Iterator[Row]:
    if options.world != 2:
        raise RefusedError("weft bench invariance runs on one and on two ranks; it takes no --world")
    for mesh, sizes, in_units in MESHES:
        world = max(sizes.values(), default=1)
        cases = [StepCase("weft", sizes, in_units), StepCase(PEER, sizes or {"tp": 1})]
        per_rank = run_ranks(_measure_gpt, world, cases, options.rounds, timeout_s=600)
        times = slowest_rank([samples for samples, *_ in per_rank])
        (held, calls), (held_without, _) = (per_rank[0][1][name] for name in ("weft", PEER))
        facts = {"calls": calls, "memory_ratio": held / held_without}
        yield _row({"model": _GPT, "mesh": mesh, "world": world}, times, facts)
    for dtype in (torch.float32, torch.bfloat16):
        times = slowest_rank(run_ranks(_measure_llama, 2, dtype, options.rounds, timeout_s=300))
        name = f"Llama of 2 blocks, hidden 1024, {BATCH * SEQUENCE} tokens {str(dtype).removeprefix('torch.')}"
        yield _row({"model": name, "mesh": "tp=2", "world": 2}, times, {})
    for dtype in (torch.float32, torch.bfloat16):
        unlike = {"avx512_bf16"} if dtype == torch.float32 else set()  # its fp32 product is avx512's
        for instructions in (name for name in _C.instruction_sets()[:-1] if name not in unlike):
            with patch.dict(os.environ, WEFT_ISA=instructions):
                [measured] = run_ranks(_measure_products, 1, dtype, options.rounds, timeout_s=600)
            of = {"op": f"product {instructions}", "dtype": str(dtype).removeprefix("torch.")}
            for shape, samples in measured.items():
                yield Row({**of, "shape": shape}, slowest_rank([samples]), OF_TORCH)


def _row(of: dict[str, str | int], times, facts: dict) -> Row:
    return Row(of, times, PEER, {**facts, "of_limit": times[PEER].p50_us / times["weft"].p50_us})


def _measure_gpt(rank: int, cases: list[StepCase], rounds: int) -> tuple[dict, dict[str, tuple[int, int]]]:
    steps = {case.name: step_of(case) for case in cases}
    calls = {name: calls_of(step) for name, step in steps.items()}
    state = 12 * sum(parameter.numel() for parameter in GPT().parameters()) // dict(cases[0].sizes or {}).get("tp", 1)
    held = {name: (state + peak_bytes(step), calls[name]) for name, step in steps.items()}
    return alternate(steps, meet=dist.barrier, rounds=rounds, calls=1), held


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes that tensors of a step hold at a time, beside those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _measure_products(rank: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, list[float]]]:
    found = {}
    for threads, text in ((1, "one thread"), (2, "two threads")):
        torch.set_num_threads(threads)
        for tokens, inputs, outputs in LAYERS:
            x, weight, dy = (torch.randn(s).to(dtype) for s in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
            for kind, a, b in (("forward", x, weight.t()), ("dgrad", dy, weight), ("wgrad", dy.t(), x)):
                contenders = {
                    "weft": lambda a=a, b=b: invariant.multiply(a, b),
                    OF_TORCH: lambda a=a, b=b: torch.mm(a, b),
                }
                shape = f"{tokens}x{inputs}x{outputs} {kind}, {text}"
                found[shape] = alternate(contenders, meet=dist.barrier, rounds=rounds, calls=2)
    return found


def _measure_llama(rank: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    mesh = weft.init_mesh(tp=dist.get_world_size())["tp"]
    steps = {}
    for name, units in (("weft", 8), (PEER, None)):
        torch.manual_seed(0)
        model = weft.parallelize(Llama1024(BLOCKS).to(dtype), mesh, invariant=units)
        tokens = torch.randint(0, Llama1024.WORDS, (BATCH, SEQUENCE))
        steps[name] = _step(model, torch.optim.AdamW(model.parameters()), tokens)
    return alternate(steps, meet=dist.barrier, rounds=rounds, calls=2)


def _step(model, optimizer, tokens):
    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()

    return step
