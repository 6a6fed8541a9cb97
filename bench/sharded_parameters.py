"""weft bench sharded_parameters: parameters sharded over dp (zero=3) beside FSDP2 over gloo, and Muon on several ranks.

A step is forward, backward and AdamW. A third step bounds the ratio: in it each rank takes its own part for those of
the others, and waits for nobody. Memory is what a rank holds of parameters, gradients and moments after a step, as a
multiple of its share. Muon's time is that of a step of the optimizer alone, beside one process's on one thread.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import weft
from weft.bench.host_calls import BATCH, GPT, SEQUENCE, WORDS
from weft.bench.measure import alternate, slowest_rank
from weft.bench.table import Row
from weft.data_parallel.comm_hooks import FSDPAllGather, FSDPReduceScatter
from weft.sharding.sharded_grad import local
from weft.testing.models import loss_of
from weft.testing.ranks import run_ranks

PEER = "FSDP2 over gloo"
ALONE = "FSDP2 without waiting"
ONE = "torch.optim.Muon, one process"
LIMIT = "the share of a rank: a W-th of the parameters, gradients and moments, and of the matrices to orthogonalise"
_MODEL = f"GPT of 6 layers of width 256, {BATCH * SEQUENCE} tokens float32"


def run(options: argparse.Namespace) -> Iterator[Row]:
    for world in dict.fromkeys((options.world, 4)):
        per_rank = run_ranks(_measure_steps, world, options.rounds, timeout_s=600, group_timeout_s=120)
        facts = {"memory_of_share": max(held for _, held in per_rank)}
        times = slowest_rank([samples for samples, _ in per_rank])
        yield Row({"model": _MODEL, "mesh": f"dp={world}", "world": world}, times, PEER, facts)
    for zero in (0, 1, 3):
        per_rank = run_ranks(_measure_muon, options.world, zero, options.rounds, timeout_s=600, group_timeout_s=120)
        name = f"Muon, dp={options.world}, zero={zero}"
        yield Row({"model": _MODEL, "mesh": name, "world": options.world}, slowest_rank(per_rank), ONE)


def _measure_steps(rank: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    world = dist.get_world_size()
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (BATCH, SEQUENCE)).chunk(world)[rank]
    ours = weft.parallelize(_gpt(), weft.init_mesh(dp=world), zero=3)
    theirs = _gpt()
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    alone = _gpt()
    for gpt in (theirs, alone):
        for module in (*gpt.blocks, gpt):
            fully_shard(module, mesh=gloo)
            if gpt is alone:
                module.set_custom_all_gather(_OwnParts())
                module.set_custom_reduce_scatter(_OwnSum())
    steps = {}
    for name, model in (("weft", ours), (PEER, theirs), (ALONE, alone)):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        steps[name] = _step(model, optimizer, tokens)
        steps[name]()
        if name == "weft":
            held = _held_bytes(model, optimizer) / (16 * sum(x.numel() for x in model.parameters()) / world)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(local(a.detach()), local(b.detach()), rtol=1e-3, atol=1e-4)
    return alternate(steps, meet=dist.barrier, rounds=rounds, calls=1), held


class _OwnParts(FSDPAllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        for part in output_tensor.chunk(group.size()):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor)


class _OwnSum(FSDPReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        torch.sum(input_tensor.view(group.size(), -1), 0, out=output_tensor)


def _measure_muon(rank: int, zero: int, rounds: int) -> dict[str, list[float]]:
    mesh = weft.init_mesh(dp=dist.get_world_size())
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (BATCH, SEQUENCE))
    model, plain = weft.parallelize(_gpt(), mesh, zero=zero), _gpt()
    loss_of(model(tokens), tokens).backward()
    loss_of(plain(tokens), tokens).backward()
    matrices = [x for x in model.parameters() if x.dim() == 2]
    ours = (
        model.optimizer(weft.Muon, matrices)
        if isinstance(model, weft.DataParallel) and zero
        else weft.Muon(matrices, replicas=mesh["dp"])
    )
    theirs = torch.optim.Muon([x for x in plain.parameters() if x.dim() == 2])

    def alone() -> None:
        if rank == 0:
            theirs.step()

    return alternate({"weft": ours.step, ONE: alone}, meet=dist.barrier, rounds=rounds, calls=1)


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(tokens), tokens).backward()
        optimizer.step()

    return step


def _held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [x for parameter in model.parameters() for x in (parameter.detach(), parameter.grad)]
    tensors += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    held = [local(x) for x in tensors if x is not None]
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(memory.values())
