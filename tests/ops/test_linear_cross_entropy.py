"""parallel_linear_cross_entropy against torch's linear layer and loss: loss, all gradients, and the memory of both."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import weft
from weft.comm.registry import communicator
from weft.kernels import launch
from weft.ops import kernel_choice, linear_cross_entropy
from weft.ops.linear_cross_entropy import fused_linear_cross_entropy
from weft.testing import reference
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import assert_close, plain_dtype


def drawn(tokens, vocabulary, features, dtype, seed=0):
    """Return x, weight, bias and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, features, generator=generator).to(dtype)
    bias = torch.randn(vocabulary, generator=generator).to(dtype)
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    target[0], target[-1], target[tokens // 2] = 0, vocabulary - 1, -100
    return x, weight, bias, target


def plain_loss(x, weight, bias, target, **options):
    """Return loss and gradients of the linear layer and the loss as two ops; the loss is at least in fp32."""

    def two_ops(x, weight, target, bias, **rest):
        logits = F.linear(x, weight, bias)
        return reference.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target, **rest)

    return loss_and_gradients(two_ops, x, weight, bias, target, **options)


def loss_and_gradients(function, x, weight, bias, target, **options):
    x, weight, bias = (None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias))
    loss = function(x, weight, target, bias, **options)
    (loss * torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return loss.detach(), x.grad, weight.grad, None if bias is None else bias.grad


def check_against_two_ops(rank, dtype, preference="auto", least_tokens=3):
    linear_cross_entropy._LEAST_TOKENS, linear_cross_entropy._CHUNK_BYTES = least_tokens, 0
    world = dist.get_world_size()
    sizes_drawn = ((13, 7, 9), (13, 7, 2), (max(world, 2), 3, 2), (130, 6, 2))  # all logits are kept, or some chunks
    for vocabulary, tokens, features in sizes_drawn:
        x, weight, bias, target = drawn(tokens, vocabulary, features, dtype, seed=vocabulary)
        sizes = weft.split_sizes(vocabulary, world)
        for smoothing, reduction, has_bias in itertools.product((0.0, 0.3), ("mean", "sum", "none"), (True, False)):
            options = dict(label_smoothing=smoothing, reduction=reduction)
            b = bias if has_bias else None
            wide = [
                [None if t is None else t.to(to) for t in (x, weight, b)] for to in (plain_dtype(dtype), torch.float64)
            ]
            plain, exact = (plain_loss(*operands, target, **options) for operands in wide)
            of_rank = [None if t is None else t.split(sizes)[rank] for t in (weight, b)]
            with kernel_choice.prefer(preference):
                loss, dx, *dparts = loss_and_gradients(
                    weft.parallel_linear_cross_entropy, x, *of_rank, target, **options
                )
            assert_close(loss, plain[0], exact[0], f"loss {options}")
            assert_close(dx, plain[1], exact[1], f"dx {options}")
            for name, part, *expected in zip(("dw", "db"), dparts, plain[2:], exact[2:], strict=True):
                if part is not None:
                    whole = communicator(None).all_gather(part, 0, sizes)
                    assert_close(whole, *expected, f"{name} {options}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_loss_and_gradients_are_those_of_the_layer_and_the_loss(world, dtype):
    run_ranks(check_against_two_ops, world, dtype)


@pytest.mark.kernel
@pytest.mark.slow("kernels", "pytorch_ext/ops")
@pytest.mark.skipif(not launch.INTERPRETED, reason="these ranks have CPU tensors, which kernels take interpreted")
def test_the_kernels_loss_and_gradients_are_those_of_the_layer_and_the_loss():
    run_ranks(check_against_two_ops, 2, torch.float32, "kernel", 5)


def test_the_whole_vocabulary_on_one_device_under_autocast():
    x, weight, bias, target = drawn(40, 3000, 24, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(fused_linear_cross_entropy, x, weight, bias, target)
        plain = plain_loss(x, weight, bias, target)
    exact = plain_loss(x.double(), weight.double(), bias.double(), target)
    for name, result, *expected in zip(("loss", "dx", "dw", "db"), found, plain, exact, strict=True):
        assert result.dtype == torch.float32
        assert_close(result, *expected, name)


@pytest.mark.parametrize(
    "preference",
    [
        "library",
        *([pytest.param("kernel", marks=pytest.mark.slow("pytorch_ext/ops", "kernels"))] if launch.INTERPRETED else []),
    ],
)
def test_compile_traces_it_whole_with_its_sums_as_one_operator(preference):
    """On a GPU the sums in fp32 are products with out= of another type, which torch.compile does not trace."""
    with kernel_choice.prefer(preference):
        assert any("weft.accumulate" in name for name in check_that_compile_traces_it_whole(torch.float32))
        check_that_compile_traces_it_whole(torch.bfloat16)


def check_that_compile_traces_it_whole(dtype):
    x, weight, bias, target = drawn(40, 3000, 24, dtype)
    traced: list[str] = []

    def backend(graph, inputs):
        def compiled(graph, inputs):
            traced.extend(
                str((node.target, *node.args[:1])) for node in graph.graph.nodes
            )  # what is functionalised too
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compiled)(graph, inputs)

    compiled = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend=backend)
    found = loss_and_gradients(compiled, x, weight, bias, target)
    for result, expected in zip(
        found, loss_and_gradients(fused_linear_cross_entropy, x, weight, bias, target), strict=True
    ):
        assert torch.equal(result, expected)
    return traced


@pytest.mark.parametrize("tokens", [5, 40])  # of 8 features: with all logits, in chunks
def test_main_grad_takes_the_gradient_of_the_weight(monkeypatch, tokens):
    monkeypatch.setattr(linear_cross_entropy, "_LEAST_TOKENS", 3)
    monkeypatch.setattr(linear_cross_entropy, "_CHUNK_BYTES", 0)
    x, weight, _, target = drawn(tokens, 40, 8, torch.bfloat16)
    (_, _, plain, _), (_, _, exact, _) = (
        plain_loss(x.to(to), weight.to(to), None, target) for to in (x.dtype, torch.float64)
    )
    weight.requires_grad_().main_grad = torch.ones(40, 8)
    for _ in range(2):
        fused_linear_cross_entropy(x, weight, target).backward()
    assert weight.grad is None
    assert_close(weight.main_grad, 1 + 4 * plain.float(), 1 + 4 * exact)  # plain_loss halves the loss
    weight.main_grad = torch.ones(40, 7)
    with pytest.raises(ValueError, match="it must be the weight's"):
        fused_linear_cross_entropy(x, weight, target).backward()


def test_only_asked_gradients_are_computed():
    x, weight, bias, target = drawn(5, 40, 8, torch.float32)
    fused_linear_cross_entropy(x, weight.requires_grad_(), target, bias).backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(fused_linear_cross_entropy(x, weight, target), weight, create_graph=True)


def test_logits_exist_one_chunk_at_a_time(monkeypatch):
    """No tensor that is made in forward or backward is larger than a chunk's logits or the weight's gradient."""
    monkeypatch.setattr(linear_cross_entropy, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(linear_cross_entropy, "_LEAST_TOKENS", 32)
    x, weight, bias, target = drawn(256, 8192, 8, torch.float32)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            nonlocal largest
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return result

    with Sizes():
        loss_and_gradients(fused_linear_cross_entropy, x, weight, bias, target)
    assert largest == 32 * 8192 * 4 < 256 * 8192 * 4


PRODUCTS = {
    linear_cross_entropy.matmul: ("linear_operator", "linear_dgrad_operator", "linear_wgrad_operator"),
    linear_cross_entropy: ("_accumulate",),
}


@pytest.mark.parametrize(
    ("reduction", "dtype", "tokens", "products"),
    [
        *[("mean", torch.float32, 40, 3), ("sum", torch.float64, 40, 3)],
        *[("none", torch.float32, 40, 4), ("mean", torch.float16, 60, 4)],
        *[("none", torch.float32, 24, 3), ("mean", torch.float16, 48, 3), ("mean", torch.bfloat16, 48, 3)],
    ],
)
def test_a_loss_takes_three_products_where_its_logits_or_gradients_can_be_kept(
    monkeypatch, reduction, dtype, tokens, products
):
    """All logits where they are no larger than dw in fp32, of 24 features; else the gradients of a reduced loss.

    In fp16 gradients that forward makes would lose the loss's scale.
    """
    counted = []
    for module, names in PRODUCTS.items():
        for name in names:
            product = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, product=product: (counted.append(1), product(*a))[1])
    x, weight, bias, target = drawn(tokens, 300, 24, dtype)
    loss_and_gradients(fused_linear_cross_entropy, x, weight, bias, target, reduction=reduction)
    assert len(counted) == products
    with torch.no_grad():
        fused_linear_cross_entropy(x, weight.requires_grad_(), target, reduction=reduction)
    assert len(counted) == products + 1


def test_all_logits_are_kept_for_one_loss_of_a_weight_at_a_time(monkeypatch):
    counted = []
    logits = linear_cross_entropy._logits
    monkeypatch.setattr(linear_cross_entropy, "_logits", lambda *a: (counted.append(1), logits(*a))[1])
    x, weight, _, target = drawn(20, 300, 24, torch.float32)
    weight.requires_grad_()
    losses = [fused_linear_cross_entropy(x, weight, target) for _ in range(3)]
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), weight)
    for loss, times in zip(losses, (3, 4, 5), strict=True):
        torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], expected)
        assert len(counted) == times, "the first loss alone has kept its logits"
    fused_linear_cross_entropy(x, weight, target).backward()
    assert len(counted) == 6, "kept again"


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_computes_the_logits_that_the_first_overwrote(reduction):
    x, weight, bias, target = drawn(20, 300, 24, torch.float32)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    plain = torch.autograd.grad(F.cross_entropy(F.linear(x, weight, bias), target, reduction="sum"), leaves)
    with torch.autograd.graph.save_on_cpu() if reduction == "none" else contextlib.nullcontext():
        loss = fused_linear_cross_entropy(x, weight, target, bias, reduction=reduction).sum()
    share = 1 / 19 if reduction == "mean" else 1.0  # one target is ignored
    for factor in (1.0, 3.0, -2.0):
        found = torch.autograd.grad(loss * factor, leaves, retain_graph=True)
        for result, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(result, expected * factor * share)


