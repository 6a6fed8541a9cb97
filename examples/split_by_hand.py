"""Split a model over two ranks by your own plan, look at the parts, and compare with the whole model.

torchrun --nproc-per-node 2 examples/split_by_hand.py
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, PLAN, batches

import weft


def main():
    mesh = weft.init_mesh(tp=2, device_type="cpu")
    torch.manual_seed(0)  # the same whole model on every rank
    whole = GPT(sequence=64)
    # Maps names of modules to styles of splitting. A layer that no name matches stays whole on every rank.
    plan = {**PLAN, "logits": {"style": "column", "gather_output": True}}  # every rank gets the whole logits
    model = weft.parallelize(copy.deepcopy(whole), mesh, plan=plan)

    ((inputs, targets),) = batches(steps=1, batch=2, sequence=64)
    losses = [F.cross_entropy(each(inputs).flatten(0, 1), targets.flatten()) for each in (whole, model)]
    for loss in losses:
        loss.backward()
    name = "blocks.0.up.weight"
    part, expected = model.get_parameter(name), whole.get_parameter(name).grad
    shard = weft.shard_of(part)
    gap = (shard.gather(part.grad) - expected).abs().max() / expected.abs().max()

    if dist.get_rank() == 0:
        print(weft.explain(model))  # how each layer is split, and which bytes it sends
        print(f"{name}: {tuple(part.shape)} of {shard.global_shape} on this rank")
        print(f"loss {losses[1]:.6f}, of the whole model {losses[0]:.6f}; gradients differ by {gap:.1e} of the largest")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
