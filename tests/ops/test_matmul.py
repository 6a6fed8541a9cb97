"""The products of a linear layer as operators: by the kernel and by ATen, with autograd and under torch.compile."""

import pytest
import torch

import weft
from weft.kernels import launch
from weft.ops import kernel_choice
from weft.ops.matmul import fused_linear, gated_linear
from weft.testing import reference
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import assert_close

pytestmark = pytest.mark.kernel
PREFERENCES = ["kernel", "library"]
DTYPES = [torch.float32, torch.bfloat16]


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def with_gradients(function, inputs, dtype=None, frozen=()):
    """The result and the gradient of each input that is not frozen, for a fixed random gradient of the result."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_(i not in frozen) for i, t in enumerate(inputs)]
    y = function(*leaves)
    dy = draw(y.device, *y.shape, seed=99).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], dy)


def compare(ours, plain, inputs, frozen=()):
    results = with_gradients(ours, inputs, frozen=frozen)
    references = with_gradients(plain, inputs, frozen=frozen), with_gradients(plain, inputs, torch.float64, frozen)
    for number, (result, *expected) in enumerate(zip(results, *references, strict=True)):
        assert_close(result, *expected, what=f"result {number}")


@pytest.mark.parametrize("frozen", [(), (1, 2), (0,)], ids=["all", "weights frozen", "input frozen"])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preference", PREFERENCES)
def test_fused_linear_is_linear_and_activation_with_all_gradients(device, preference, dtype, activation, frozen):
    inputs = [draw(device, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(2, 5, 19), (23, 19), (23,)])]
    with kernel_choice.prefer(preference):
        compare(
            lambda *t: fused_linear(*t, activation),
            lambda *t: reference.linear(*t, activation=activation),
            inputs,
            frozen,
        )


@pytest.mark.parametrize("fused", [True, False], ids=["halves of one weight", "two weights"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preference", PREFERENCES)
def test_gated_linear_is_the_product_of_two_with_all_gradients(device, preference, dtype, activation, fused):
    x, bias = draw(device, 3, 7, 19, dtype=dtype), draw(device, 34, dtype=dtype, seed=3)
    weights = [draw(device, 17, 19, dtype=dtype, seed=seed) for seed in (1, 2)]
    if not fused:
        ours = lambda x, gate, up, bias: gated_linear(x, gate, up, bias, activation)  # noqa: E731
        plain = lambda *t: reference.gated_linear(*t, activation)  # noqa: E731
        inputs = [x, *weights, bias]
    else:
        ours = lambda x, w, bias: gated_linear(x, w[:17], w[17:], bias, activation)  # noqa: E731
        plain = lambda x, w, bias: reference.gated_linear(x, w[:17], w[17:], bias, activation)  # noqa: E731
        inputs = [x, torch.cat(weights), bias]
    with kernel_choice.prefer(preference):
        compare(ours, plain, inputs)


def operator_calls(device):
    x, w, w2, b = (draw(device, *shape, seed=i) for i, shape in enumerate([(4, 6), (5, 6), (5, 6), (5,)]))
    dy, z = draw(device, 4, 5, seed=4), draw(device, 4, 10, seed=5)
    return {
        "linear": [(x, w, b, "gelu"), (x, w, None, None)],
        "linear_dgrad": [(dy, w)],
        "linear_wgrad": [(dy, x)],
        "gated_linear": [(x, w, w2, z[0], "silu"), (x, w, w2, None, "gelu")],
        "gated_backward": [(dy, z, "silu")],
        "gated_dgrad": [(z, w, w2)],
    }


@pytest.mark.parametrize("preference", PREFERENCES)
@pytest.mark.parametrize("name", operator_calls(torch.device("cpu")))
def test_operators_pass_opcheck(device, name, preference):
    with kernel_choice.prefer(preference):
        for arguments in operator_calls(device)[name]:
            torch.library.opcheck(getattr(torch.ops.weft, name).default, arguments)


@pytest.mark.parametrize("preference", PREFERENCES)
def test_compile_traces_them_whole(device, preference):
    def model(x, w, gate, up):
        return gated_linear(fused_linear(x, w, None, "gelu"), gate, up).square().sum()

    shapes = [(4, 6), (8, 6), (5, 8), (5, 8)]
    inputs = [draw(device, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with kernel_choice.prefer(preference):
        expected = torch.autograd.grad(model(*inputs), inputs)
        for result, want in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
            torch.testing.assert_close(result, want)


def test_autocast_rounds_the_operands(device):
    x, w = draw(device, 4, 6), draw(device, 5, 6, seed=1)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(fused_linear(x, w), fused_linear(x.bfloat16(), w.bfloat16()))
        assert fused_linear(x.double(), w.double()).dtype == torch.float64


def sharded_step(rank, preference, autocast):
    """Two backward passes into main_grad, and the same into grad, of a column and a row layer."""
    torch.manual_seed(0)
    layers = [weft.ParallelLinear(6, 10, style="column", activation="gelu"), weft.ParallelLinear(10, 7, style="row")]
    x = torch.randn(3, 6)

    def loss():
        return layers[1](layers[0](x)).square().sum()

    with kernel_choice.prefer(preference), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (2 * loss()).backward()
        plain = [layer.weight.grad for layer in layers]
        for layer in layers:
            layer.weight.grad = None
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        for _ in range(2):
            loss().backward()
    assert all(layer.weight.grad is None for layer in layers)
    for layer, expected in zip(layers, plain, strict=True):
        assert layer.weight.main_grad.abs().max() > 0
        torch.testing.assert_close(
            layer.weight.main_grad, expected, **({"rtol": 0.05, "atol": 0.05} if autocast else {})
        )


@pytest.mark.skipif(not launch.INTERPRETED, reason="these ranks have CPU tensors, which kernels take interpreted")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("preference", PREFERENCES)
def test_main_grad_takes_the_weights_gradients_of_parallel_layers(preference, autocast):
    run_ranks(sharded_step, 2, preference, autocast)


@pytest.mark.skipif(not launch.INTERPRETED, reason="ranks cannot be forked once CUDA has computed gradients")
def test_a_main_grad_of_another_type_or_shape_is_refused():
    run_ranks(refuses_main_grads, 1)


def refuses_main_grads(rank):
    layer = weft.ParallelLinear(4, 3, style="column")
    for main_grad, error in [(torch.zeros(3, 4, dtype=torch.bfloat16), TypeError), (torch.zeros(4, 3), ValueError)]:
        layer.weight.main_grad = main_grad
        with pytest.raises(error, match="main_grad"):
            layer(torch.randn(2, 4)).sum().backward()


def test_bad_input_is_refused(device):
    x, w = draw(device, 4, 6), draw(device, 5, 6)
    with pytest.raises(ValueError, match="activation='swish'"):
        fused_linear(x, w, activation="swish")
    with pytest.raises(ValueError, match="no gate"):
        gated_linear(x, w, w, activation=None)
    with (
        pytest.raises(ValueError, match="WEFT_KERNELS='fast' is not one of 'auto', 'kernel', 'library'"),
        kernel_choice.prefer("fast"),
    ):
        pass


def test_the_library_is_what_runs_on_the_cpu_and_says_why():
    from weft.kernels.matmul_tiles import Problem

    found = kernel_choice.algorithm(Problem(8, 8, 8, "nt", True, torch.float32), torch.device("cpu"))
    assert str(found) == "ATen: the kernels run on CUDA devices, the tensors are on the CPU"
