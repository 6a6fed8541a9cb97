"""Train a byte-level GPT on the sources of Python's standard library, split over ranks by the options.

    python examples/train_lm.py                                                  one process
    torchrun --nproc-per-node 2 examples/train_lm.py --tp 2                      each layer split over two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --dp 2                      each batch split over two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --cp 2                      each sequence split over two ranks
    torchrun --nproc-per-node 4 examples/train_lm.py --pp 2 --tp 2               the layers cut in two stages as well

The model in gpt.py is plain PyTorch. (1) is its plan in the same file; the lines marked (2) to (7) make it parallel.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, PLAN, batches

import weft


def stepper(model, mesh, options):
    """Return the wrapped model, and a function that runs forward and backward and returns the batch's loss."""

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
    parser.add_argument("--dp", type=int, default=1, help="ranks that share each batch")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--pp", type=int, default=1, help="ranks that share the layers")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, over all ranks")
    parser.add_argument("--sequence", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recompute", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--backend", default="weft", help="of torch.distributed")
    parser.add_argument("--out", type=Path, help="write the losses and the figures there, as JSON")
    return parser.parse_args()


def main():
    options = parse_options()
    if "RANK" in os.environ:
        dist.init_process_group(options.backend)  # (2) "weft" where others write "gloo"
    mesh = weft.init_mesh(pp=options.pp, dp=options.dp, cp=options.cp, tp=options.tp, device_type="cpu")  # (3)
    torch.manual_seed(options.seed)
    # (4) This rank's part of every layer. With --cp the model takes and returns this rank's part of the sequence.
    split = {"plan": PLAN, "context": {"parts": True}, "recompute": options.recompute}
    model, step_of = stepper(weft.parallelize(GPT(options.sequence), mesh["cp", "tp"], **split), mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    held = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"{held / 1e6:.2f} million parameters on this rank, {options.batch} x {options.sequence} bytes a step")
    losses, speeds = [], []
    data = batches(options.steps, options.batch, options.sequence, options.seed)
    for number, batch in enumerate(data, 1):
        start = time.perf_counter()
        local = (part.chunk(options.dp)[mesh["dp"].get_local_rank()] for part in batch)  # (5) this rank's sequences
        inputs, targets = (weft.shard_sequence(part, dim=1, group=mesh["cp"]) for part in local)
        optimizer.zero_grad()
        losses.append(step_of(inputs, targets).item())
        weft.clip_grad_norm_(model, 1.0)  # by the norm of the whole model's gradient
        optimizer.step()
        speeds.append(options.batch * options.sequence / (time.perf_counter() - start))
        if dist.get_rank() == 0 and number % max(1, options.steps // 5) == 0:
            print(f"step {number}/{options.steps}  loss {losses[-1]:.3f}  {speeds[-1]:.0f} tokens/s", flush=True)

    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    if dist.get_rank() == 0 and options.out:
        figures = {"losses": losses, "tokens_per_s": sorted(speeds)[len(speeds) // 2], "peak_memory_mb": peaks}
        options.out.write_text(json.dumps({**figures, "parameters_per_rank": held}) + "\n")
    dist.barrier()  # nobody ends before rank 0 has written
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
