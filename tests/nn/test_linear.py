"""ParallelLinear against the unsharded nn.Linear: output and every gradient, any size, any world, any type."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layer_gradients import gradients_of
from torch import nn

import weft
from weft.testing import reference
from weft.testing.cases import SMALL_MLPS
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import assert_close, plain_dtype

WORLDS = [1, 2, 3, pytest.param(4, marks=pytest.mark.slow("pytorch_ext/nn"))]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ACTIVATIONS = [None, "gelu", "gelu_tanh", "relu", "silu"]


class Reference(nn.Module):
    def __init__(self, whole, activation):
        super().__init__()
        self.weight, self.bias, self.activation = whole.weight, whole.bias, activation

    def forward(self, x):
        return reference.linear(x, self.weight, self.bias, self.activation)


def check_layer(rank, style, dtype, sequence_parallel, bias, activation):
    world = dist.get_world_size()
    dist.group.WORLD.engine.group.inject_faults(seed=rank + 1, longest_delay_us=100)
    for case in SMALL_MLPS:
        torch.manual_seed(case.hidden)
        whole = Reference(nn.Linear(case.hidden, case.intermediate, bias, dtype=dtype), activation)
        batch = 2
        x = torch.randn(batch, case.tokens, case.hidden, dtype=dtype)
        dy = torch.randn(batch, case.tokens, case.intermediate, dtype=dtype)
        coarse = plain_dtype(dtype)
        plain = gradients_of(copy.deepcopy(whole).to(coarse), x.to(coarse), dy.to(coarse))
        exact = gradients_of(copy.deepcopy(whole).double(), x.double(), dy.double())

        torch.manual_seed(case.hidden)
        layer = weft.ParallelLinear(
            case.hidden,
            case.intermediate,
            bias,
            style=style,
            sequence_parallel=sequence_parallel,
            sequence_dim=1,
            activation=activation,
            dtype=dtype,
        )
        weight = weft.shard_of(layer.weight)
        assert torch.equal(layer.weight, weight.take(whole.weight)), "a seed gives the slice of what it gives nn.Linear"
        sequence = weft.split_sizes(case.tokens, world)

        def sequence_part(t, sizes=sequence):
            return t.split(sizes, 1)[rank] if sequence_parallel else t

        def feature_part(t, shard=weight):
            return t.split(list(shard.sizes), -1)[rank]

        take_x, take_y = (sequence_part, feature_part) if style == "column" else (feature_part, sequence_part)
        y, dx, gradients = gradients_of(layer, take_x(x), take_y(dy).contiguous())
        message = f"{style} {case} W={world}"
        assert_close(y, take_y(plain[0]), take_y(exact[0]), f"{message} y")
        assert_close(dx, take_x(plain[1]), take_x(exact[1]), f"{message} dx")
        for name, gradient in gradients.items():
            shard = layer.shards.get(name)
            take = shard.take if shard else (lambda t: t)
            assert_close(gradient, take(plain[2][name]), take(exact[2][name]), f"{message} d{name}")
        if world == 1:
            unsharded = gradients_of(whole, x, dy)
            assert torch.equal(y, unsharded[0]) and torch.equal(dx, unsharded[1])
        assert y.dtype == dx.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize("world", WORLDS)
def test_output_and_gradients_are_the_unsharded_layers(world, style, sequence_parallel, dtype):
    run_ranks(check_layer, world, style, dtype, sequence_parallel, True, None)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("style", ["column", "row"])
def test_activations_are_part_of_the_layer(style, activation):
    run_ranks(check_layer, 3, style, torch.float32, style == "row", False, activation)


def check_bits(rank):
    world = dist.get_world_size()
    for dtype in DTYPES:
        torch.manual_seed(1)
        whole = nn.Linear(7, 9, dtype=dtype)
        x = torch.randn(5, 7, dtype=dtype)
        column = weft.ParallelLinear.from_linear(whole, style="column")
        assert torch.equal(column(x), F.linear(x, column.weight, column.bias))
        row = weft.ParallelLinear.from_linear(whole, style="row", split_input=True)
        sizes = weft.split_sizes(7, world)
        shards = zip(x.split(sizes, -1), whole.weight.split(sizes, -1), strict=True)
        partial = [F.linear(x_r.contiguous(), w_r.contiguous()) for x_r, w_r in shards]
        expected = reference.reduce(partial) + whole.bias if world > 1 else whole(x)
        assert torch.equal(row(x), expected), "the sum is in rank order, and the bias is added once, after it"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bits_where_no_reduction_crosses_ranks_and_in_rank_order_where_one_does(world):
    run_ranks(check_bits, world)


def check_replicated_gradients(rank, sequence_parallel):
    torch.manual_seed(0)
    layer = weft.RowParallelLinear(6, 5, sequence_parallel=sequence_parallel, sequence_dim=0)
    sizes = weft.split_sizes(6, dist.get_world_size())
    y = layer(torch.randn(7, 6).split(sizes, -1)[rank])
    dy = torch.randn(7, 5)
    y.backward(dy.split(weft.split_sizes(7, dist.get_world_size()))[rank] if sequence_parallel else dy)
    gathered = [torch.empty(5) for _ in sizes]
    dist.all_gather(gathered, layer.bias.grad)
    return all(torch.equal(other, layer.bias.grad) for other in gathered)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_shared_parameters_get_the_same_gradient_on_each_rank(sequence_parallel):
    assert all(run_ranks(check_replicated_gradients, 3, sequence_parallel))


def check_whole_in_whole_out(rank):
    torch.manual_seed(0)
    whole = nn.Linear(7, 11).double()
    x, dy = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 11, dtype=torch.float64)
    expected = gradients_of(whole, x, dy)
    for layer in (
        weft.ParallelLinear.from_linear(whole, style="column", gather_output=True),
        weft.ParallelLinear.from_linear(whole, style="row", split_input=True),
    ):
        y, dx, gradients = gradients_of(layer, x, dy)
        torch.testing.assert_close(y, expected[0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dx, expected[1], rtol=1e-12, atol=1e-13)
        weight = weft.shard_of(layer.weight).take(expected[2]["weight"])
        torch.testing.assert_close(gradients["weight"], weight, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("world", [2, 3])
def test_gathered_output_and_split_input_stand_where_nn_linear_stood(world, backend):
    run_ranks(check_whole_in_whole_out, world, backend=backend)


def check_in_place(rank):
    for style in ("column", "row"):
        plain = nn.Linear(6, 8)
        layer = weft.ParallelLinear.from_linear(plain, style=style)
        x = torch.randn(2, 3, 6).split(weft.split_sizes(6, 2), -1)[rank] if style == "row" else torch.randn(2, 3, 6)
        first, second = layer(x).relu_(), layer(x).relu()
        first.sum().backward()
        gradients = [parameter.grad.clone() for parameter in layer.parameters()]
        layer.zero_grad()
        second.sum().backward()
        assert torch.equal(first, second)
        assert all(map(torch.equal, gradients, (parameter.grad for parameter in layer.parameters())))


def test_outputs_may_be_written_to():
    run_ranks(check_in_place, 2)


def check_strided_gradients(rank):
    """The gradient of a sum has stride 0, and a transposed input no contiguous row."""
    torch.manual_seed(0)
    whole = nn.Linear(4, 6).double()
    sizes = weft.split_sizes(5, 2)
    x = torch.randn(4, 5, dtype=torch.float64).t()
    row = weft.RowParallelLinear.from_linear(whole, split_input=True, sequence_parallel=True, sequence_dim=0)
    row(x).sum().backward()
    column = weft.ColumnParallelLinear.from_linear(whole, sequence_parallel=True, sequence_dim=0)
    column(x.split(sizes)[rank]).sum().backward()
    whole(x).sum().backward()
    for layer in (row, column):
        torch.testing.assert_close(layer.weight.grad, weft.shard_of(layer.weight).take(whole.weight.grad))


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_strided_inputs_and_gradients(backend):
    run_ranks(check_strided_gradients, 2, backend=backend)


def check_other_backend(rank):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 5)).double()
    x = torch.randn(6, 3, 7, dtype=torch.float64)
    dy = torch.randn(6, 3, 5, dtype=torch.float64)
    sizes = weft.split_sizes(6, dist.get_world_size())
    parallel = nn.Sequential(
        weft.ColumnParallelLinear.from_linear(whole[0], activation="gelu", sequence_parallel=True, sequence_dim=0),
        weft.RowParallelLinear.from_linear(whole[2], sequence_parallel=True, sequence_dim=0),
    )
    expected = gradients_of(whole, x, dy)
    y, dx, gradients = gradients_of(parallel, x.split(sizes)[rank], dy.split(sizes)[rank])
    torch.testing.assert_close(y, expected[0].split(sizes)[rank], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dx, expected[1].split(sizes)[rank], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradients["1.bias"], expected[2]["2.bias"], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("world", [1, 4])
def test_the_layers_run_on_any_backend(world, backend):
    run_ranks(check_other_backend, world, backend=backend)


def check_heads(rank):
    layer = weft.ParallelLinear(8, 40, style="column", unit=8)
    assert weft.shard_of(layer.weight).sizes == (16, 16, 8)
    assert weft.shard_of(layer.bias).sizes == (16, 16, 8)
    assert weft.shard_of(layer.weight).offset == 16 * rank
    assert weft.shard_of(layer.weight).global_shape == (40, 8)


def test_a_unit_keeps_heads_whole():
    run_ranks(check_heads, 3)


def check_parametrizations(rank):
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(5, 4))
    with pytest.raises(ValueError, match="would lose its parametrizations"):
        weft.ParallelLinear.from_linear(normed, style="row")


def test_a_parametrization_is_never_dropped():
    run_ranks(check_parametrizations, 2)


def check_second_derivatives(rank):
    x = torch.randn(3, 5, requires_grad=True)
    for style, layer_of in (("column", {"gather_output": True}), ("row", {"split_input": True})):
        layer = weft.ParallelLinear(5, 4, style=style, **layer_of)
        with pytest.raises(RuntimeError, match="create_graph=True is for second derivatives"):
            torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)


def test_second_derivatives_are_refused_and_not_zeros():
    run_ranks(check_second_derivatives, 2)


def check_autocast(rank):
    torch.manual_seed(0)
    layer = weft.ParallelLinear(8, 6, style="row", split_input=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(4, 8))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    double = weft.ParallelLinear(8, 6, style="column", dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert double(torch.randn(4, 8, dtype=torch.float64)).dtype == torch.float64
        with pytest.raises(TypeError, match="the input is torch.int64"):
            layer(torch.ones(4, 8, dtype=torch.int64))


def test_autocast_casts_as_it_does_for_nn_linear():
    run_ranks(check_autocast, 2)


def check_copies(rank):
    layer = weft.ParallelLinear(4, 6, style="column")
    twin = copy.deepcopy(layer)
    assert weft.shard_of(twin.weight) == weft.shard_of(layer.weight)
    assert torch.equal(twin(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    with pytest.raises(TypeError, match="save its state_dict instead"):
        import pickle

        pickle.dumps(layer)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    assert torch.equal(layer.weight, weft.shard_of(layer.weight).take(nn.Linear(4, 6).weight))
    for parameter in layer.parameters():
        assert parameter.requires_grad
    frozen = nn.Linear(4, 6)
    frozen.weight.requires_grad_(False)
    assert not weft.ParallelLinear.from_linear(frozen, style="row").weight.requires_grad


def test_copies_resets_and_frozen_weights():
    run_ranks(check_copies, 2)


def check_state_dict(rank):
    torch.manual_seed(0)
    whole = nn.Linear(5, 7)
    layer = weft.ParallelLinear(5, 7, style="column")
    layer.load_state_dict(whole.state_dict())
    assert torch.equal(layer.weight, weft.shard_of(layer.weight).take(whole.weight))
    twin = weft.ParallelLinear(5, 7, style="column")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.bias, layer.bias)
    for wrong, message in (
        ({"weight": torch.ones(2, 5), "bias": layer.bias}, r"weight has shape \(2, 5\); expected .*whole \(7, 5\)"),
        ({"weight": layer.weight}, 'Missing key.*"bias"'),
        ({**layer.state_dict(), "gain": torch.ones(1)}, 'Unexpected key.*"gain"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            twin.load_state_dict(wrong)
    assert torch.equal(twin.weight, layer.weight)


def test_a_state_dict_may_hold_shards_or_whole_weights_and_nothing_else():
    run_ranks(check_state_dict, 2)


def check_refusals(rank):
    outside = dist.new_group([0])
    one, small = dict(style="column"), 2
    refused = [
        (
            ValueError,
            "style='diagonal' is not one of 'column', 'row'",
            lambda: weft.ParallelLinear(4, 4, style="diagonal"),
        ),
        (ValueError, "activation='swish' is not one of", lambda: weft.ParallelLinear(4, 4, activation="swish", **one)),
        (
            ValueError,
            "gather_output=True needs",
            lambda: weft.ParallelLinear(4, 4, style="row", gather_output=True),
        ),
        (ValueError, "split_input=True needs", lambda: weft.ParallelLinear(4, 4, split_input=True, **one)),
        (
            TypeError,
            "dtype=torch.int8 is not floating point",
            lambda: weft.ParallelLinear(4, 4, dtype=torch.int8, **one),
        ),
        (
            ValueError,
            r'out_features=2: 2 elements cannot be split over 3 ranks.*at most 2 ranks.*style="row"',
            lambda: weft.ParallelLinear(4, small, **one),
        ),
        (ValueError, "in_features=2: 2 elements cannot be split", lambda: weft.RowParallelLinear(small, 4)),
        (TypeError, "group must be a ProcessGroup", lambda: weft.ParallelLinear(4, 4, group="tp", **one)),
        (
            TypeError,
            "from_linear takes an nn.Linear, got Conv1d",
            lambda: weft.RowParallelLinear.from_linear(nn.Conv1d(1, 1, 1)),
        ),
        (ValueError, "RowParallelLinear has style 'row'", lambda: weft.RowParallelLinear(4, 4, style="column")),
    ]
    if rank > 0:
        refused.append((ValueError, "not in the group", lambda: weft.ParallelLinear(4, 4, group=outside, **one)))
    layer = weft.ParallelLinear(6, 6, sequence_parallel=True, **one)
    refused += [
        (ValueError, r"shape \(2, 5\); its last dimension must be 6", lambda: layer(torch.ones(2, 5))),
        (TypeError, "input is torch.float64 .* the weight torch.float32", lambda: layer(torch.ones(2, 6).double())),
    ]
    calls = dist.group.WORLD.engine.group.calls
    for error, message, call in refused:
        with pytest.raises(error, match=re.compile(message, re.DOTALL)):
            call()
    assert dist.group.WORLD.engine.group.calls == calls, "nothing was communicated"


def test_bad_input_is_refused_before_anything_is_communicated():
    run_ranks(check_refusals, 3)


def test_no_process_group_is_said():
    with pytest.raises(ValueError, match="call weft.init_mesh"):
        weft.ParallelLinear(4, 4, style="column")
