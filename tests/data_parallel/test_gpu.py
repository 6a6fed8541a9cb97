"""DataParallel on CUDA: the same buckets on a side stream, ranks that share one GPU."""

import pytest
import torch
import torch.distributed as dist
from replicas_of_mlp import batch, loss_of, mlp, rank_order_gradients

import weft
from weft.data_parallel.bucket_comm import _side_stream
from weft.testing.ranks import SHARED_GPU, from_file, run_ranks


def as_one_process(rank, options):
    """Gradients written late are waited for, and keep their memory until a late side stream has packed them."""
    world, device = dist.get_world_size(), torch.device("cuda")
    model, alone = weft.DataParallel(mlp().to(device), bucket_mb=1e-3, **options), mlp().to(device)
    for step in range(4):
        model.zero_grad()
        loss = loss_of(model(batch(step, rank).to(device)))
        torch.cuda._sleep(20_000_000 * (rank + 1))
        with torch.cuda.stream(_side_stream(torch.device("cuda", torch.cuda.current_device()))):
            torch.cuda._sleep(20_000_000 * (2 + step % 2))
        loss.backward()
        losses = [lambda one, r=r, s=step: loss_of(one(batch(s, r).to(device))) for r in range(world)]
        expected = rank_order_gradients(alone, losses, wire_dtype=options.get("wire_dtype"))
        if not model.shards_optimizer:
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
        norm = torch.stack([gradient.double().square().sum() for gradient in expected]).sum().sqrt()
        torch.testing.assert_close(model.grad_norm, norm, rtol=1e-5, atol=0)
        assert model.found_nonfinite.device.type == "cuda" and not model.found_nonfinite


def plain(rank):
    as_one_process(rank, {})


def narrow(rank):
    as_one_process(rank, {"wire_dtype": torch.bfloat16})


def sharded(rank):
    as_one_process(rank, {"shard_optimizer": True})


@pytest.mark.gpu
@pytest.mark.parametrize("case", [plain, narrow, sharded])
@pytest.mark.parametrize("world", [1, 2])
def test_on_one_gpu(case, world):
    options = {"backend": "cpu:weft,cuda:gloo", "environment": {SHARED_GPU: "1"}, "timeout_s": 240}
    run_ranks(from_file(case), world, start="spawn", group_timeout_s=60, **options)
