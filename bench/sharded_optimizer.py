"""weft bench sharded_optimizer: training steps with a sharded AdamW, against torch's ZeroRedundancyOptimizer.

The peer runs under DDP over gloo. A time is that of a step in the middle of training: several steps in a row, divided
by their number. The limit is a step without communication, with an optimizer of a W-th of every parameter.
"""

import argparse
import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.bench.data_parallel import SUBJECTS, Subject
from weft.bench.measure import alternate, slowest_rank
from weft.bench.table import Row
from weft.testing.ranks import run_ranks

OURS, PEER, ALONE = "weft", "ZeroRedundancyOptimizer", "limit"
LIMIT = "the same step without communication, with an optimizer of a W-th of every parameter"
_STEPS = 3  # in a row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket-mb", nargs="+", type=float, default=[4.0, 25.0], help="MiB of a bucket")


def run(options: argparse.Namespace) -> Iterator[Row]:
    for name in ("12 linear layers", "demo GPT"):
        for bucket_mb in options.bucket_mb:
            arguments = options.world, SUBJECTS[name], bucket_mb, options.rounds
            per_rank = run_ranks(_measure, *arguments, timeout_s=600, group_timeout_s=120)
            of = {"name": f"{name}, buckets of {bucket_mb:g} MiB", "world": options.world}
            times = slowest_rank(per_rank)
            yield Row(of, times, PEER)


def _measure(rank: int, subject: Subject, bucket_mb: float, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    original = subject.model()
    model = weft.DataParallel(copy.deepcopy(original), shard_optimizer=True, bucket_mb=bucket_mb)
    contenders = {OURS: _steps(subject, model, model.optimizer(torch.optim.AdamW), rank)}
    gloo = dist.new_group(backend="gloo")
    peer = DistributedDataParallel(copy.deepcopy(original), process_group=gloo)
    theirs = ZeroRedundancyOptimizer(peer.parameters(), torch.optim.AdamW, process_group=gloo)
    contenders[PEER] = _steps(subject, peer, theirs, rank)
    for steps in contenders.values():
        steps()
    _check(model, peer)
    contenders[ALONE] = _steps(subject, original, _of_a_part(original), rank)
    samples = alternate(contenders, meet=dist.barrier, rounds=rounds, calls=1)
    return {name: [us / _STEPS for us in each] for name, each in samples.items()}


def _steps(subject: Subject, model: nn.Module, optimizer, rank: int) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(_STEPS):
            model.zero_grad()
            subject.loss(model, rank).backward()
            optimizer.step()

    return steps


def _check(model: nn.Module, peer: nn.Module) -> None:
    """Check that ours agrees with torch's up to the order of sums."""
    for ours, theirs in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def _of_a_part(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that steps the first W-th of every parameter."""
    world = dist.get_world_size()

    def part_of(x: torch.Tensor) -> torch.Tensor:
        return x.detach().flatten()[: -(-x.numel() // world)]

    parts = {nn.Parameter(part_of(parameter)): parameter for parameter in model.parameters()}
    optimizer = torch.optim.AdamW(parts)

    def hand_gradients_over(*_) -> None:
        for part, parameter in parts.items():
            assert parameter.grad is not None
            part.grad = part_of(parameter.grad)

    optimizer.register_step_pre_hook(hand_gradients_over)
    return optimizer
