"""Trains a byte-level GPT on the sources of Python's standard library, split over ranks in the way you say.

    python examples/train_lm.py                                                  one process
    torchrun --nproc-per-node 2 examples/train_lm.py --tp 2                      each layer split over two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --dp 2                      each batch split over two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --tp 2 --backend gloo       the same over another backend
    torchrun --nproc-per-node 2 examples/train_lm.py --cp 2 --sequence 16384 --batch 1
                                                                                 each sequence split over two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --pp 2                      the layers split over two ranks
    torchrun --nproc-per-node 4 examples/train_lm.py --pp 2 --tp 2 --recompute selective
                                                                                 all of it together, as you like

The model is plain PyTorch. What makes it parallel are the lines marked (1) to (7).
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import weft

BYTES = 256
WIDTH, LAYERS, HEAD = 256, 6, 64

# (1) Which layers are split, and how. Heads stay whole: queries, keys and values are cut at multiples of one.
PLAN = {
    "embedding": "vocabulary",
    "blocks.*.attention.query": {"style": "column", "unit": HEAD},
    "blocks.*.attention.key": {"style": "column", "unit": HEAD},
    "blocks.*.attention.value": {"style": "column", "unit": HEAD},
    "blocks.*.attention.output": {"style": "row", "unit": HEAD},
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "logits": "column",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        # -1 heads: however many this rank has.
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, sequence):
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(sequence, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.logits.weight = self.embedding.weight  # tied, and still tied when both are split

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def standard_library(size=4_000_000):
    """The sources of Python's standard library as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:size]), dtype=torch.uint8)


def batch_of(text, step, batch, sequence, seed):
    """The whole batch of a step: the same on every rank, whatever the mesh."""
    generator = torch.Generator().manual_seed(seed + step)
    starts = torch.randint(len(text) - sequence - 1, (batch,), generator=generator)
    windows = torch.stack([text[start : start + sequence + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def peak_memory_mb():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--dp", type=int, default=1, help="ranks that share each batch")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--pp", type=int, default=1, help="ranks that share the list of layers")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline, with --pp")
    parser.add_argument("--microbatches", type=int, help="of the pipeline; as many as --pp where it is not said")
    parser.add_argument("--recompute", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--backend", default="weft", help="of torch.distributed")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument("--sequence", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the loss curve and the figures there, as JSON")
    return parser.parse_args()


def main():
    options = parse_options()
    if options.batch % options.dp:
        raise SystemExit(f"--batch {options.batch} must be a multiple of --dp {options.dp}")
    sizes = {name: getattr(options, name) for name in ("pp", "dp", "cp", "tp")}
    if math.prod(sizes.values()) > 1:
        dist.init_process_group(options.backend)  # (2) "weft" where others write "gloo"
    mesh = weft.init_mesh(**sizes, device_type="cpu")  # (3) who shares what

    torch.manual_seed(options.seed)
    # (4) This rank's part of every layer, and with --cp of the sequence, of which the model gets and returns a part.
    model = GPT(options.sequence)
    model = weft.parallelize(model, mesh["cp", "tp"], plan=PLAN, context={"parts": True}, recompute=options.recompute)
    model, step_of = stepper(model, mesh, options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    text = standard_library()
    bytes_a_step = options.batch * options.sequence
    losses, seconds = [], []
    shown = Shown(options, parameters)
    with shown.bar:
        for step in range(options.steps):
            start = time.perf_counter()
            whole = batch_of(text, step, options.batch, options.sequence, options.seed)
            # (5) This rank's sequences, and its part of them.
            mine = (part.chunk(options.dp)[mesh["dp"].get_local_rank()] for part in whole)
            inputs, targets = (weft.shard_sequence(part, dim=1, group=mesh["cp"]) for part in mine)
            optimizer.zero_grad()
            losses.append(step_of(inputs, targets).item())
            weft.clip_grad_norm_(model, 1.0)  # of the whole model's gradient, wherever it lies
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            shown.show(step, losses[-1], bytes_a_step / seconds[-1])

    report(options, parameters, losses, seconds)
    dist.destroy_process_group()


def stepper(model, mesh, options):
    """The model as it is trained, and a function that runs forward and backward and returns the batch's loss."""

    def loss_of(logits, targets):
        # (6) The logits stay split over the vocabulary; the loss is this rank's part of the mean over all bytes.
        losses = weft.parallel_cross_entropy(logits, targets, group=mesh["tp"], reduction="sum")
        return losses / (options.batch * options.sequence)

    if options.pp > 1:  # (7) Micro-batches follow one another through the stages; gradients and losses add up.
        count = options.microbatches or options.pp
        pipe = weft.Pipeline(model, mesh, schedule=options.schedule, microbatches=count, loss=loss_of, reduction="sum")
        return pipe, pipe.step
    if options.dp > 1:
        model = weft.DataParallel(model, group=mesh["dp"], average=False)

    def step(inputs, targets):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return weft.all_reduce(weft.all_reduce(loss.detach(), group=mesh["cp"]), group=mesh["dp"])

    return model, step


class Shown:
    """A progress bar on rank 0; where the output is no terminal, a line now and then."""

    def __init__(self, options, parameters):
        self.steps, self.speaks, self.console = options.steps, dist.get_rank() == 0, Console()
        self.bar = Progress(
            TextColumn(f"pp={options.pp} dp={options.dp} cp={options.cp} tp={options.tp} {options.backend}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.speaks and self.console.is_terminal),
        )
        self.task = self.bar.add_task("", total=options.steps)
        size = f"{parameters / 1e6:.2f} million parameters on this rank"
        self.say(f"{size}, {options.batch} x {options.sequence} bytes a step")

    def say(self, line):
        if self.speaks:
            self.console.print(line)

    def show(self, step, loss, speed):
        line = f"loss {loss:.3f}  {speed:.0f} tokens/s"
        self.bar.update(self.task, completed=step + 1, description=line)
        if not self.console.is_terminal and (step + 1) % max(1, self.steps // 5) == 0:
            self.say(f"step {step + 1}/{self.steps}  {line}")


def report(options, parameters, losses, seconds):
    memory = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(memory, torch.tensor([peak_memory_mb()]))
    if dist.get_rank() != 0 or options.out is None:
        return
    figures = {
        **{name: getattr(options, name) for name in ("pp", "dp", "cp", "tp", "recompute")},
        "backend": options.backend if dist.get_world_size() > 1 else "none",
        "parameters_per_rank": parameters,
        "losses": losses,
        "tokens_per_s": options.batch * options.sequence / sorted(seconds)[len(seconds) // 2],
        "peak_memory_mb": [round(peak.item()) for peak in memory],
    }
    options.out.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
