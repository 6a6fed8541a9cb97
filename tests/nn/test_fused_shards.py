"""Shards of several pieces and shared ones: fused projections, KV heads that several ranks have, GPT-2's Conv1D."""

import copy
import re

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("transformers")
from layer_gradients import gradients_of
from transformers.pytorch_utils import Conv1D

import weft
from weft.sharding.sizes import Heads, cut_over
from weft.testing.ranks import run_ranks


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_a_cut_holds_the_whole_and_each_rank_the_kv_heads_of_its_queries(kv_heads, each, unit, world, fused):
    heads = kv_heads * each
    if heads < world:
        with pytest.raises(ValueError, match=f"at most {heads} ranks"):
            Heads.held(heads, kv_heads, world)
        return
    held = Heads.held(heads, kv_heads, world)
    of_queries = [range(first, first + count) for first, count in held.queries]
    assert [head for of_rank in of_queries for head in of_rank] == list(range(heads))
    for queries, keys in zip(of_queries, held.keys, strict=True):
        repeated = [key for key in keys for _ in range(len(queries) // len(keys))]
        assert repeated == [head // each for head in queries], "as attention repeats KV heads"
        assert len(set(keys)) == len(keys)
    sizes = (heads * unit, kv_heads * unit, kv_heads * unit) if fused else (kv_heads * unit,)
    cut = cut_over(sum(sizes), world, unit=unit, parts=sizes, heads=(heads, kv_heads))
    elements = [[i for start, stop in of_rank for i in range(start, stop)] for of_rank in cut.stretches]
    assert set().union(*elements) == set(range(sum(sizes))) and list(map(len, elements)) == list(cut.sizes)
    assert [i for start, stop in cut.owner for i in range(start, stop)] == list(range(sum(sizes))), "each counts once"
    assert cut.replicated == (sum(cut.sizes) > sum(sizes))
    for rank in range(world):
        for other in range(world):
            mine, theirs = (
                [elements[r][i] for a, b in cut.common(r, o) for i in range(a, b)]
                for r, o in ((rank, other), (other, rank))
            )
            assert mine == theirs == sorted(set(elements[rank]) & set(elements[other]))


FUSED = [
    (dict(parts=(9, 3, 12)), 24),
    (dict(parts=(8, 8, 8), unit=2), 24),
    (dict(parts=(12, 8), unit=(3, 2)), 20),
    (dict(parts=(16, 4, 4), unit=2, heads=(8, 2)), 24),
    (dict(parts=(15, 3, 3), unit=3, heads=(5, 1)), 21),
    (dict(unit=2, heads=(8, 2)), 4),
    (dict(unit=2, heads=(8, 2)), 16),
]


def conv1d(outputs, inputs):
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer.double()


def check_column(rank):
    close = torch.testing.assert_close
    for kind in (lambda n, k: nn.Linear(k, n).double(), conv1d):
        for options, outputs in FUSED if dist.get_world_size() < 5 else FUSED[3:]:  # the others have fewer units
            torch.manual_seed(outputs)
            model = nn.Sequential()
            model.layer = kind(outputs, 7)
            whole = copy.deepcopy(model.layer)
            entry = {"style": "column", "gather_output": True, **options}
            layer = weft.parallelize(model, plan={"layer": entry}).layer
            shard = weft.shard_of(layer.weight)
            assert torch.equal(layer.weight, shard.take(whole.weight)) and torch.equal(
                shard.gather(layer.weight.detach()), whole.weight
            )
            x, dy = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(2, 3, outputs, dtype=torch.float64)
            found, expected = gradients_of(layer, x, dy), gradients_of(whole, x, dy)
            close(found[0], expected[0]), close(found[1], expected[1])
            for name, gradient in found[2].items():
                close(gradient, weft.shard_of(layer.get_parameter(name)).take(expected[2][name]))
            layer.load_state_dict(whole.state_dict())
            assert torch.equal(layer.bias, weft.shard_of(layer.bias).take(whole.bias))
            layer.weight.main_grad = torch.ones(layer.weight.shape)  # the gradient is added to what is there
            layer(x).backward(dy)
            close(layer.weight.main_grad, 1 + found[2]["weight"].float())
            with pytest.raises(TypeError, match="main_grad is torch.float64"):
                layer.weight.main_grad = layer.weight.main_grad.double()
                layer(x).backward(dy)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_fused_projections_are_the_unsplit_ones_in_the_models_own_order(world):
    run_ranks(check_column, world)


def check_rows(rank):
    """A row layer over the same pieces as the column layer before it, and over query heads."""
    for kind in (lambda n, k: nn.Linear(k, n).double(), conv1d):
        for options, width in ((dict(parts=(9, 3, 12)), 24), (dict(unit=2, heads=(8, 2)), 16)):
            torch.manual_seed(width)
            whole = nn.Sequential(kind(width, 7), nn.GELU(), kind(5, width))
            model = copy.deepcopy(whole)
            weft.parallelize(model, plan={"0": {"style": "column", **options}, "2": {"style": "row", **options}})
            alone = nn.Sequential(whole[2])
            alone = weft.parallelize(copy.deepcopy(alone), plan={"0": {"style": "row", "split_input": True, **options}})
            x, dy = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
            inner = torch.randn(4, width, dtype=torch.float64)
            for layer, plain, inputs in ((model, whole, x), (alone, nn.Sequential(whole[2]), inner)):
                found, expected = gradients_of(layer, inputs, dy), gradients_of(plain, inputs, dy)
                torch.testing.assert_close(found[0], expected[0])
                torch.testing.assert_close(found[1], expected[1])
                for name, gradient in found[2].items():
                    shard = weft.shard_of(layer.get_parameter(name))
                    torch.testing.assert_close(gradient, shard.take(expected[2][name]) if shard else expected[2][name])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_row_layer_takes_the_pieces_that_a_column_layer_gives(world):
    run_ranks(check_rows, world)


class Attention(nn.Module):
    """Grouped queries, as models write it: heads are however many the projections give."""

    def __init__(self, heads, kv_heads, size, fused):
        super().__init__()
        self.size, self.fused, self.width = size, fused, (heads * size, kv_heads * size, kv_heads * size)
        self.norm = nn.LayerNorm(10)
        if fused:
            self.qkv = Conv1D(sum(self.width), 10)
        else:
            self.query, self.key, self.value = (nn.Linear(10, width) for width in self.width)
        self.output = nn.Linear(self.width[0], 10)

    def forward(self, x):
        y = self.norm(x)
        whole = self.qkv(y) if self.fused else None
        q, k, v = (
            whole.split(getattr(self.qkv, "parts_here", self.width), -1)
            if self.fused
            else (f(y) for f in (self.query, self.key, self.value))
        )
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.output(y.transpose(1, 2).flatten(-2))


HEADS, KV_HEADS, SIZE = 8, 2, 3
GROUPED = {"unit": SIZE, "heads": (HEADS, KV_HEADS)}
PLAN = {
    "0.query": {"style": "column", **GROUPED},
    "0.key": {"style": "column", **GROUPED},
    "0.value": {"style": "column", **GROUPED},
    "1.qkv": {"style": "column", "parts": (24, 6, 6), **GROUPED},
    "*.output": {"style": "row", **GROUPED},
}


def net(group=None, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(Attention(HEADS, KV_HEADS, SIZE, False), Attention(HEADS, KV_HEADS, SIZE, True)).double()
    return model if group is None else weft.parallelize(model, group, plan=PLAN)


def loss_of(model, step, rows=slice(None)):
    x = torch.randn(4, 6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return model(x[rows]).square().mean()


def step_alone(model, optimizer, steps):
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    return norms


def step_wrapped(model, optimizer, steps, rows):
    norms = []
    for step in steps:
        model.zero_grad(set_to_none=True)
        loss_of(model, step, rows).backward()
        norms.append(model.clip_grad_norm_(0.05).clone())
        optimizer.step()
    return norms


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def check_training(rank, dp, sharded, path):
    """Trained, stored, loaded as the plain model and over other ranks; the norm counts shared heads once."""
    mesh = weft.init_mesh(dp=dp, tp=dist.get_world_size() // dp, device_type="cpu")
    inner = net(mesh["tp"])
    model = weft.DataParallel(inner, group=mesh["dp"], shard_optimizer=sharded)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01) if sharded else adamw(model.parameters())
    share = 4 // dp
    rows = slice(share * mesh["dp"].get_local_rank(), share * (mesh["dp"].get_local_rank() + 1))
    whole = net()
    plain = adamw(whole.parameters())
    expected = step_alone(whole, plain, range(3))
    found = step_wrapped(model, optimizer, range(3), rows)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-6, atol=0)
    for name, parameter in inner.named_parameters():
        shard, value = weft.shard_of(parameter), whole.get_parameter(name)
        torch.testing.assert_close(parameter, shard.take(value) if shard else value, rtol=1e-6, atol=1e-9, msg=name)
    weft.save_checkpoint(model, optimizer, path, step=3)
    alone = net(seed=1)
    its = adamw(alone.parameters())
    weft.load_checkpoint(alone, its, path)  # every rank the whole, bit for bit the same
    for name, parameter in inner.named_parameters():
        shard, value = weft.shard_of(parameter), alone.get_parameter(name)
        assert torch.equal(parameter, shard.take(value) if shard else value), name
    step_alone(alone, its, range(3, 5))
    other = net(weft.init_mesh(dp=1, tp=dist.get_world_size(), device_type="cpu")["tp"], seed=2)
    again = adamw(other.parameters())
    weft.load_checkpoint(other, again, path)
    step_wrapped(
        weft.DataParallel(other, group=dist.new_group([rank], use_local_synchronization=True)),
        again,
        range(3, 5),
        slice(None),
    )
    for name, parameter in other.named_parameters():
        shard, value = weft.shard_of(parameter), alone.get_parameter(name)
        torch.testing.assert_close(parameter, shard.take(value) if shard else value, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(("world", "dp", "sharded"), [(2, 1, False), (3, 1, False), (6, 2, True)])
def test_shared_kv_heads_train_and_are_stored_as_one(world, dp, sharded, tmp_path):
    run_ranks(check_training, world, dp, sharded, tmp_path / "saved")


def check_layerwise(rank):
    model, whole = net(dist.group.WORLD), net()
    for one in (model, whole):
        optimizer = weft.LAMB(weft.layerwise_groups(one, 0.1), lr=0.03)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        shard, value = weft.shard_of(parameter), whole.get_parameter(name)
        torch.testing.assert_close(parameter, shard.take(value) if shard else value, rtol=1e-6, atol=1e-9, msg=name)


def check_layerwise_pieces(rank):
    """Pieces of shards with shared heads: dp=2 of tp=3."""
    mesh = weft.init_mesh(dp=2, tp=3, device_type="cpu")
    model, whole = net(mesh["tp"]), net()
    wrapped = weft.DataParallel(model, group=mesh["dp"], shard_optimizer=True)
    optimizer = wrapped.optimizer(weft.LAMB, weft.layerwise_groups(wrapped, 0.1), lr=0.03)
    its = weft.LAMB(weft.layerwise_groups(whole, 0.1), lr=0.03)
    step_alone(whole, its, range(2))
    half = slice(0, 2) if mesh["dp"].get_local_rank() == 0 else slice(2, 4)
    step_wrapped(wrapped, optimizer, range(2), half)
    for name, parameter in model.named_parameters():
        shard, value = weft.shard_of(parameter), whole.get_parameter(name)
        torch.testing.assert_close(parameter, shard.take(value) if shard else value, rtol=1e-6, atol=1e-9, msg=name)


def check_region(rank):
    """The same in a sequence-parallel region, and what weft.verify says of it outside of one."""
    torch.manual_seed(0)
    region = {"sequence_parallel": True, "sequence_dim": 1}
    plan = {name: {**entry, **region} for name, entry in PLAN.items()} | {"*.norm": "sequence"}
    model, whole = weft.parallelize(net(), plan=plan), net()
    x = torch.randn(2, 7, 10, dtype=torch.float64)
    dy = torch.randn(2, 7, 10, dtype=torch.float64)
    sizes = weft.split_sizes(7, dist.get_world_size())
    y, dx, gradients = gradients_of(model, x.split(sizes, 1)[rank], dy.split(sizes, 1)[rank])
    expected = gradients_of(whole, x, dy)
    torch.testing.assert_close(y, expected[0].split(sizes, 1)[rank])
    torch.testing.assert_close(dx, expected[1].split(sizes, 1)[rank])
    for name, gradient in gradients.items():
        shard = weft.shard_of(model.get_parameter(name))
        torch.testing.assert_close(gradient, shard.take(expected[2][name]) if shard else expected[2][name], msg=name)
    report = weft.verify(net(dist.group.WORLD).float(), net().float(), x.float(), probes=[weft.causal_probe(4)])
    assert report.ok, str(report)


@pytest.mark.parametrize("world", [2, 3])
def test_shared_heads_in_a_sequence_parallel_region_and_verified(world):
    run_ranks(check_region, world)


def test_norms_of_whole_parameters_count_shared_heads_once():
    run_ranks(check_layerwise, 3)
    run_ranks(check_layerwise_pieces, 6)


def check_bits(rank):
    """In bf16 ranks that share a KV head have the same bits of its gradient, those of a sum in fp32 in rank order."""
    from weft.ops.sharded_param import sum_over_holders

    layer = weft.ParallelLinear(8, 6, style="column", unit=3, heads=(4, 2), dtype=torch.bfloat16)
    shard = weft.shard_of(layer.weight)
    torch.manual_seed(rank)
    own = torch.randn(layer.weight.shape, dtype=torch.bfloat16)
    every = dist.get_world_size() * [None]
    dist.all_gather_object(every, own)
    total = torch.zeros(shard.global_shape)
    for of_rank, stretches in zip(every, shard.cut.stretches, strict=True):
        for (start, stop), part in zip(stretches, of_rank.split([b - a for a, b in stretches]), strict=True):
            total[start:stop] += part
    assert torch.equal(sum_over_holders(own, shard), shard.take(total.bfloat16()))


def test_gradients_of_a_shared_head_are_summed_in_rank_order_and_rounded_once():
    run_ranks(check_bits, 3)


def check_refusals(rank):
    column = dict(style="column")
    calls = dist.group.WORLD.engine.group.calls
    for message, call in (
        (r"parts=\(4, 4\) must be sizes that add up to 9", lambda: weft.ParallelLinear(4, 9, parts=(4, 4), **column)),
        (
            r"unit=\(2, 3, 4\) must be one number, or one for each of the 2 parts",
            lambda: weft.ParallelLinear(4, 9, parts=(4, 5), unit=(2, 3, 4), **column),
        ),
        ("2 elements cannot be split over 3 ranks", lambda: weft.ParallelLinear(4, 9, parts=(7, 2), **column)),
        (
            "10 elements are neither 8 query heads nor 2 KV heads of 2",
            lambda: weft.ParallelLinear(4, 10, unit=2, heads=(8, 2), **column),
        ),
        (
            "8 query heads are not a whole number for each of 3 KV heads",
            lambda: weft.ParallelLinear(4, 16, unit=2, heads=(8, 3), **column),
        ),
        ("2 elements cannot be split over 3 ranks", lambda: weft.ParallelLinear(4, 4, unit=2, heads=(2, 1), **column)),
        (
            "features are KV heads, which are fewer than the ranks",
            lambda: weft.ParallelLinear(4, 5, unit=2, heads=(8, 2), style="row"),
        ),
    ):
        with pytest.raises(ValueError, match=re.compile(message)):
            call()
    assert dist.group.WORLD.engine.group.calls == calls


def test_parts_and_heads_that_do_not_fit_are_refused():
    run_ranks(check_refusals, 3)
