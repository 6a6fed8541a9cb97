"""A script for DistributedDataParallel, ported to weft.DataParallel: sampler, accumulation, clipping, schedule.

    torchrun --nproc-per-node 2 examples/train_ddp.py                       weft.DataParallel
    torchrun --nproc-per-node 2 examples/train_ddp.py --shard-optimizer     each rank keeps half of Adam's state
    torchrun --nproc-per-node 2 examples/train_ddp.py --wire bfloat16       gradients travel as bf16, summed in fp32
    torchrun --nproc-per-node 2 examples/train_ddp.py --torch               torch's DDP, for comparison

The lines that differ from torch's DDP are marked (1) to (4).
"""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import weft

CLASSES, SIZE = 10, 12


def images(count, seed):
    """Return pictures, each of one of ten textures, with noise."""
    textures = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(0.5 * textures[labels] + torch.randn(count, 1, SIZE, SIZE, generator=generator), labels)


def network():
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    second = [nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(32 * (SIZE // 2) ** 2, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def wrap(module, options):
    if options.torch:
        return DistributedDataParallel(module)
    # (2) Gradients lie in symmetric buckets. DDP has no arguments for these options.
    wire = getattr(torch, options.wire) if options.wire else None
    return weft.DataParallel(module, wire_dtype=wire, shard_optimizer=options.shard_optimizer)


def make_optimizer(model, options):
    if options.shard_optimizer:
        return model.optimizer(torch.optim.AdamW, lr=options.lr)  # (3) a real AdamW for this rank's part
    return torch.optim.AdamW(model.parameters(), lr=options.lr)


def clip(model, options):
    if options.torch:
        return nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    return model.clip_grad_norm_(options.clip)  # (4) the pass that summed the gradients also gave the norm


def train_epoch(model, optimizer, loader, options):
    """Return the average loss over all ranks, and the gradients' norm before each step."""
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


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="torch's DistributedDataParallel instead")
    parser.add_argument("--backend", default="weft", help="of torch.distributed")
    parser.add_argument("--wire", choices=["bfloat16", "float16"], help="the type that gradients travel in")
    parser.add_argument("--shard-optimizer", action="store_true", help="each rank keeps its part of Adam's state")
    numbers = {"epochs": 3, "images": 2048, "batch": 32, "accumulate": 2, "clip": 1.0, "lr": 2e-3}
    for name, value in numbers.items():  # batch: images a rank and micro-batch; accumulate: micro-batches a step
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, help="folder for the weights and the figures")
    return parser.parse_args()


def main():
    options = parse_options()
    dist.init_process_group(options.backend)  # (1) "weft" where others write "gloo"
    torch.manual_seed(dist.get_rank())  # every rank draws its own weights; wrapping makes them rank 0's
    model = wrap(network(), options)
    optimizer = make_optimizer(model, options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    data = images(options.images, seed=1)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, options.batch, sampler=sampler, drop_last=True)
    figures = {"losses": [], "norms": []}
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss, norms = train_epoch(model, optimizer, loader, options)
        schedule.step()
        figures["losses"].append(loss)
        figures["norms"] += norms
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
    if dist.get_rank() == 0 and options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), options.out / "weights.pt")  # under the module's own names
        (options.out / "figures.json").write_text(json.dumps(figures) + "\n")
    dist.barrier()  # nobody ends before rank 0 has written
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
