"""Layers of experts by the grouped kernels, with all gradients, against the loop over the experts."""

import copy

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.kernels import config, launch
from weft.kernels.config import Entry
from weft.kernels.grouped_matmul import problem_of
from weft.kernels.language import INTERPRETED
from weft.kernels.matmul_tiles import listed
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


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Let products take torch's grouped_mm on this device as on sm_90, where they may; record its calls."""
    calls, library = [], F.grouped_mm

    def grouped_mm(a, b, *, offs):
        assert all(x.dtype == torch.bfloat16 and 1 in x.stride()[-2:] for x in (a, b)) and offs.dtype == torch.int32
        calls.append((tuple(a.shape), tuple(b.shape)))
        return library(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    monkeypatch.setattr(grouped_matmul, "_family", lambda device: 9)
    monkeypatch.setattr(kernel_choice, "on_kernel", lambda device: kernel_choice._preference != "library")
    kernel_choice.forget_choices()
    yield calls
    kernel_choice.forget_choices()


def wide_layer(device, **options):
    torch.manual_seed(0)
    return Experts(EXPERTS, 24, 16, **options).to(device, torch.bfloat16)


def wide_draw(device, load="random"):
    _, index, weights, _ = drawn(device, load, torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(2, 9, 24, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    return x, index, weights, dy


@pytest.mark.parametrize(("load", "gated"), [("random", True), ("two", True), ("one expert", False)])
def test_aligned_bf16_takes_torchs_products_until_ours_was_measured_faster(device, as_on_hopper, load, gated):
    layer, given = wide_layer(device, gated=gated), wide_draw(device, load)
    found = results(layer, *given)
    assert len(as_on_hopper) == 6, "two products forward, two dgrads, two wgrads"
    with kernel_choice.prefer("library"):
        plain = results(layer, *given)
        exact = results(copy.deepcopy(layer).double(), *(t if t.dtype == torch.int64 else t.double() for t in given))
    for name, result in found.items():
        assert_close(result, plain[name], exact[name], name)


def test_an_expert_without_rows_has_a_gradient_of_zero_where_torchs_product_leaves_memory_as_it_is(
    device, as_on_hopper, monkeypatch
):
    """pytorch/pytorch#172439, on sm_100."""
    library = F.grouped_mm

    def with_memory_as_it_was(a, b, *, offs):
        product = library(a, b, offs=offs)
        if product.dim() == 3:
            product[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = 3.0
        return product

    monkeypatch.setattr(F, "grouped_mm", with_memory_as_it_was)
    layer, given = wide_layer(device), wide_draw(device, "two")  # experts 1 and 2 get nothing
    assert results(layer, *given)["down_proj"][1].eq(3.0).all()
    monkeypatch.setattr(grouped_matmul, "_family", lambda device: 10)
    for name in ("down_proj", "gate_up_proj"):
        assert not results(layer, *given)[name][1:3].any()


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("adds neither a bias", lambda layer: wide_layer(layer.down_proj.device, bias=True)),
        ("16 bytes", lambda layer: Experts(EXPERTS, 24, 17).to(layer.down_proj.device, torch.bfloat16)),
        ("float32", lambda layer: layer.float()),
    ],
)
def test_what_torchs_products_cannot_do_stays_with_the_kernel_by_name(device, as_on_hopper, why, change):
    layer = change(wide_layer(device))
    assert why in grouped_matmul.algorithms(layer.weights(), 18)["forward"].reason
    x, index, weights, dy = wide_draw(device)
    dtype = layer.down_proj.dtype
    found = results(layer, x.to(dtype), index, weights.to(dtype), dy.to(dtype))
    with kernel_choice.prefer("library"):
        plain = results(layer, x.to(dtype), index, weights.to(dtype), dy.to(dtype))
    for name, result in found.items():
        torch.testing.assert_close(result, plain[name], rtol=2e-2, atol=2e-2)
    assert (EXPERTS, 24, layer.gate_up_proj.size(1)) not in [b for _, b in as_on_hopper], "the product up"


def test_rows_that_begin_between_two_multiples_of_16_bytes_stay_with_the_kernel(device, as_on_hopper):
    layer = wide_layer(device)
    expert = torch.arange(18, device=device) // 5
    flat = torch.randn(18 * 24 + 1, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    moved = flat[1:].view(18, 24)
    assert moved.is_contiguous() and moved.storage_offset() == 1
    result = grouped_matmul.expert_mlps(moved, expert, layer.weights())
    assert [a for a, _ in as_on_hopper] == [(18, 16)], "the product down alone is torch's"
    by_library = grouped_matmul.expert_mlps(moved.clone(), expert, layer.weights())
    torch.testing.assert_close(result, by_library, rtol=2e-2, atol=2e-3)
    assert len(as_on_hopper) == 3


def test_main_grad_an_old_torch_and_another_gpu_are_named_too(device, as_on_hopper, monkeypatch):
    layer = wide_layer(device)
    assert not any(taken.kernel for taken in grouped_matmul.algorithms(layer.weights(), 18).values())
    layer.gate_up_proj.main_grad = torch.zeros_like(layer.gate_up_proj, dtype=torch.float32)
    found = grouped_matmul.algorithms(layer.weights(), 18)
    assert "main_grad" in found["wgrad"].reason and not found["dgrad"].kernel
    assert "no rows" in grouped_matmul.algorithms(layer.weights(), 0)["forward"].reason
    many = Experts(1024, 8, 8).to(device, torch.bfloat16)
    assert "fewer than 1024 experts" in grouped_matmul.algorithms(many.weights(), 18)["dgrad"].reason
    monkeypatch.setattr(grouped_matmul, "_family", lambda device: 8)
    assert "waits for the number of rows" in grouped_matmul.algorithms(layer.weights(), 18)["forward"].reason
    monkeypatch.delattr(F, "grouped_mm")
    assert "no grouped_mm" in grouped_matmul.algorithms(layer.weights(), 18)["forward"].reason


def test_a_measurement_on_this_device_decides(device, as_on_hopper):
    layer, architecture = wide_layer(device), launch.architecture_of(device)
    x, gate = torch.empty(36, 24, dtype=torch.bfloat16), torch.empty(EXPERTS, 16, 24, dtype=torch.bfloat16)
    key = problem_of(x, gate.mT, gate.mT, "silu").key()
    tile = listed(architecture, torch.bfloat16)[0]
    try:
        for peer_us, ours in ((12.5, True), (8.0, False)):
            config.add_entries("grouped_matmul", architecture, [Entry(key, tile, 10.0, peer_us)])
            kernel_choice.forget_choices()
            found = grouped_matmul.algorithms(layer.weights(), 36)["forward"]
            assert found.kernel == ours and f"{peer_us / 10:.2f} times ATen's speed at 36x16x24" in found.reason
            assert torch.equal(layer(*wide_draw(device)[:3]), layer(*wide_draw(device)[:3]))
            assert len(as_on_hopper) == (2 if ours else 6), "the product up is the kernel's or torch's"
    finally:
        config._added.clear()


def check_split(rank):
    torch.manual_seed(0)
    whole, given = Experts(EXPERTS, HIDDEN, WIDE), drawn("cpu", "random", torch.float32)
    with kernel_choice.prefer("kernel"):
        expected = results(whole, *given)
        layer = ParallelExperts.from_experts(copy.deepcopy(whole))
        assert "weft kernel: torch's grouped_mm waits" in str(weft.explain(torch.nn.Sequential(layer)))
        found = results(layer, *given)
    for name, parameter in layer.named_parameters():
        expected[name] = weft.shard_of(parameter).take(expected[name])
    for name, result in found.items():
        assert torch.allclose(result, expected[name], atol=1e-5), name


@pytest.mark.skipif(not INTERPRETED, reason="ranks on CPU")
def test_ranks_with_parts_of_the_experts_run_the_kernels():
    run_ranks(check_split, 2)
