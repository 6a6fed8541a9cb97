"""Save a checkpoint on one mesh and go on from it on another, with the same bits.

torchrun --nproc-per-node 2 examples/other_mesh.py --tp 2 --save checkpoint
torchrun --nproc-per-node 2 examples/other_mesh.py --dp 2 --load checkpoint
python examples/other_mesh.py --load checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, PLAN, batches

import weft


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--load", help="folder of the checkpoint to start from")
    parser.add_argument("--save", help="folder to save to, after two steps")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("weft")
    mesh = weft.init_mesh(dp=options.dp, tp=options.tp, device_type="cpu")
    torch.manual_seed(0 if options.save else 1)  # different weights, which the checkpoint replaces
    plan = {**PLAN, "logits": {"style": "column", "gather_output": True}}
    model = weft.parallelize(GPT(sequence=64), mesh, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    if options.load:
        weft.load_checkpoint(model, optimizer, options.load)
    state = weft.full_state_dict(model)  # the whole weights, under the plain model's names
    if dist.get_rank() == 0:
        print(f"begins with weights whose sum is {sum(x.double().sum().item() for x in state.values()):.12f}")
    for inputs, targets in batches(2, 4, 64, seed=2):
        inputs, targets = (part.chunk(options.dp)[mesh["dp"].get_local_rank()] for part in (inputs, targets))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    if options.save:
        weft.save_checkpoint(model, optimizer, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
