"""torch's communication hooks run on our buckets, and ours under torch's DDP and FSDP2."""

import pytest
import torch
import torch.distributed as dist
from replicas_of_mlp import batch, loss_of, mlp, rank_order_gradients
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.testing.ranks import run_ranks


def losses(step):
    return [lambda model, rank=rank: loss_of(model(batch(step, rank))) for rank in range(dist.get_world_size())]


def train(model, rank, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
    return model


def torchs_hooks(rank, hook):
    ours, theirs = weft.DataParallel(mlp()), DistributedDataParallel(mlp())
    of_gpus = hook is default_hooks.bf16_compress_hook  # DDP refuses it here; the unhooked one stands in for it
    for model in (ours, theirs):
        torch.manual_seed(0)
        state = None
        if hook is powerSGD_hook.powerSGD_hook:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        if model is ours or not of_gpus:
            model.register_comm_hook(state, hook)
        train(model, rank)
        parts = [torch.empty_like(model.module[0].weight) for _ in range(2)]
        dist.all_gather(parts, model.module[0].weight.detach())
        assert torch.equal(*parts)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        if state is None and not of_gpus:
            assert torch.equal(mine, expected), "of two ranks DDP's order of summation does not show"
        torch.testing.assert_close(mine, expected, rtol=0.05, atol=0.05)
    total = torch.stack([parameter.grad.double().square().sum() for parameter in ours.parameters()]).sum()
    torch.testing.assert_close(ours.grad_norm, total.sqrt())
    with pytest.raises(ValueError, match="registered already"):
        ours.register_comm_hook(None, hook)


@pytest.mark.parametrize(
    "hook",
    [
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        powerSGD_hook.powerSGD_hook,
    ],
    ids=lambda hook: hook.__name__,
)
def test_torchs_hooks_run_on_our_buckets(hook):
    run_ranks(torchs_hooks, 2, hook)


def own_hook(rank):
    """What a hook is shown, and that what its future gives is the gradient."""
    model, seen = weft.DataParallel(mlp(), bucket_mb=1e-3), []

    def ones(state, bucket):
        seen.append((bucket.index(), bucket.is_last()))
        assert state == "state" and len(bucket.gradients()) == len(bucket.parameters())
        assert all(g.shape == p.shape for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True))
        bucket.set_buffer(torch.ones_like(bucket.buffer()))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook("state", ones)
    loss_of(model(batch(0, rank))).backward()
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    buckets = len(model.reducer.buckets)
    assert seen == [(index, index == buckets - 1) for index in range(buckets)] and buckets > 1


def test_a_hook_sees_each_bucket_in_order():
    run_ranks(own_hook, 2)


def ours_under_ddp(rank, backend, wire_dtype):
    """DDP of another backend; its gradients are the sums of ours."""
    weft_group = dist.new_group(backend="weft")
    model = DistributedDataParallel(mlp(), process_group=dist.new_group(backend=backend))
    model.register_comm_hook(weft.HookState(weft_group, wire_dtype), weft.ddp_hook)
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch(step, rank))).backward()
        for parameter, expected in zip(
            model.parameters(), rank_order_gradients(mlp(), losses(step), wire_dtype=wire_dtype), strict=True
        ):
            assert torch.equal(parameter.grad, expected)


@pytest.mark.parametrize(("backend", "wire_dtype"), [("gloo", None), ("weft", torch.bfloat16)])
def test_ddp_sums_in_rank_order_by_our_hook(backend, wire_dtype):
    run_ranks(ours_under_ddp, 3, backend, wire_dtype)


def ours_over_gloo(rank):
    """The hook on a group of another backend averages there."""
    model = DistributedDataParallel(mlp())
    model.register_comm_hook(None, weft.ddp_hook)
    loss_of(model(batch(0, rank))).backward()
    for parameter, expected in zip(model.parameters(), rank_order_gradients(mlp(), losses(0)), strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_our_hook_runs_over_another_backend():
    run_ranks(ours_over_gloo, 2, backend="gloo")


def ours_under_fsdp(rank, backend):
    weft_group = None if backend == "weft" else dist.new_group(backend="weft")
    model = fully_shard(mlp(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(weft.FSDPReduceScatter(weft_group))
            module.set_custom_all_gather(weft.FSDPAllGather(weft_group))
    loss_of(model(batch(0, rank))).backward()
    for parameter, expected in zip(model.parameters(), rank_order_gradients(mlp(), losses(0)), strict=True):
        gradient = parameter.grad.full_tensor()
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_fsdp2_sums_in_rank_order_by_our_reduce_scatter(backend):
    run_ranks(ours_under_fsdp, 3, backend, backend=backend)
