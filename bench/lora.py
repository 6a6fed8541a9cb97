"""weft bench lora: a training step of LoRA on a Llama that ranks share, and the peak memory of its from_pretrained.

Beside the step: one process with one thread, and with a thread for each rank. Beside the memory: one process.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import weft
from weft.bench.generate import ALONE, add_sizes, check_packages, save_llama
from weft.bench.measure import alternate, slowest_rank
from weft.bench.memory import peak_mb
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.testing.ranks import run_ranks

LIMIT = (
    "of the step: one process's time over the number of ranks; of the memory: one process's over the number of ranks"
)
RANK = 8
_TOLERANCE = 1e-3  # relative, for the loss after two steps in fp32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument("--batch", type=positive, default=2, help="sequences of a step (default 2)")
    parser.add_argument("--sequence", type=positive, default=256, help="tokens of a sequence (default 256)")


def run(options: argparse.Namespace) -> Iterator[Row]:
    check_packages("transformers", "peft")
    model = f"Llama {options.layers}x{options.hidden}"
    with tempfile.TemporaryDirectory() as folder:
        for name, layers, hidden in (("large", options.layers, options.hidden), ("small", 1, 128)):
            run_ranks(save_llama, 1, f"{folder}/{name}", layers, hidden, timeout_s=600)
        batch = options.batch, options.sequence
        per_rank = run_ranks(
            _measure, options.world, f"{folder}/large", batch, options.rounds, backend="gloo", timeout_s=7200
        )
        peaks = {world: _least_peak(world, folder) for world in (options.world, 1)}
    times = slowest_rank(per_rank)
    shape = f"{model}, r={RANK} on all layers, {options.batch}x{options.sequence} tokens, fp32"
    share = {"share_of_time": times["weft"].p50_us / times[ALONE].p50_us}
    yield Row({"name": "step", "shape": shape, "world": options.world}, times, ALONE, share)
    memory = {
        "peak_mb": peaks[options.world],
        "alone_peak_mb": peaks[1],
        "share_of_memory": peaks[options.world] / peaks[1],
    }
    yield Row({"name": "from_pretrained", "shape": f"{model}, fp32", "world": options.world}, facts=memory)


def _least_peak(world: int, folder: str) -> float:
    """Return the peak of the rank that takes most, in the best of three tries: an allocator's reserve only adds."""
    return min(max(run_ranks(_peak, world, folder, timeout_s=600)) for _ in range(3))


def _measure(rank: int, folder: str, batch: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    tokens = torch.randint(8192, batch, generator=torch.Generator().manual_seed(1))
    world, group = dist.get_world_size(), dist.new_group(backend="weft")
    step = _step(weft.from_pretrained(folder, group), tokens)
    losses = [[step() for _ in range(2)][-1]]
    steps: dict[str, Callable] = {"weft": step, ALONE: lambda: None, f"{ALONE}, {world} threads": lambda: None}
    if rank == 0:
        from transformers import AutoModelForCausalLM

        alone = _step(AutoModelForCausalLM.from_pretrained(folder), tokens)
        losses.append([alone() for _ in range(2)][-1])
        steps |= {ALONE: alone, f"{ALONE}, {world} threads": _in_threads(alone, world)}
    dist.broadcast_object_list(losses_of_all := [losses])
    ours, exact = losses_of_all[0]
    if not abs(ours - exact) < _TOLERANCE * abs(exact):
        raise AssertionError(f"the loss of weft is {ours}, and that of one process {exact}: not measured")
    return alternate(steps, meet=dist.barrier, rounds=rounds, calls=1)


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], float]:
    """Return a training step of adapters on all linear layers, which returns the loss."""
    import peft

    torch.manual_seed(2)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear")).train()
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _in_threads(step: Callable[[], float], threads: int) -> Callable[[], float]:
    def several() -> float:
        torch.set_num_threads(threads)
        loss = step()
        torch.set_num_threads(1)
        return loss

    return several


def _peak(rank: int, folder: str) -> float:
    """Return the peak growth of a rank's memory in from_pretrained, in MB."""
    weft.from_pretrained(f"{folder}/small")  # imports count to no model

    def load(look: Callable[[], None]) -> None:
        model = weft.from_pretrained(f"{folder}/large")
        look()
        dist.barrier()
        del model

    return peak_mb(load)
