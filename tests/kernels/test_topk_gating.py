"""The chosen experts and their weights against sort and softmax in fp64, and the gradients."""

import pytest
import torch

from weft.kernels.topk_gating import topk_gating, topk_gating_backward
from weft.testing import cases
from weft.testing.tolerance import assert_close

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(7, 5, 2), (33, 64, 8), (5, 130, 6), (3, 300, 300), (2, 1, 1)]  # tokens, experts, k


def chosen_by(logits, k, scoring, bias):
    by = logits if bias is None else (logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()) + bias
    return by.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def apart(device, tokens, experts, dtype, seed=0):
    """Logits whose order no rounding changes."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    return (order / max(8, experts / 16) - 2).to(device, dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "scoring", "normalize", "biased"),
    cases.covering(SIZES, DTYPES, ["softmax", "sigmoid"], [False, True], [False, True]),
    ids=str,
)
def test_weights_and_gradients_are_those_of_a_sort_and_a_softmax(device, size, dtype, scoring, normalize, biased):
    tokens, experts, k = size
    logits = apart(device, tokens, experts, dtype)
    bias = torch.linspace(1, -1, experts, device=device) if biased else None
    weights, index = topk_gating(logits, k, softmax=scoring == "softmax", normalize=normalize, bias=bias)
    chosen = chosen_by(logits.double(), k, scoring, bias)
    assert weights.dtype == dtype
    if bias is None:
        assert torch.equal(index, chosen)
    else:  # a score plus a bias may be equal to another in fp32 alone
        scores = (logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()) + bias
        assert torch.allclose(scores.gather(1, index), scores.gather(1, chosen), 0, 1e-6)
        assert all(len(set(row)) == k for row in index.tolist())
    of_type = logits.clone().requires_grad_()
    in_fp64 = logits.double().requires_grad_()
    dw = torch.linspace(-1, 1, weights.numel(), device=device).view(tokens, k).to(dtype)
    found = []
    for x in (of_type, in_fp64):
        scores = x.softmax(-1) if scoring == "softmax" else x.sigmoid()
        w = scores.gather(1, index)
        w = w / w.sum(-1, keepdim=True) if normalize else w
        w.backward(dw.to(x.dtype))
        found.append(w.detach())
    assert_close(weights, found[0], found[1], "weights")
    dlogits = topk_gating_backward(dw, logits, index, softmax=scoring == "softmax", normalize=normalize)
    assert_close(dlogits, of_type.grad, in_fp64.grad, "dlogits")


def test_equal_experts_are_chosen_in_order_and_nan_last(device):
    logits = torch.zeros(3, 6, device=device)
    logits[1, 4] = 1
    assert topk_gating(logits, 3)[1].tolist() == [[0, 1, 2], [4, 0, 1], [0, 1, 2]]
    masked = torch.full((1, 5), float("-inf"), device=device)
    masked[0, 3] = 0
    weights, index = topk_gating(masked, 3)
    assert index.tolist() == [[3, 0, 1]] and weights.tolist() == [[1, 0, 0]]
    masked[0, 1] = float("nan")
    weights, index = topk_gating(masked, 5)
    assert index.tolist() == [[3, 0, 1, 2, 4]] and weights.isnan().all()
    wide = torch.zeros(4, 6, device=device)[:, :5]
    assert topk_gating(wide, 2)[1].tolist() == [[0, 1]] * 4
    assert topk_gating(wide[:0], 2)[1].shape == (0, 2)


def test_what_the_kernels_do_not_take_is_refused(device):
    logits = torch.zeros(4, 6, device=device)
    for error, message, call in (
        (ValueError, "k=7 and 6 experts", lambda: topk_gating(logits, 7)),
        (ValueError, "k=0 and 6 experts", lambda: topk_gating(logits, 0)),
        (ValueError, "at most 1024", lambda: topk_gating(torch.zeros(1, 1025, device=device), 1)),
        (ValueError, "rows that are contiguous", lambda: topk_gating(logits.t(), 1)),
        (TypeError, "logits is torch.float64", lambda: topk_gating(logits.double(), 1)),
        (TypeError, "bias is torch.float16", lambda: topk_gating(logits, 1, bias=logits[0].half())),
    ):
        with pytest.raises(error, match=message):
            call()