def test_chunks_of_a_weight_that_trains_are_as_long_as_the_sum_of_its_gradient_allows():
    def sizes(features, dtype, trains, tokens=20000, classes=128256):
        x = torch.empty(tokens, features, dtype=dtype, device="meta")
        return [rows.stop - rows.start for rows in linear_cross_entropy._chunks(x, classes, trains)]

    assert sizes(4096, torch.bfloat16, True) == [4096] * 4 + [3616]
    assert sizes(1024, torch.bfloat16, True)[0] == 2048 and sizes(256, torch.bfloat16, True)[0] == 1024
    assert sizes(2048, torch.float32, True)[0] == 2048
    assert sizes(4096, torch.bfloat16, False)[0] == 1024, "no dw is read and written"
    assert sizes(4096, torch.bfloat16, True, classes=100) == [20000]


def test_gradients_of_one_loss_at_a_time_wait_for_backward(monkeypatch):
    """Those of several micro-batches would each take the memory of the weight in fp32."""
    counted = []
    add = linear_cross_entropy._GradientSums.add
    monkeypatch.setattr(linear_cross_entropy._GradientSums, "add", lambda *a: (counted.append(1), add(*a)))
    x, weight, _, target = drawn(40, 300, 24, torch.float32)
    weight.requires_grad_()
    losses = [fused_linear_cross_entropy(x, weight, target) for _ in range(3)]
    assert len(counted) == 1, "the first one's, in forward"
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), weight)
    for loss in losses:
        torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], expected)
    assert len(counted) == 3
    fused_linear_cross_entropy(x, weight, target)  # dropped without a backward
    assert len(counted) == 4
    fused_linear_cross_entropy(x, weight, target).backward()
    assert len(counted) == 5, "in forward again"


