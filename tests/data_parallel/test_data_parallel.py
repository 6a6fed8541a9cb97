"""weft.DataParallel gives what one process gives that sums the ranks' gradients in rank order, to the bit."""

import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from replicas_of_mlp import batch, loss_of, mlp, rank_order_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import weft
from weft.data_parallel import buckets
from weft.data_parallel.buckets import Slot
from weft.testing import reference
from weft.testing.ranks import on_machines, run_ranks

STEPS = 8


def losses(step, world, loss=loss_of):
    return [lambda model, rank=rank: loss(model(batch(step, rank))) for rank in range(world)]


def assert_gradients(model, expected, what=""):
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient), f"{what} {name}"


LAYOUTS = [(1e-4, True), (0.004, False), (0.004, True), (1, True), (25, True), (1000, False)]  # bucket_mb, overlap


def train_in_every_layout(rank):
    world = dist.get_world_size()
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=50)
    models = [weft.DataParallel(mlp(), bucket_mb=bucket_mb, overlap=overlap) for bucket_mb, overlap in LAYOUTS]
    alone = mlp()
    *ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (*models, alone))
    for step in range(STEPS):
        gradients = rank_order_gradients(alone, losses(step, world))
        norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
        for parameter, gradient in zip(alone.parameters(), gradients, strict=True):
            parameter.grad = gradient
        theirs.step()
        for model, optimizer in zip(models, ours, strict=True):
            optimizer.zero_grad()
            loss_of(model(batch(step, rank))).backward()
            torch.testing.assert_close(model.grad_norm, norm, rtol=1e-12, atol=0)
            optimizer.step()
    for model in models:
        for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(parameter, expected)
    return [len(model.reducer.buckets) for model in models]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_steps_are_those_of_one_process_whatever_the_buckets(world):
    many, some, as_many, *one = run_ranks(train_in_every_layout, world)[0]
    assert many > some == as_many > 1 and set(one) == {1}


def wire_and_sum(rank):
    world = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for wire_dtype, average in ((None, True), (None, False), (torch.bfloat16, True), (torch.float16, False)):
            if wire_dtype and dtype != torch.float32:
                continue
            model = weft.DataParallel(mlp(dtype), wire_dtype=wire_dtype, average=average)
            for step in range(3):
                model.zero_grad()
                loss_of(model(batch(step, rank).to(dtype))).backward()
                per_rank = [lambda one, r=r, s=step, d=dtype: loss_of(one(batch(s, r).to(d))) for r in range(world)]
                op = "avg" if average else "sum"
                expected = rank_order_gradients(mlp(dtype), per_rank, op, wire_dtype)
                assert_gradients(model, expected, f"{dtype} {wire_dtype} {op}")


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_in_fp32_and_what_travels_is_rounded_once(world):
    run_ranks(wire_and_sum, world)


def gradients_are_views(rank):
    model = weft.DataParallel(mlp())
    seen = []
    model.module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    for step in range(4):
        loss_of(model(batch(step, rank))).backward()
        flat = model.reducer.buckets[0].flat
        start, end = flat.data_ptr(), flat.data_ptr() + flat.numel() * 4
        assert all(start <= parameter.grad.data_ptr() < end for parameter in model.parameters())
        if step == 1:
            model.zero_grad(set_to_none=True)
            assert all(parameter.grad is None for parameter in model.parameters())
        elif step == 2:
            torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
            assert not flat.any()
    assert len(set(seen[1:])) == 1, "autograd took the place in the bucket as it is, with and without a .grad before"


def test_gradients_stay_in_their_buckets():
    run_ranks(gradients_are_views, 2)


def zeroed_after_no_sync(rank, unused):
    """What a backward without synchronisation left, and was zeroed, is no gradient of the next."""
    model = weft.DataParallel(nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2)]), unused_parameters=unused)
    first, second = model.module
    for parameter in model.parameters():
        parameter.data.fill_(1.0)

    def loss(both):
        return (second(first(torch.ones(1, 3))) if both else first(torch.ones(1, 3))).sum() * (rank + 1)

    loss(True).backward()
    model.zero_grad()
    with model.no_sync():
        loss(True).backward()
    model.zero_grad()
    if unused == "zero":
        loss(False).backward()
        assert not any(parameter.grad.any() for parameter in second.parameters())
        assert torch.equal(first.weight.grad, torch.full((2, 3), 1.5))
    else:
        with pytest.raises(RuntimeError, match="1.weight"):
            loss(False).backward()


