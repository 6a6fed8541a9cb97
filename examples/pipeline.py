"""Cut a model into stages, run micro-batches through them, and print the idle time of each rank.

torchrun --nproc-per-node 2 examples/pipeline.py --schedule 1f1b --microbatches 4
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, batches

import weft


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="afab, 1f1b, interleaved, zero-bubble, zbv or dualpipev")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("weft")
    mesh = weft.init_mesh(pp=dist.get_world_size(), device_type="cpu")
    torch.manual_seed(0)  # every rank makes the whole model and keeps its stages
    pipe = weft.Pipeline(
        GPT(sequence=64), mesh, schedule=options.schedule, microbatches=options.microbatches, loss=loss_of
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=5e-4)
    for step, (inputs, targets) in enumerate(batches(options.steps, 8, 64)):
        optimizer.zero_grad()
        last = step == options.steps - 1
        loss = pipe.step(inputs, targets, record_timeline=last)  # forward and backward of all micro-batches
        weft.clip_grad_norm_(pipe, 1.0)  # of the whole model's gradient
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}, layers of each stage {pipe.layers_per_stage}")
    timeline = pipe.timeline()  # a collective call
    if dist.get_rank() == 0:
        print(timeline)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
