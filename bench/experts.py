"""weft bench experts: a step of a layer of experts on ranks, and the way of its tokens.

Beside them: gloo, one process, and the same layer split by transformers over gloo where transformers is installed.
"""

import argparse
import copy
import importlib.util
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

import weft
from weft.bench.measure import alternate, slowest_rank
from weft.bench.table import Row
from weft.comm.registry import communicator
from weft.nn import Experts, ParallelExperts
from weft.ops.experts import all_to_all_rows
from weft.testing.ranks import run_ranks

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 4096, 1024, 512, 8, 2
LIMIT = "of the way of the tokens: a copy of as many bytes, there and back, by each rank"


def run(options: argparse.Namespace) -> Iterator[Row]:
    cases = {
        "there and back": (_way, "gloo"),
        "step, tp": (_step_tp, "one process"),
        "step, ep": (_step_ep, "one process"),
    }
    for name, (measured, peer) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            per_rank = run_ranks(measured, options.world, options.rounds, folder, backend="gloo", timeout_s=600)
        times = slowest_rank(per_rank)
        facts = {"of_limit": times["limit"].p50_us / times["weft"].p50_us} if "limit" in times else {}
        shape = f"{name}: {TOKENS} tokens of {HIDDEN}, {CHOSEN} of {EXPERTS} experts of {INTERMEDIATE}, fp32"
        yield Row({"shape": shape, "world": options.world}, times, peer, facts)


def _way(rank: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Measure an all_to_all of all rows, and its return; half of them stay."""
    world, group = dist.get_world_size(), dist.new_group(backend="weft")
    ranks, sizes = communicator(group), weft.split_sizes(TOKENS, dist.get_world_size())
    x, received = torch.randn(TOKENS, HIDDEN), [sizes[rank]] * world
    parts, back = torch.empty(sum(received), HIDDEN), torch.empty_like(x)

    def ours():
        all_to_all_rows(all_to_all_rows(x, ranks, sizes, received), ranks, received, sizes)

    def gloo():
        dist.all_to_all_single(parts, x, received, sizes)
        dist.all_to_all_single(back, parts, sizes, received)

    def copies():
        parts.copy_(x[: len(parts)])
        back[: len(parts)].copy_(parts)

    return alternate(
        {"weft": ours, "limit": copies, "gloo": gloo}, meet=lambda: dist.barrier(group), rounds=rounds, calls=3
    )


def _step_tp(rank: int, rounds: int, folder: str) -> dict[str, list[float]]:
    group = dist.new_group(backend="weft")
    whole, x, index, weights = _layer(TOKENS)
    layer = ParallelExperts.from_experts(copy.deepcopy(whole), group=group)
    contenders = {"weft": _step(layer, x, index, weights), "one process": _alone(rank, _step(whole, x, index, weights))}
    theirs = _by_transformers(whole, folder) if importlib.util.find_spec("transformers") else None
    if theirs is not None:
        with torch.no_grad():
            torch.testing.assert_close(theirs(x, index, weights), whole(x, index, weights), rtol=1e-4, atol=1e-4)
        contenders["transformers over gloo"] = _step(theirs, x, index, weights)
    return alternate(contenders, meet=lambda: dist.barrier(group), rounds=rounds, calls=1)


def _step_ep(rank: int, rounds: int, folder: str) -> dict[str, list[float]]:
    group = dist.new_group(backend="weft")
    whole, *given = _layer(TOKENS)
    layer = ParallelExperts.from_experts(copy.deepcopy(whole), ep_group=group)
    own = [tensor.split(weft.split_sizes(TOKENS, dist.get_world_size()))[rank] for tensor in given]
    contenders = {"weft": _step(layer, *own), "one process": _alone(rank, _step(whole, *given))}
    return alternate(contenders, meet=lambda: dist.barrier(group), rounds=rounds, calls=1)


def _layer(tokens: int):
    torch.manual_seed(0)
    layer, x = Experts(EXPERTS, HIDDEN, INTERMEDIATE), torch.randn(tokens, HIDDEN)
    weights, index = torch.randn(tokens, EXPERTS).softmax(-1).topk(CHOSEN, -1)
    return layer, x, index, weights


def _by_transformers(whole: Experts, folder: str) -> torch.nn.Module:
    """Return the same experts as transformers splits them over the default group (its `ep_size`)."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    rank, world = dist.get_rank(), dist.get_world_size()
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_hidden_layers=1,
        vocab_size=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    if rank == 0:
        model = MixtralForCausalLM(config)
        model.model.layers[0].mlp.experts.load_state_dict(whole.state_dict())
        model.save_pretrained(folder)
    dist.barrier()
    split = DistributedConfig(tp_size=world, ep_size=world)
    model = MixtralForCausalLM.from_pretrained(folder, distributed_config=split)
    return model.model.layers[0].mlp.experts


def _alone(rank: int, step):
    """Return the step for rank 0; the other ranks wait for it, so that it has the machine."""
    return step if rank == 0 else lambda: None


def _step(layer, x, index, weights):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def step():
        for leaf in (x, weights, *layer.parameters()):
            leaf.grad = None
        layer(x, index, weights).sum().backward()

    return step
