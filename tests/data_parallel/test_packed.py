"""Buckets that weft's kernels pack and finish, as on GPUs: in Triton's interpreter, with the laws of the other tests."""

import runpy
from pathlib import Path

import pytest
import torch
from interpreter import in_the_interpreter
from replicas_of_mlp import batch, loss_of, mlp, rank_order_gradients
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import weft
from weft.comm.cuda import DeviceCommunicator
from weft.data_parallel import buckets, reducer
from weft.data_parallel.buckets import Packing
from weft.kernels import bucket as kernels
from weft.ops import kernel_choice
from weft.testing import reference
from weft.testing.ranks import run_ranks

pytestmark = [pytest.mark.kernel, in_the_interpreter]


@pytest.fixture(autouse=True)
def on_kernels():
    with kernel_choice.prefer("kernel"):  # the ranks are forks of this process
        yield


# Worlds that divide by a power of two: the kernels multiply by fp32(1 / W).
LAWS = {
    "every layout": ("test_data_parallel", "train_in_every_layout", 2),
    "types": ("test_data_parallel", "wire_and_sum", 2),
    "micro-batches averaged": ("test_data_parallel", "accumulate", 3, True),
    "micro-batches summed": ("test_data_parallel", "accumulate", 3, False),
    "zeroed": ("test_data_parallel", "zeroed_after_no_sync", 2, "zero"),
    "unused": ("test_data_parallel", "zero_unused", 3, 25),
    "checkpoints": ("test_data_parallel", "run_unusual", 2, "reentrant"),
    "hooks": ("test_data_parallel", "run_unusual", 2, "hooked"),
    "frozen": ("test_data_parallel", "freeze_later", 2),
    "another backend": ("test_data_parallel", "other_group", 2, "gloo"),
    "sharded": ("test_sharded_optimizer", "twice_without_zeroing", 2, 25),
    "sharded and narrow": ("test_sharded_optimizer", "same_steps", 2, {"wire_dtype": torch.bfloat16}),
    "raised midway": ("test_faults", "raises_midway", 2),
    "not finite": ("test_faults", "not_finite", 3, True),
    "communication hook": ("test_comm_hooks", "torchs_hooks", 2, allreduce_hook),
}


def observed(rank, file, name, arguments):
    """Run a rank of another test; return how many gradients the fullest launch moved."""
    function = runpy.run_path(str(Path(__file__).with_name(f"{file}.py")))[name]
    pack, moved = Packing.pack, [0]

    def counting(self):
        moved.append(sum(slot.outside is not None for slot in self._slots))
        return pack(self)

    Packing.pack = counting
    function(rank, *arguments)
    return max(moved)


SLOW = pytest.mark.slow("pytorch_ext/data_parallel", "kernels")


@pytest.mark.parametrize("law", [pytest.param(law, marks=SLOW) if law == "every layout" else law for law in LAWS])
def test_packed_buckets_keep_the_law_of(law):
    file, name, world, *arguments = LAWS[law]
    moved = run_ranks(observed, world, file, name, arguments, timeout_s=180)
    if law == "micro-batches averaged":
        assert moved == [0] * world, "they are added up in the bucket"
    else:
        assert max(moved) > 1


def one_launch(rank, wire_dtype):
    """Once the order is known, a step moves each bucket in one launch, and its result in one pass."""
    model = weft.DataParallel(mlp(), wire_dtype=wire_dtype, bucket_mb=0.004)
    loss_of(model(batch(0, rank))).backward()
    model.zero_grad()
    calls, put = [], []
    launch, copy = kernels.launch.launch, reducer.put
    kernels.launch.launch = lambda kernel, *rest, **more: (calls.append(kernel.__name__), launch(kernel, *rest, **more))
    reducer.put = lambda *rest: (put.append(rest), copy(*rest))
    alone = mlp()
    loss_of(model(batch(1, rank))).backward()
    kernels.launch.launch, reducer.put = launch, copy
    buckets = model.reducer.buckets
    assert calls == ["_pack_kernel", "_reduce_kernel"] * len(buckets) and len(buckets) > 1 and not put
    per_rank = [lambda one, r=r: loss_of(one(batch(1, r))) for r in range(2)]
    expected = rank_order_gradients(alone, per_rank, "avg", wire_dtype)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert any(
            0 <= parameter.grad.data_ptr() - bucket.flat.data_ptr() < bucket.flat.nbytes for bucket in buckets
        ), ".grad is the place in the bucket"
    # Buckets of another layout shared the wire buffer: what they left in gaps would count here.
    norm = torch.stack([gradient.double().square().sum() for gradient in expected]).sum().sqrt()
    torch.testing.assert_close(model.grad_norm, norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16])
