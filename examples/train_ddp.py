"""What a user of DistributedDataParallel does, on weft.DataParallel: samplers, accumulation, clipping, checkpoints.

    torchrun --nproc-per-node 2 examples/train_ddp.py                       weft.DataParallel
    torchrun --nproc-per-node 2 examples/train_ddp.py --shard-optimizer     each rank keeps half of Adam's state
    torchrun --nproc-per-node 2 examples/train_ddp.py --wire bfloat16       gradients travel as bf16, summed in fp32
    torchrun --nproc-per-node 2 examples/train_ddp.py --torch               torch's DDP, for comparison

The lines that differ from torch's DDP are marked (1) to (4).
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import weft

CLASSES, SIZE = 10, 12


def images(count, seed):
    """Pictures of one of ten textures each, in noise."""
    textures = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    return TensorDataset(0.5 * textures[labels] + noise, labels)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def wrap(module, options):
    if options.torch:
        return DistributedDataParallel(module)
    # (2) Gradients in symmetric buckets; the options are what DDP has no argument for.
    wire = getattr(torch, options.wire) if options.wire else None
    return weft.DataParallel(module, wire_dtype=wire, shard_optimizer=options.shard_optimizer)


def make_optimizer(model, options):
    if options.shard_optimizer:
        return model.optimizer(torch.optim.AdamW, lr=options.lr)  # (3) a real AdamW, of this rank's part
    return torch.optim.AdamW(model.parameters(), lr=options.lr)


def clip(model, options):
    if options.torch:
        return nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    return model.clip_grad_norm_(options.clip)  # (4) the norm is there already, from the pass that summed the gradients


def train_epoch(model, optimizer, loader, options):
    """The average loss of this rank's batches, over all ranks, and the gradients' norm before each step."""
    model.train()
    total, norms = torch.zeros(2), []
    for number, (inputs, labels) in enumerate(loader):
        steps = (number + 1) % options.accumulate == 0 or number + 1 == len(loader)
        with contextlib.nullcontext() if steps else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / options.accumulate).backward()
        total += torch.tensor([loss.item(), 1.0])
        if steps:
            norms.append(float(clip(model, options)))
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total[0] / total[1]), norms


@torch.no_grad()
def accuracy(model, data):
    """On every rank by itself: evaluation reduces nothing."""
    model.eval()
    inputs, labels = data.tensors
    return float((model(inputs).argmax(1) == labels).float().mean())


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="torch's DistributedDataParallel instead")
    parser.add_argument("--backend", default="weft", help="of torch.distributed")
    parser.add_argument("--wire", choices=["bfloat16", "float16"], help="the type that gradients travel in")
    parser.add_argument("--shard-optimizer", action="store_true", help="each rank keeps its part of Adam's state")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, help="folder for the weights and the figures")
    options = parser.parse_args()
    if options.torch and (options.wire or options.shard_optimizer):
        parser.error("--wire and --shard-optimizer are weft.DataParallel's")
    return options


def main():
    options = parse_options()
    dist.init_process_group(options.backend)  # (1) "weft" where others write "gloo"
    torch.manual_seed(dist.get_rank())  # whatever this rank draws, the weights become rank 0's
    model = wrap(network(), options)
    optimizer = make_optimizer(model, options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    data, unseen = images(options.images, seed=1), images(512, seed=2)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, options.batch, sampler=sampler, drop_last=True)
    figures = {"losses": [], "norms": [], "accuracy": []}
    start = time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss, norms = train_epoch(model, optimizer, loader, options)
        schedule.step()
        figures["losses"].append(loss)
        figures["norms"] += norms
        figures["accuracy"].append(accuracy(model, unseen))
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {figures['accuracy'][-1]:.1%}", flush=True)

    if dist.get_rank() == 0:
        figures["seconds"] = time.perf_counter() - start
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            # The module's own names; model.state_dict() has them with "module." before, as DDP's.
            torch.save(model.module.state_dict(), options.out / "weights.pt")
            (options.out / "figures.json").write_text(json.dumps(figures) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
