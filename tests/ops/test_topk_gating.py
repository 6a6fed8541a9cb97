"""The gate by the kernels and by a sort, against torch.topk, with gradients; and in front of a layer of experts."""

import pytest
import torch

import weft
from weft.nn import Experts
from weft.ops import kernel_choice
from weft.testing.tolerance import assert_close

pytestmark = pytest.mark.kernel

WAYS = [("softmax", False, False), ("softmax", True, False), ("sigmoid", True, True), ("sigmoid", False, False)]


def results(logits, dw, **options):
    logits = logits.detach().requires_grad_()
    weights, index = weft.topk_gating(logits, 3, **options)
    weights.backward(dw.to(weights.dtype))
    return weights.detach(), index, logits.grad


@pytest.mark.parametrize(("scoring", "normalize", "biased"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_topk_of_the_scores(device, scoring, normalize, biased, dtype):
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(9, generator=generator) for _ in range(10)])
    logits = (order / 4 - 1).view(2, 5, 9).to(device, dtype)
    dw = torch.randn(2, 5, 3, generator=generator).to(device, dtype)
    bias = torch.linspace(0.3, -0.3, 9, device=device) if biased else None
    options = {"scoring": scoring, "normalize": normalize, "bias": bias}
    with kernel_choice.prefer("kernel"):
        found = results(logits, dw, **options)
    with kernel_choice.prefer("library"):
        plain = results(logits, dw, **options)
    exact = results(logits.double(), dw, **options)
    scores = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    topk = (scores if bias is None else scores + bias.double()).topk(3, -1).indices
    for weights, index, _ in (found, plain, exact):
        assert torch.equal(index, topk)
        assert not normalize or torch.allclose(weights.double().sum(-1), torch.ones(2, 5).double().to(device), 0.01)
    for name, one, other, true in zip(("weights", "index", "dlogits"), found, plain, exact, strict=True):
        if name != "index":
            assert one.dtype == dtype
            assert_close(one, other, true, name)


def test_equal_experts_are_chosen_in_order_by_both(device):
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 1.0], [float("nan"), 0.0, 1.0, 0.0, 0.0]], device=device)
    for preference in ("kernel", "library"):
        with kernel_choice.prefer(preference):
            assert weft.topk_gating(logits, 4)[1].tolist() == [[1, 2, 0, 3], [2, 1, 3, 4]], preference


def test_what_does_not_fit_is_refused():
    logits = torch.zeros(2, 4)
    for message, options in (
        ("k=5 must be from 1 to the 4 experts", {"k": 5}),
        ("scoring='max' is not one of 'softmax', 'sigmoid'", {"k": 1, "scoring": "max"}),
        (r"bias has shape \(3,\); it must be \(4,\)", {"k": 1, "bias": torch.zeros(3)}),
    ):
        with pytest.raises(ValueError, match=message):
            weft.topk_gating(logits, **options)


def test_a_router_and_its_experts_learn_by_the_kernels_as_by_the_library(device):
    torch.manual_seed(0)
    router, experts = torch.nn.Linear(16, 6).to(device), Experts(6, 16, 8).to(device)
    x = torch.randn(11, 16, device=device)
    both = []
    for preference, dtype in (("kernel", torch.float32), ("library", torch.float32), ("library", torch.float64)):
        with kernel_choice.prefer(preference):
            layers = torch.nn.ModuleList([router, experts]).to(dtype)
            layers.zero_grad()
            weights, index = weft.topk_gating(router(x.to(dtype)), 2, normalize=True)
            y = experts(x.to(dtype), index, weights)
            y.square().sum().backward()
            both.append([y.detach(), *(p.grad.clone() for p in layers.parameters())])
    for found, plain, exact in zip(*both, strict=True):
        assert_close(found, plain, exact)
