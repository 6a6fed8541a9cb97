"""Layers of experts by the grouped kernels, with all gradients, against the loop over the experts."""

import copy

import pytest
import torch

import weft
from weft.kernels.language import INTERPRETED
from weft.nn import Experts, ParallelExperts
from weft.ops import grouped_matmul, kernel_choice
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import assert_close

pytestmark = pytest.mark.kernel

EXPERTS, HIDDEN, WIDE = 4, 17, 9
LOADS = {"random": None, "one expert": [2, 2], "two": [3, 0]}


def drawn(device, load, dtype):
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(2, 9, HIDDEN, generator=generator).to(device, dtype) for _ in range(2))
    weights, index = torch.rand(2, 9, EXPERTS, generator=generator).to(device, dtype).topk(2, -1)
    if LOADS[load] is not None:
        index = torch.tensor(LOADS[load], device=device).expand(index.shape)
    return x, index, weights, dy


def results(layer, x, index, weights, dy):
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x, index, weights)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "w": weights.grad} | {n: p.grad for n, p in layer.named_parameters()}


@pytest.mark.parametrize(
    ("load", "gated", "bias", "activation", "dtype"),
    [
        ("random", True, True, "silu", torch.float32),
        ("one expert", True, False, "gelu_tanh", torch.bfloat16),
        ("two", False, True, "relu", torch.float32),
        ("random", False, False, "gelu", torch.bfloat16),
    ],
)
def test_a_layer_by_the_kernels_is_the_layer_by_the_loop(device, load, gated, bias, activation, dtype):
    torch.manual_seed(0)
    layer = Experts(EXPERTS, HIDDEN, WIDE, gated=gated, bias=bias, activation=activation).to(device, dtype)
    given = drawn(device, load, dtype)
    with kernel_choice.prefer("kernel"):
        assert grouped_matmul.algorithm(layer.down_proj).kernel
        found = results(layer, *given)
    with kernel_choice.prefer("library"):
        plain = results(layer, *given)
        exact = results(copy.deepcopy(layer).double(), *(t if t.dtype == torch.int64 else t.double() for t in given))
    for name, result in found.items():
        assert_close(result, plain[name], exact[name], name)


def test_gradients_are_added_to_main_grad_and_frozen_weights_get_none(device):
    torch.manual_seed(0)
    layer, given = Experts(EXPERTS, HIDDEN, WIDE).to(device), drawn(device, "random", torch.float32)
    with kernel_choice.prefer("kernel"):
        plain = results(layer, *given)
        for weight in layer.parameters():
            weight.main_grad = torch.ones_like(weight)
        results(layer, *given)
        for name, weight in layer.named_parameters():
            assert weight.grad is None
            assert torch.allclose(weight.main_grad, plain[name] + 1, atol=1e-5)
            del weight.main_grad
        layer.down_proj.requires_grad_(False)
        found = results(layer, *given)
        assert found["down_proj"] is None and torch.equal(found["gate_up_proj"], plain["gate_up_proj"])


def test_autocast_computes_in_its_type_and_keeps_the_gradients_type(device):
    torch.manual_seed(0)
    layer, given = Experts(EXPERTS, HIDDEN, WIDE, bias=True).to(device), drawn(device, "random", torch.float32)
    with kernel_choice.prefer("kernel"), torch.autocast(device.type, torch.bfloat16):
        found = results(layer, *given)
    with kernel_choice.prefer("library"):
        with torch.autocast(device.type, torch.bfloat16):
            plain = results(layer, *given)
        exact = results(copy.deepcopy(layer).double(), *(t if t.dtype == torch.int64 else t.double() for t in given))
    for name, result in found.items():
        assert result.dtype == plain[name].dtype, name
        assert_close(result.bfloat16(), plain[name].bfloat16(), exact[name], name)


def test_what_the_kernels_do_not_take_goes_to_aten_with_the_reason(device):
    with kernel_choice.prefer("kernel"):
        assert "fp64" in grouped_matmul.algorithm(torch.empty(2, 3, 3, dtype=torch.float64, device=device)).reason
        assert "1024 experts" in grouped_matmul.algorithm(torch.empty(2000, 1, 1, device=device)).reason
    with kernel_choice.prefer("library"):
        assert not grouped_matmul.algorithm(torch.empty(2, 3, 3, device=device)).kernel


def check_split(rank):
    torch.manual_seed(0)
    whole, given = Experts(EXPERTS, HIDDEN, WIDE), drawn("cpu", "random", torch.float32)
    with kernel_choice.prefer("kernel"):
        expected = results(whole, *given)
        layer = ParallelExperts.from_experts(copy.deepcopy(whole))
        assert "weft kernel: grouped products over offsets" in str(weft.explain(torch.nn.Sequential(layer)))
        found = results(layer, *given)
    for name, parameter in layer.named_parameters():
        expected[name] = weft.shard_of(parameter).take(expected[name])
    for name, result in found.items():
        assert torch.allclose(result, expected[name], atol=1e-5), name


@pytest.mark.skipif(not INTERPRETED, reason="ranks on CPU")
def test_ranks_with_parts_of_the_experts_run_the_kernels():
    run_ranks(check_split, 2)