@pytest.mark.parametrize("unused", ["zero", "error"])
def test_what_was_zeroed_is_no_gradient(unused):
    run_ranks(zeroed_after_no_sync, 2, unused)


def accumulate(rank, average):
    """Two micro-batches without reduction, then one with; then, without zeroing, one more that is reduced."""
    world, op = dist.get_world_size(), "avg" if average else "sum"
    model = weft.DataParallel(mlp(), average=average)
    loss_of(model(batch(0, rank))).backward()  # buckets exist from here on
    model.zero_grad()
    for step in (1, 2):
        with model.no_sync():
            loss_of(model(batch(step, rank))).backward()
    own = rank_order_gradients(mlp().double(), [lambda m: sum(loss_of(Wide(m)(batch(step, rank))) for step in (1, 2))])
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-4, atol=1e-6)
    loss_of(model(batch(3, rank))).backward()

    def all_three(r):
        return lambda one: sum(loss_of(one(batch(step, r))) for step in (1, 2, 3))

    expected = rank_order_gradients(mlp().double(), [lambda m, r=r: all_three(r)(Wide(m)) for r in range(world)], op)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-4, atol=1e-6)
    loss_of(model(batch(4, rank))).backward()
    more = rank_order_gradients(
        mlp().double(), [lambda m, r=r: loss_of(Wide(m)(batch(4, r))) for r in range(world)], op
    )
    for parameter, before, gradient in zip(model.parameters(), expected, more, strict=True):
        torch.testing.assert_close(parameter.grad.double(), before + gradient, rtol=1e-4, atol=1e-6)


def past_the_wrapper(rank):
    """Forwards of the wrapper and of the module inside it, within `no_sync` and after it."""
    model = weft.DataParallel(nn.Linear(1, 1, bias=False))
    model.module.weight.grad = None
    for first, second, outside in itertools.product([model, model.module], [model, model.module], [False, True]):
        model.zero_grad()
        with model.no_sync():
            loss = first(torch.full((1, 1), rank + 1.0)).sum()
            if not outside:
                loss.backward()
                assert model.module.weight.grad == rank + 1
        if outside:
            loss.backward()
            assert model.module.weight.grad == (rank + 1 if first is model else 1.5)
        second(torch.full((1, 1), 2.0 * rank)).sum().backward()
        assert model.module.weight.grad == 2.5, (first is model, second is model, outside)
        model.module(torch.full((1, 1), 4.0 * rank)).sum().backward()
        assert model.module.weight.grad == 4.5


def test_no_sync_ends_with_its_context_whoever_is_called():
    run_ranks(past_the_wrapper, 2)


class Wide:
    """A module of fp64 that takes fp32 inputs."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x.double())


@pytest.mark.parametrize("average", [True, False])
def test_gradients_add_up_over_micro_batches_and_are_counted_once(average):
    run_ranks(accumulate, 3, average)


class Unusual(nn.Module):
    """Mixed types, a weight used twice, frozen ones, buffers, channels last, a scalar, one that is not always used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.convolution = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sometimes = nn.Parameter(torch.ones(8))
        self.logits = nn.Linear(8, 11, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens, use=True, how=None):
        x = self.embedding(tokens).permute(0, 2, 1).unsqueeze(-1).contiguous(memory_format=torch.channels_last)
        x = self.norm(self.convolution(x)).squeeze(-1).permute(0, 2, 1) * self.scale
        run = self._middle if how is None else lambda x: checkpoint(self._middle, x, use_reentrant=how == "reentrant")
        x = run(x)
        if use:
            x = x + self.sometimes
        return {"logits": self.logits(x), "hidden": [x]}

    def _middle(self, x):
        return self.frozen(self.narrow(x.bfloat16()).float()) + x


def tokens_of(step, rank):
    return torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def unusual_loss(output):
    return output["logits"].square().mean() + output["hidden"][0].mean()