@pytest.mark.parametrize("tokens", [20, 40])  # of 24 features: with all logits, in chunks
def test_a_loss_that_is_scaled_later_and_one_of_ignored_targets_alone(tokens):
    x, weight, bias, target = drawn(tokens, 300, 24, torch.float32)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = fused_linear_cross_entropy(x, weight, target, bias)
    plain = torch.autograd.grad(loss, leaves, retain_graph=True)
    for result, expected in zip(torch.autograd.grad(loss * 3, leaves), plain, strict=True):
        torch.testing.assert_close(result, 3 * expected)
    nothing = fused_linear_cross_entropy(x, weight, torch.full((tokens,), -100), bias)
    assert not any(gradient.any() for gradient in torch.autograd.grad(nothing, leaves))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "reduction='max' is not one of", {"reduction": "max"}),
        (ValueError, "label_smoothing=2.0 must lie between 0 and 1", {"label_smoothing": 2.0}),
        (ValueError, r"they must be \[..., K\], \[V_r, K\] of the same type, and \[...\]", {"x": torch.ones(4, 7)}),
        (ValueError, "x is torch.float64", {"x": torch.ones(4, 8, dtype=torch.float64)}),
        (TypeError, "class probabilities are not taken", {"target": torch.ones(4)}),
        (IndexError, "targets span 0 to 20; they must lie in 0 to 19", {"target": torch.tensor([0, 20, 1, 2])}),
    ],
)
def test_bad_arguments_are_refused(error, message, change):
    given = {"x": torch.ones(4, 8), "weight": torch.ones(20, 8), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        fused_linear_cross_entropy(**given | change)


def test_no_tokens_and_no_targets():
    x, weight, _, target = drawn(5, 40, 8, torch.float32)
    nothing = fused_linear_cross_entropy(x[:0], weight, target[:0], reduction="sum")
    assert nothing == 0
    assert fused_linear_cross_entropy(x, weight, torch.full((5,), -100)).isnan()  # as torch: the mean of nothing