def test_one_launch_moves_a_bucket_and_one_pass_ends_its_reduction(wire_dtype):
    run_ranks(one_launch, 2, wire_dtype)


def over_pretended_gpus(rank, wire_dtype, shards):
    """tests/comm/test_cuda.py has host memory pass for that of GPUs, with a stand-in for the CUDA kernels."""
    pretended = runpy.run_path(str(Path(__file__).parents[1] / "comm" / "test_cuda.py"))
    world, log = pretended["pretend"]().world_size, pretended["FakeRanks"].log
    DeviceCommunicator._obstacle = lambda _: ""  # a weft without CUDA can pretend as well
    buckets.empty_symmetric = lambda bytes, dtype, **_: pretended["pretended_symmetric"](bytes, dtype)
    model = weft.DataParallel(mlp(), wire_dtype=wire_dtype, bucket_mb=0.004, shard_optimizer=shards)
    for step in range(2):
        model.zero_grad()
        log.clear()
        loss_of(model(batch(step, rank))).backward()
    way = "reduce_scatter_in_place" if shards else "in_place"
    sent = str(wire_dtype or torch.float32).removeprefix("torch.")
    assert [dtype for name, *_, dtype in log if name == way] == [sent] * len(model.reducer.buckets)
    per_rank = [rank_order_gradients(mlp(), [lambda one, r=r: loss_of(one(batch(1, r)))], "sum") for r in range(world)]
    expected = [reference.fused_sum(list(parts), wire_dtype, average=True) for parts in zip(*per_rank, strict=True)]
    if not shards:
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)
    norm = torch.stack([gradient.double().square().sum() for gradient in expected]).sum().sqrt()
    torch.testing.assert_close(model.grad_norm, norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("world", "shards"), [(2, False), (3, False), (2, True)])
def test_a_bucket_is_summed_where_it_was_packed(world, shards, wire_dtype):
    options = {"backend": "cpu:weft,cuda:gloo", "group_timeout_s": 60}
    run_ranks(over_pretended_gpus, world, wire_dtype, shards, **options)


def replaced(rank, how):
    """A hook gives `.grad` other memory: of another layout, of the bucket, or of a tensor that it keeps."""
    model = weft.DataParallel(nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)))
    first, second = (layer.weight for layer in model.module)
    kept = []

    def hook(parameter):
        if how == "transposed":
            parameter.grad = (parameter.grad * 3).t().contiguous().t()
        elif how == "of the bucket":
            second.main = parameter.grad = model.reducer.buckets[0].flat[:36].view(6, 6).fill_(rank + 1)
        else:
            kept.append(parameter.grad * 3)
            parameter.grad = kept[-1]

    x = torch.ones(2, 6) * (rank + 1)
    model(x).sum().backward()
    once = first.grad.clone()
    model.zero_grad()
    # Before weft's own hook, which runs last here, as it would with hooks from before the wrapper.
    hooks = first._post_accumulate_grad_hooks
    own = dict(hooks)
    hooks.clear()
    first.register_post_accumulate_grad_hook(hook)
    hooks.update(own)
    model(x).sum().backward()
    expected = torch.full_like(once, 1.5) if how == "of the bucket" else once * 3
    torch.testing.assert_close(first.grad, expected)
    assert first.grad.data_ptr() == model.reducer.slots[0].address
    assert all(not torch.equal(own, first.grad) for own in kept), "the hook's own tensor is only read"


@pytest.mark.parametrize("how", ["transposed", "of the bucket", "kept"])
def test_a_gradient_that_a_hook_replaced_is_moved_in(how):
    run_ranks(replaced, 2, how)


def in_no_sync(rank):
    """Gradients without a reduction go to the buckets at once, so that no second memory is kept for them."""
    model = weft.DataParallel(mlp())
    loss_of(model(batch(0, rank))).backward()
    model.zero_grad()
    with model.no_sync():
        loss_of(model(batch(1, rank))).backward()
    assert all(slot.parameter.grad.data_ptr() == slot.address for slot in model.reducer.slots)


def test_micro_batches_without_reduction_fill_the_buckets():
    run_ranks(in_no_sync, 2)