def run_unusual(rank, how):
    world = dist.get_world_size()
    model, alone = weft.DataParallel(Unusual(), bucket_mb=1e-3), Unusual()
    for step in range(4):
        model.zero_grad()
        if how == "hooked":
            model.module.narrow.register_full_backward_hook(lambda *_: None)
            model.module.scale.register_hook(lambda gradient: gradient * 1)
        unusual_loss(model(tokens_of(step, rank), how=how if how in ("reentrant", "recompute") else None)).backward()
        trained = [p for p in alone.parameters() if p.requires_grad]
        per_rank = []
        for r in range(world):
            alone.load_state_dict(Unusual().state_dict())
            alone.zero_grad()
            unusual_loss(alone(tokens_of(step, r))).backward()
            per_rank.append([p.grad.clone() for p in trained])
        mine = [p for p in model.parameters() if p.requires_grad]
        for number, parameter in enumerate(mine):
            expected = reference.reduce([gradients[number] for gradients in per_rank], "avg")
            assert torch.equal(parameter.grad, expected), (how, step, number)
            assert parameter.grad.stride() == parameter.stride()
        assert model.module.frozen.weight.grad is None
    kinds = {bucket.flat.dtype for bucket in model.reducer.buckets}
    assert kinds == {torch.float32, torch.bfloat16}
    assert torch.equal(*gathered(model.module.logits.weight.grad)[:2])


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


@pytest.mark.parametrize("how", ["plain", "reentrant", "recompute", "hooked"])
def test_types_shared_frozen_checkpointed_and_hooked_parameters(how):
    run_ranks(run_unusual, 2, how)


def same_curve_as_ddp(rank):
    """Batch statistics from each rank's own batch, buffers from rank 0, as torch's DDP has them."""
    ours, theirs = weft.DataParallel(Unusual()), DistributedDataParallel(Unusual())
    assert list(ours.state_dict()) == list(theirs.state_dict()), "names start with module., as DDP's"
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (ours, theirs)]
    for step in range(6):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            unusual_loss(model(tokens_of(step, rank))).backward()
            optimizer.step()
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        # Two ranks: DDP halves before it adds, which in binary is the same.
        assert torch.equal(mine, other), name
    fresh = weft.DataParallel(Unusual())
    fresh.load_state_dict(theirs.state_dict())
    assert torch.equal(fresh.module.scale, theirs.module.scale)


def test_it_trains_as_ddp_does_to_the_bit():
    run_ranks(same_curve_as_ddp, 2)


def buffers_follow_rank_0(rank):
    model = weft.DataParallel(nn.BatchNorm1d(3))
    model.module.running_mean.fill_(rank)
    model.module.eval()
    with torch.no_grad():
        model(torch.zeros(2, 3))
    assert (model.module.running_mean == rank).all(), "evaluation on one rank must not wait for the others"
    model.module.train()
    model(torch.ones(4, 3) * rank).sum().backward()
    assert torch.allclose(model.module.running_mean, torch.tensor(0.1 * rank)), "rank 0's, and one update of its own"


def test_buffers_are_rank_0s_before_each_forward_in_training():
    run_ranks(buffers_follow_rank_0, 3)


