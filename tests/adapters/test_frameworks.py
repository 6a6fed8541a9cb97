"""What torch builds on a process group runs on this one unchanged: each compared with the model on one process."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from weft.testing.ranks import run_ranks

WORLD = 2


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def batch_of(rank=None):
    torch.manual_seed(1)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    return (x, y) if rank is None else (x.chunk(WORLD)[rank], y.chunk(WORLD)[rank])


def train(model, x, y, optimizer=None, steps=3):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def expected_parameters():
    return dict(train(small_model(), *batch_of()).named_parameters())


def assert_same(parameters, expected=None, tolerance=1e-10):
    expected = expected or expected_parameters()
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    model, mesh = small_model(), init_device_mesh("cpu", (WORLD,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, *batch_of(rank))
    assert_same({name: parameter.full_tensor() for name, parameter in model.named_parameters()})


def dtensor_tensor_parallel(rank):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    model = parallelize_module(small_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, *batch_of())
    whole = {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for name, parameter in model.named_parameters()
    }
    assert_same(whole)


def ddp_with_hooks(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    plain = DistributedDataParallel(small_model())
    assert_same(dict(train(plain, *batch_of(rank)).module.named_parameters()))
    hooked = DistributedDataParallel(small_model())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    assert_same(dict(train(hooked, *batch_of(rank)).module.named_parameters()))
    halved = DistributedDataParallel(small_model().float())
    halved.register_comm_hook(None, default_hooks.fp16_compress_hook)
    x, y = batch_of(rank)
    train(halved, x.float(), y.float())
    expected = {name: value.float() for name, value in expected_parameters().items()}
    assert_same(dict(halved.module.named_parameters()), expected, tolerance=2e-2)
    squeezed = DistributedDataParallel(small_model().float())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    squeezed.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(squeezed, x.float(), y.float(), steps=4)
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, [value.tolist() for value in squeezed.parameters()])
    assert gathered[0] == gathered[1]


def zero_redundancy_optimizer(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(small_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    train(model, *batch_of(rank), optimizer)
    whole = small_model()
    train(whole, *batch_of(), torch.optim.Adam(whole.parameters(), lr=0.01))
    assert_same(dict(model.module.named_parameters()), dict(whole.named_parameters()))


def compiled_functional_collectives(rank):
    import torch.distributed._functional_collectives as functional

    def twice_the_sum(x):
        return 2 * functional.all_reduce(x, "sum", dist.group.WORLD)

    x = torch.ones(5) * (rank + 1)
    compiled = torch.compile(twice_the_sum, backend="aot_eager", fullgraph=True)
    assert (compiled(x) == 6).all()


@pytest.mark.parametrize(
    "job",
    [fsdp2, dtensor_tensor_parallel, ddp_with_hooks, zero_redundancy_optimizer, compiled_functional_collectives],
    ids=lambda job: job.__name__,
)
def test_torch_runs_on_it_unchanged(job):
    run_ranks(job, WORLD, timeout_s=120)


def checkpoint(rank, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(small_model(), mesh=init_device_mesh("cpu", (WORLD,)))
    before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_same({name: parameter.full_tensor() for name, parameter in model.named_parameters()}, before)


def test_distributed_checkpoints_are_written_and_read(tmp_path):
    run_ranks(checkpoint, WORLD, str(tmp_path), timeout_s=120)


SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def pipeline(rank, name):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    warnings.simplefilter("ignore")
    per_rank = SCHEDULES[name]
    stages = per_rank * WORLD
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(stages)]
    whole = nn.Sequential(*copy.deepcopy(layers))
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    mine = [rank] if per_rank == 1 else [rank, stages - 1 - rank] if v_shaped else [rank, rank + WORLD]
    built = [PipelineStage(layers[index], index, stages, torch.device("cpu")) for index in mine]
    schedule_class = get_schedule_class(name)
    schedule = schedule_class(built[0] if per_rank == 1 else built, 4, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(1)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    is_first, is_last = 0 in mine, stages - 1 in mine
    schedule.step(*([x] if is_first else []), **({"target": y, "losses": []} if is_last else {}))
    loss = sum(nn.functional.mse_loss(whole(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)) / 4
    loss.backward()
    for index in mine:
        for got, expected in zip(layers[index].parameters(), whole[index].parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pipeline_schedule_runs(name):
    run_ranks(pipeline, WORLD, name, timeout_s=120)
