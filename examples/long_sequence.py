"""Share each sequence among ranks: a rank keeps only the activations of its part.

torchrun --nproc-per-node 2 examples/long_sequence.py --sequence 16384
"""

import argparse
import resource

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, batches

import weft


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=4096, help="bytes of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("weft")
    mesh = weft.init_mesh(cp=dist.get_world_size(), device_type="cpu")
    torch.manual_seed(0)
    # Each rank calls the model with its part of the sequence. Attention sees the whole sequence, block by block.
    model = weft.parallelize(GPT(options.sequence), mesh["cp"], context={"method": "ring", "parts": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for step, batch in enumerate(batches(options.steps, 1, options.sequence)):
        inputs, targets = (weft.shard_sequence(part, dim=1, group=mesh["cp"]) for part in batch)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / options.sequence
        optimizer.zero_grad()
        loss.backward()  # gradients are summed over the ranks
        optimizer.step()
        total = weft.all_reduce(loss.detach(), group=mesh["cp"])
        if dist.get_rank() == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"step {step}: loss {total:.4f}, {inputs.size(1)} of {options.sequence} bytes here, {peak} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