class Scaled(nn.Module):
    """A layer whose graph holds its buffers: one is sent alone, two are one tensor."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(1)), nn.BatchNorm1d(3)
        for name, size in (("small", 1), ("large", 1 << 16)):
            self.register_buffer(name, torch.ones(size))
        self.register_buffer("alias", self.small)

    def forward(self, x):
        return self.norm(x).sum() * 0 + sum((self.weight * y).mean() for y in (self.small, self.large, self.alias))


def forwards_before_a_backward(rank):
    model = weft.DataParallel(Scaled())
    module, total = model.module, 0.0
    for _ in range(3):
        total = total + model(torch.randn(4, 3))
        if rank == 0:  # whose values the others get
            module.small, module.large = module.small + 1, module.large + 1
            module.alias = module.small
    total.backward()
    assert module.weight.grad == 3 * (1 + 2 + 3)
    first = module.small
    with torch.no_grad():
        model(torch.randn(4, 3))
    assert module.small is first is module.alias, "what no graph holds stays where it is"


def test_buffers_that_a_graph_holds_are_not_written_to():
    run_ranks(forwards_before_a_backward, 2)


def start_alike(rank):
    torch.manual_seed(rank)
    model = weft.DataParallel(nn.Linear(300, 300))
    weights = gathered(model.module.weight.detach())
    assert all(torch.equal(weights[0], weight) for weight in weights)


def test_parameters_start_as_rank_0s():
    run_ranks(start_alike, 3)


def wrap_in_inference_mode(rank):
    layers = [nn.Linear(3, 2) for _ in range(3)]
    with torch.inference_mode():
        models = [weft.DataParallel(layers[0]), weft.DataParallel(layers[1], shard_optimizer=True)]
        models.append(weft.DataParallel(layers[2], invariant=2))
        inside = nn.Linear(3, 2)
    for model in models:
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert (model.module.weight.grad.as_subclass(torch.Tensor) == 0.5).all() or model.shards_optimizer
    models[1].optimizer(torch.optim.SGD, lr=0.1).step()
    with pytest.raises(ValueError, match="'weight' was made inside of torch.inference_mode"):
        weft.DataParallel(inside)


def test_a_module_may_be_wrapped_inside_of_inference_mode():
    run_ranks(wrap_in_inference_mode, 2)


def zero_unused(rank, bucket_mb):
    """Each rank uses the parameter in another step, and in the last nobody does."""
    world = dist.get_world_size()
    model = weft.DataParallel(Unusual(), unused_parameters="zero", bucket_mb=bucket_mb)
    for step in range(4):
        model.zero_grad()
        use = rank == step if step < 3 else False
        unusual_loss(model(tokens_of(step, rank), use=use)).backward()
        assert model.module.sometimes.grad is not None
        assert bool(model.module.sometimes.grad.any()) == (step < world and step < 3)
        grads = gathered(model.module.sometimes.grad)
        assert all(torch.equal(grads[0], g) for g in grads)


@pytest.mark.parametrize("bucket_mb", [1e-4, 25])
def test_unused_parameters_count_as_zeros_where_asked(bucket_mb):
    run_ranks(zero_unused, 3, bucket_mb)


def freeze_later(rank):
    world = dist.get_world_size()
    model, alone = weft.DataParallel(mlp()), mlp()
    for step, frozen in enumerate([(), (), (0,), (0,), (4,), ()]):
        for index, layer in ((0, model.module[0]), (4, model.module[4])):
            layer.requires_grad_(index not in frozen)
            alone[index].requires_grad_(index not in frozen)
        model.zero_grad()
        loss_of(model(batch(step, rank))).backward()
        expected = rank_order_gradients(alone, losses(step, world))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert (parameter.grad is None) == (not parameter.requires_grad)
            assert parameter.grad is None or torch.equal(parameter.grad, gradient), step
    started = weft.DataParallel(nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)))
    for unfrozen in (False, True):
        started.module[0].requires_grad_(unfrozen)
        started(torch.ones(1, 3) + rank).sum().backward()
    assert torch.equal(*gathered(started.module[0].weight.grad)[:2])


def test_parameters_may_be_frozen_and_unfrozen_between_steps():
    run_ranks(freeze_later, 2)


def compiled(rank):
    world = dist.get_world_size()
    model = weft.DataParallel(torch.compile(mlp(), backend="aot_eager"))
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch(step, rank))).backward()
        plain = rank_order_gradients(mlp(), losses(step, world))
        for parameter, gradient in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_the_module_inside_may_be_compiled():
    run_ranks(compiled, 2)


def under_tensor_parallelism(rank):
    """The norm counts each shard once and each whole parameter once."""
    mesh = weft.init_mesh(dp=2, tp=2, device_type="cpu")
    whole = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12), nn.LayerNorm(12)).double()
    torch.manual_seed(0)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    split = weft.parallelize(copy.deepcopy(whole), mesh["tp"], plan={"0": "column", "2": "row"})
    model = weft.DataParallel(split, group=mesh["dp"])
    inputs = [torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(2):
        model.zero_grad()
        model(inputs[mesh["dp"].get_local_rank()]).square().mean().backward()
    expected = rank_order_gradients(whole, [lambda one, x=x: one(x).square().mean() for x in inputs])
    norm = torch.stack([gradient.square().sum() for gradient in expected]).sum().sqrt()
    torch.testing.assert_close(model.grad_norm, norm)
    assert {bucket.shard_ranks is None for bucket in model.reducer.buckets} == {True, False}
    before = model.clip_grad_norm_(float(norm) / 3)
    torch.testing.assert_close(before, norm)
    torch.testing.assert_close(model.module[3].weight.grad, expected[4] / 3, rtol=1e-5, atol=0)


def test_the_norm_counts_shards_and_replicas_once():
    run_ranks(under_tensor_parallelism, 4)


def main_grad(rank):
    """bf16 parameters whose gradients add up in fp32, some of them straight from the product."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    alone = weft.init_mesh(dp=world, tp=1, device_type="cpu")["tp"]
    layers = nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.Linear(37, 5)).bfloat16()
    reference_model = copy.deepcopy(layers)
    layers[0] = weft.ParallelLinear.from_linear(layers[0], style="column", group=alone)
    model = weft.DataParallel(layers, main_grad=True)
    for round_ in range(2):
        model.zero_grad()
        for step in range(3):
            with model.no_sync() if step < 2 else torch.enable_grad():
                loss_of(model(batch(step + round_, rank).bfloat16())).backward()
        for number, parameter in enumerate(model.parameters()):
            assert parameter.grad is None and parameter.main_grad.dtype == torch.float32
            total = torch.zeros_like(parameter.main_grad)
            for r in range(world):
                for step in range(3):
                    reference_model.zero_grad()
                    loss_of(reference_model(batch(step + round_, r).bfloat16())).backward()
                    total += list(reference_model.parameters())[number].grad.float() / world
            scale = total.abs().max()
            assert (parameter.main_grad - total).abs().max() <= 2**-7 * scale
            assert all(torch.equal(parameter.main_grad, part) for part in gathered(parameter.main_grad))


