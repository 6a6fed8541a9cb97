"""Train a byte-level GPT on the sources of Python's standard library, split over ranks by the options.

    python examples/train_lm.py                                                  one process
    torchrun --nproc-per-node 2 examples/train_lm.py --tp 2                      each layer split over two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --dp 2                      each batch split over two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --cp 2                      each sequence split over two ranks
    torchrun --nproc-per-node 4 examples/train_lm.py --pp 2 --tp 2               the layers cut in two stages as well
    torchrun --nproc-per-node 2 examples/train_lm.py --tp 2 --invariant 4        the same bits on any number of ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --cp 2 --invariant 4 --units 2
    torchrun --nproc-per-node 2 examples/train_lm.py --dp 2 --invariant 4 --hash-every 10     one hash on any mesh

The model in gpt.py is plain PyTorch. (1) is its plan in the same file; the lines marked (2) to (8) make it parallel.

Elastic: a run with --invariant and --checkpoint goes on with the ranks that are left, and ends with the bits of the run
that was never interrupted. Start this on two machines, and let one of them die:

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        examples/train_lm.py --tp 2 --dp 0 --invariant 4 --checkpoint run/latest
"""

import argparse
import json
import os
import resource
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, PLAN, batches

import weft


def stepper_in_units(model, mesh, options, split):
    """Do as `stepper`. The loss is a mean over units of the batch, the same number on every rank."""
    loss_of = partial(weft.parallel_cross_entropy, group=mesh["tp"], invariant=options.invariant)
    if options.pp > 1:
        pipe = weft.parallelize(model, mesh, **split, pipeline={"loss": loss_of})
        return pipe, pipe.step
    model = weft.parallelize(model, mesh, **split)

    def step(inputs, targets):
        loss = model.in_units(lambda inputs, targets: loss_of(model(inputs), targets), inputs, targets)
        loss.backward()
        return loss.detach()

    return model, step


def stepper(model, mesh, options, split):
    """Return the parallel model, and a function that runs forward and backward and returns the batch's loss."""
    if options.invariant:  # (8) the same bits on any mesh
        return stepper_in_units(model, mesh, options, split)
    model = weft.parallelize(model, mesh["cp", "tp"], **split)

    def loss_of(logits, targets):
        # (6) The logits stay split over the vocabulary. This is the rank's part of the mean over all bytes.
        losses = weft.parallel_cross_entropy(logits, targets, group=mesh["tp"], reduction="sum")
        return losses / (options.batch * options.sequence)

    if options.pp > 1:  # (7) Micro-batches follow one another through the stages.
        pipe = weft.Pipeline(model, mesh, microbatches=options.pp, loss=loss_of, reduction="sum")
        return pipe, pipe.step
    model = weft.DataParallel(model, group=mesh["dp"], average=False) if options.dp > 1 else model

    def step(inputs, targets):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return weft.all_reduce(weft.all_reduce(loss.detach(), group=mesh["cp"]), group=mesh["dp"])

    return model, step


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--dp", type=int, default=1, help="ranks that share each batch; 0: all that there are")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--pp", type=int, default=1, help="ranks that share the layers")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, over all ranks")
    parser.add_argument("--sequence", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recompute", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--invariant", type=int, help="units of layers and batch: the same bits on any mesh")
    parser.add_argument(
        "--units", type=int, help="parts of each sequence, for the same bits with --cp, which divides it"
    )
    parser.add_argument("--checkpoint", type=Path, help="continue from this folder if there is one; save there")
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves")
    parser.add_argument("--hash-every", type=int, help="steps between hashes of parameters and optimizer state")
    parser.add_argument("--backend", default="weft", help="of torch.distributed")
    parser.add_argument("--out", type=Path, help="write the losses and the figures there, as JSON")
    return parser.parse_args()


def main():
    options = parse_options()
    if options.dp == 0:
        options.dp = int(os.environ.get("WORLD_SIZE", 1)) // (options.pp * options.cp * options.tp)
    if "RANK" in os.environ:
        dist.init_process_group(options.backend)  # (2) "weft" where others write "gloo"
    mesh = weft.init_mesh(pp=options.pp, dp=options.dp, cp=options.cp, tp=options.tp, device_type="cpu")  # (3)
    torch.manual_seed(options.seed)
    # (4) This rank's part of every layer. With --cp the model takes and returns this rank's part of the sequence, or,
    # with --units, the whole one.
    context = {"units": options.units} if options.units else {"parts": True}
    split = {"plan": PLAN, "context": context, "recompute": options.recompute, "invariant": options.invariant}
    model, step_of = stepper(GPT(options.sequence), mesh, options, split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    held = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"{held / 1e6:.2f} million parameters on this rank, {options.batch} x {options.sequence} bytes a step")
    losses, speeds, hashes = [], [], {}
    if options.checkpoint and (options.checkpoint / "manifest.json").exists():
        losses = weft.load_checkpoint(model, optimizer, options.checkpoint).extras["losses"]
        if dist.get_rank() == 0:
            print(f"continues at step {len(losses) + 1} on {dist.get_world_size()} ranks", flush=True)
    data = batches(options.steps, options.batch, options.sequence, options.seed, start=len(losses))
    for number, batch in enumerate(data, len(losses) + 1):
        start = time.perf_counter()
        local = (part.chunk(options.dp)[mesh["dp"].get_local_rank()] for part in batch)  # (5) this rank's sequences
        inputs, targets = local if options.units else (weft.shard_sequence(x, dim=1, group=mesh["cp"]) for x in local)
        optimizer.zero_grad()
        losses.append(step_of(inputs, targets).item())
        weft.clip_grad_norm_(model, 1.0)  # by the norm of the whole model's gradient
        optimizer.step()
        speeds.append(options.batch * options.sequence / (time.perf_counter() - start))
        if dist.get_rank() == 0 and number % max(1, options.steps // 5) == 0:
            print(f"step {number}/{options.steps}  loss {losses[-1]:.3f}  {speeds[-1]:.0f} tokens/s", flush=True)
        if number == options.steps or (options.hash_every and number % options.hash_every == 0):
            hashes[number] = weft.state_hash(model, optimizer)  # the same on every mesh with --invariant
            if dist.get_rank() == 0 and options.hash_every:
                print(f"step {number}  hash {hashes[number]}", flush=True)
        if options.checkpoint and (number % options.save_every == 0 or number == options.steps):
            weft.save_checkpoint(model, optimizer, options.checkpoint, step=number, extras={"losses": losses})

    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    if dist.get_rank() == 0 and options.out:
        figures = {"losses": losses, "tokens_per_s": sorted(speeds)[len(speeds) // 2], "peak_memory_mb": peaks}
        options.out.write_text(json.dumps({**figures, "parameters_per_rank": held, "hashes": hashes}) + "\n")
    dist.barrier()  # nobody ends before rank 0 has written
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
