"""weft bench linear: a tensor-parallel MLP's forward and backward, against DTensor's parallelize_module over gloo."""

import argparse
import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft
from weft.bench.measure import alternate, slowest_rank
from weft.bench.table import Row
from weft.testing.cases import MLPS, Mlp
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import error_in_tolerances

PEER = "DTensor over gloo"
LIMIT = "the same shards' arithmetic in nn.Linear, without any communication"


def run(options: argparse.Namespace) -> Iterator[Row]:
    for case in MLPS:
        per_rank = run_ranks(_measure, options.world, case, options.rounds, backend="gloo", timeout_s=300)
        times = slowest_rank([samples for samples, _ in per_rank])
        error = max(error for _, error in per_rank)
        if error > 1:
            raise AssertionError(f"{case}: the result is off by {error:.1f} tolerances; not measured")
        refused = "" if PEER in times else f"{PEER} refuses uneven sizes"
        facts = {"of_limit": times["limit"].p50_us / times["weft"].p50_us, "error": error}
        yield Row({"shape": f"{case} fp32", "world": options.world}, times, PEER, facts, refused)


def _measure(rank: int, case: Mlp, rounds: int) -> tuple[dict[str, list[float]], float]:
    world = dist.get_world_size()
    group = dist.new_group(backend="weft")
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.Linear(case.hidden, case.intermediate),
        nn.GELU(approximate="tanh"),
        nn.Linear(case.intermediate, case.hidden),
    )
    up, down = (layer for layer in whole if isinstance(layer, nn.Linear))
    x = torch.randn(case.tokens, case.hidden)
    output_gradient = torch.randn(case.tokens, case.hidden)

    ours = nn.Sequential(
        weft.ColumnParallelLinear.from_linear(up, group=group, activation="gelu_tanh"),
        weft.RowParallelLinear.from_linear(down, group=group),
    )
    peer = None
    if case.intermediate % world == 0:  # otherwise its sharding propagation fails in the first forward
        mesh = init_device_mesh("cpu", (world,))
        peer = parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    width = weft.split_sizes(case.intermediate, world)[rank]
    alone = nn.Sequential(nn.Linear(case.hidden, width), nn.GELU(approximate="tanh"), nn.Linear(width, case.hidden))

    reference = copy.deepcopy(whole).double()
    exact = _step(reference, x.double(), output_gradient.double())()
    plain = _step(whole, x, output_gradient)()
    step = _step(ours, x, output_gradient)
    error = max(map(error_in_tolerances, step(), plain, exact))
    operations = 12 * case.tokens * case.hidden * case.intermediate
    contenders = {"weft": step, "limit": _step(alone, x, output_gradient)}
    if peer is not None:
        contenders[PEER] = _step(peer, x, output_gradient)
    samples = alternate(
        contenders,
        meet=lambda: dist.barrier(group),
        rounds=rounds,
        calls=max(3, min(40, 10**10 // operations)),
    )
    return samples, error


def _step(model: nn.Module, x: torch.Tensor, output_gradient: torch.Tensor):
    """Return a function for forward and backward, which returns the output and the gradient of the input."""
    x = x.clone().requires_grad_()
    leaves = [x, *model.parameters()]

    def step():
        for leaf in leaves:
            leaf.grad = None
        output = model(x)
        output.backward(output_gradient)
        return output, x.grad

    return step