def test_bf16_gradients_add_up_in_fp32_main_grads():
    run_ranks(main_grad, 2)


def other_group(rank, backend):
    """Without symmetric memory: the same result, in that backend's own order of summation."""
    model = weft.DataParallel(mlp(), group=dist.new_group(backend=backend), wire_dtype=torch.bfloat16, bucket_mb=1e-3)
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch(step, rank))).backward()
        expected = rank_order_gradients(mlp(), losses(step, 2), wire_dtype=torch.bfloat16)
        assert_gradients(model, expected)
        norm = torch.stack([gradient.double().square().sum() for gradient in expected]).sum().sqrt()
        torch.testing.assert_close(model.grad_norm, norm)


def test_it_runs_over_another_backend():
    run_ranks(other_group, 2, "gloo")


def test_it_runs_over_several_machines():
    run_ranks(spans, 3, before=on_machines("aab"))


def spans(rank):
    model = weft.DataParallel(mlp(), bucket_mb=1e-3)
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch(step, rank))).backward()
    expected = rank_order_gradients(mlp(), losses(2, 3))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        assert all(torch.equal(parameter.grad, part) for part in gathered(parameter.grad))


def outlives(rank):
    """The module without its wrapper is an ordinary one, and may be wrapped again."""
    module = mlp()
    model = weft.DataParallel(module)
    loss_of(model(batch(0, rank))).backward()
    del model
    gc.collect()
    module.zero_grad()
    loss_of(module(batch(0, rank))).backward()
    assert_gradients(module, rank_order_gradients(mlp(), [losses(0, 2)[rank]], "sum"))
    again = weft.DataParallel(module)
    again.zero_grad()
    loss_of(again(batch(1, rank))).backward()
    assert_gradients(module, rank_order_gradients(mlp(), losses(1, 2)))


def units_end(rank):
    module = nn.Linear(2, 1)
    model = weft.DataParallel(module, invariant=2)
    model(torch.ones(1, 2)).sum().backward()
    del model
    gc.collect()
    module.zero_grad()
    module(torch.ones(1, 2) * rank).sum().backward()
    assert (module.weight.grad == rank).all()


def main_grads_end(rank):
    """Or the layer would go on to add gradients to what nobody reads."""
    mesh = weft.init_mesh(dp=2, device_type="cpu")
    layer = weft.ParallelLinear(5, 3, style="column", group=mesh["tp"])
    model = weft.DataParallel(layer, group=mesh["dp"], main_grad=True)
    model(torch.ones(2, 5)).sum().backward()
    del model
    gc.collect()
    layer(torch.ones(2, 5)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 5), 2.0))


def test_a_module_outlives_its_wrapper():
    run_ranks(outlives, 2)
    run_ranks(main_grads_end, 2)
    run_ranks(units_end, 2)


def test_the_plan_of_many_small_parameters_looks_at_each_once(monkeypatch):
    slots = [Slot(number, str(number), nn.Parameter(torch.ones(3))) for number in range(100)]
    looked = []
    monkeypatch.setattr(buckets, "padded_bytes", lambda slot: looked.append(slot) or 64)
    assert [len(members) for members in buckets.group_slots(slots, 640)] == [10] * 10
    assert looked == slots
