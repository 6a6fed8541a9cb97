"""parallel_cross_entropy against torch's, over the whole vocabulary: loss and gradient, every option."""

import itertools

import pytest
import torch
import torch.distributed as dist
from interpreter import by_kernels, in_the_interpreter

import weft
from weft.comm.registry import communicator
from weft.kernels import launch
from weft.ops import cross_entropy, kernel_choice
from weft.ops.cross_entropy import fused_cross_entropy
from weft.testing import reference
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import assert_close, plain_dtype


def loss_and_gradient(function, logits, target, **options):
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, target, **options)
    (loss * torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return loss.detach(), logits.grad


def check_loss(rank, dtype, preference="auto", every=1):
    with kernel_choice.prefer(preference):
        check_losses(rank, dtype, every)


def check_losses(rank, dtype, every):
    world = dist.get_world_size()
    for vocabulary, shape in ((13, (7,)), (max(world, 2), (2, 3)), (257, (2, 5))):
        torch.manual_seed(vocabulary)
        sizes = weft.split_sizes(vocabulary, world)
        logits = (torch.randn(*shape, vocabulary) * 5).to(dtype)
        target = torch.randint(0, vocabulary, shape)
        target.view(-1)[1] = -100
        target.view(-1)[0] = vocabulary - 1
        options = itertools.product((0.0, 0.1, 1.0), ("mean", "sum", "none"), (-100, int(target.view(-1)[-1])))
        for smoothing, reduction, ignore_index in list(options)[::every]:
            kept = torch.where(target == -100, ignore_index, target)
            arguments = dict(label_smoothing=smoothing, reduction=reduction, ignore_index=ignore_index)
            coarse = plain_dtype(dtype)
            plain = loss_and_gradient(reference.cross_entropy, logits.to(coarse).float(), kept, **arguments)
            exact = loss_and_gradient(reference.cross_entropy, logits.double(), kept, **arguments)
            loss, gradient = loss_and_gradient(
                weft.parallel_cross_entropy, logits.split(sizes, -1)[rank], kept, **arguments
            )
            assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert_close(loss, plain[0], exact[0], f"loss {arguments}")
            assert gradient.dtype == dtype
            gradient = communicator(None).all_gather(gradient, -1, sizes)
            assert_close(gradient, plain[1].to(coarse), exact[1], f"gradient {arguments}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(world, dtype):
    run_ranks(check_loss, world, dtype)


@pytest.mark.kernel
@pytest.mark.skipif(not launch.INTERPRETED, reason="these ranks have CPU tensors, which kernels take interpreted")
@pytest.mark.parametrize(
    ("dtype", "every"),
    [
        (torch.bfloat16, 11),
        pytest.param(torch.bfloat16, 5, marks=pytest.mark.slow("kernels")),  # has all values of each option
        pytest.param(torch.bfloat16, 1, marks=pytest.mark.slow("kernels", "pytorch_ext/ops")),
        pytest.param(torch.float32, 1, marks=pytest.mark.slow("kernels", "pytorch_ext/ops")),
    ],
    ids=str,
)
def test_the_kernels_loss_and_gradient_are_those_of_the_whole_vocabulary(dtype, every):
    run_ranks(check_loss, 3, dtype, "kernel", every)


@pytest.mark.kernel
@pytest.mark.parametrize("preference", ["kernel", "library"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_one_device_needs_no_group(device, preference, smoothing):
    logits = (torch.randn(5, 3, 37, generator=torch.Generator().manual_seed(1)) * 4).to(device)
    target = torch.arange(15, device=device).view(5, 3) * 2
    with kernel_choice.prefer(preference):
        found = loss_and_gradient(fused_cross_entropy, logits, target, label_smoothing=smoothing)
        compiled = torch.compile(fused_cross_entropy, fullgraph=True, backend="aot_eager")
        traced = loss_and_gradient(compiled, logits, target, label_smoothing=smoothing)
    plain = loss_and_gradient(reference.cross_entropy, logits, target, label_smoothing=smoothing)
    exact = loss_and_gradient(reference.cross_entropy, logits.double(), target, label_smoothing=smoothing)
    for result, again, *expected in zip(found, traced, plain, exact, strict=True):
        assert_close(result, *expected)
        assert_close(again, *expected)


@pytest.mark.kernel
@pytest.mark.parametrize("preference", ["kernel", "library"])
def test_the_operators_pass_opcheck(device, preference):
    logits, target = torch.randn(4, 9, device=device), torch.tensor([3, -100, 8, 20], device=device)
    highest, log_sum, dlosses = logits.amax(1), torch.rand(4, device=device), torch.rand(4, device=device)
    gradient_arguments = (logits, target, highest, log_sum, dlosses, 3, 20, -100, 0.1)
    with kernel_choice.prefer(preference):
        for name, arguments in [
            ("cross_entropy_statistics", (logits, target, 3, -100, True)),
            ("cross_entropy_losses", (torch.rand(2, 4, 4, device=device), target, 20, -100, 0.1, True)),
            ("cross_entropy_gradient", gradient_arguments),
            ("cross_entropy_gradient_", gradient_arguments),
        ]:
            torch.library.opcheck(getattr(torch.ops.weft, name).default, arguments)


@pytest.mark.kernel
def test_the_kernels_loss_takes_two_launches_forward_and_two_backward(device):
    """Each operator that is no view is a launch on a GPU; on the CPU the check of the targets is another."""
    calls = []

    class Launches(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not function.is_view and not function.name().startswith(("aten::empty", "aten::_unsafe_view")):
                calls.append(function.name())
            return function(*args, **(kwargs or {}))

    logits = torch.randn(6, 11, device=device, requires_grad=True)
    target, loss_gradient = torch.arange(6, device=device), torch.ones((), device=device)
    with kernel_choice.prefer("kernel"), Launches():
        loss = fused_cross_entropy(logits, target)
        torch.autograd.grad(loss, logits, loss_gradient)
    check = "aten::_assert_async.msg" if logits.is_cuda else "aten::is_nonzero"
    assert [name for name in calls if name not in (check, "aten::_local_scalar_dense")] == [
        "weft::cross_entropy_statistics",
        "weft::cross_entropy_losses",
        "aten::div.Tensor",
        "weft::cross_entropy_gradient",
    ]


@pytest.mark.kernel
@pytest.mark.parametrize("preference", ["kernel", "library"])
def test_overwriting_puts_the_gradient_where_the_logits_were(device, preference):
    hidden = torch.randn(6, 11, device=device, requires_grad=True)
    target = torch.arange(6, device=device)
    (expected,) = torch.autograd.grad(reference.cross_entropy(2 * hidden, target), hidden)
    with kernel_choice.prefer(preference):
        logits = 2 * hidden
        logits.retain_grad()
        loss = fused_cross_entropy(logits, target, overwrite_logits=True)
        loss.backward(retain_graph=True)
        torch.testing.assert_close(hidden.grad, expected)
        assert torch.equal(logits.detach(), logits.grad)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def check_extremes(rank):
    world = dist.get_world_size()
    sizes = weft.split_sizes(6, world)
    logits = torch.tensor([[1e4, -1e4, 0, 1, 2, 3], [-1e4] * 5 + [-2e4], [0.0] * 6], dtype=torch.float64)
    logits[2, : sizes[0]] = -torch.inf  # a rank all of whose classes are masked
    target = torch.tensor([1, 0, 5])
    expected = loss_and_gradient(reference.cross_entropy, logits, target, reduction="none")
    got = loss_and_gradient(weft.parallel_cross_entropy, logits.split(sizes, -1)[rank], target, reduction="none")
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1].split(sizes, -1)[rank])
    ignored = weft.parallel_cross_entropy(logits.split(sizes, -1)[rank], torch.full((3,), -100))
    assert ignored.isnan()  # as torch: the mean of nothing


def test_large_masked_and_ignored_logits():
    run_ranks(check_extremes, 2)
    run_ranks(check_extremes, 3)


def check_same_bits(rank):
    torch.manual_seed(0)
    logits, target = torch.randn(40, 33), torch.randint(0, 33, (40,))
    loss = weft.parallel_cross_entropy(logits.split(weft.split_sizes(33, 3), -1)[rank], target, label_smoothing=0.1)
    losses = [torch.empty(()) for _ in range(3)]
    dist.all_gather(losses, loss)
    assert all(torch.equal(other, loss) for other in losses)


def test_every_rank_has_the_same_loss_to_the_bit():
    run_ranks(check_same_bits, 3)


def check_smoothing_is_vocabulary_wide(rank):
    """The mean over a shard instead of the vocabulary would give a rank without the target another loss."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 9.0]], dtype=torch.float64)
    loss = weft.parallel_cross_entropy(logits.split([2, 2], -1)[rank], torch.tensor([0]), label_smoothing=0.5)
    lse = torch.logsumexp(logits, -1)
    assert loss.item() == pytest.approx((0.5 * lse + 0.5 * (lse - 9 / 4)).item(), abs=1e-12)


def test_smoothing_uses_the_whole_vocabulary():
    run_ranks(check_smoothing_is_vocabulary_wide, 2)


def test_it_runs_over_another_backend():
    run_ranks(check_loss, 2, torch.float32, backend="gloo")


def check_refusals(rank):
    logits, target = torch.randn(4, 3) + rank, torch.zeros(4, dtype=torch.int64)
    for error, message, call in (
        (ValueError, "reduction='max' is not one of 'mean', 'sum', 'none'", lambda: loss(reduction="max")),
        (ValueError, "label_smoothing=1.5 must lie between 0 and 1", lambda: loss(label_smoothing=1.5)),
        (TypeError, "logits must be floating point", lambda: weft.parallel_cross_entropy(logits.long(), target)),
        (TypeError, "class probabilities are not taken", lambda: weft.parallel_cross_entropy(logits, logits)),
        (ValueError, r"they must be \[..., V_r\] and \[...\]", lambda: weft.parallel_cross_entropy(logits, target[:2])),
        (IndexError, "targets span 0 to 6; they must lie in 0 to 5", lambda: out_of_range(6)),
        (IndexError, "targets span -1 to 0", lambda: out_of_range(-1)),
    ):

        def loss(**options):
            return weft.parallel_cross_entropy(logits, target, **options)

        def out_of_range(value):
            return weft.parallel_cross_entropy(logits, target.index_fill(0, torch.tensor([1]), value))

        with pytest.raises(error, match=message):
            call()
    dist.barrier()


def test_bad_input_is_refused_on_every_rank():
    run_ranks(check_refusals, 2)


def loss_in_units(rank, units, dtype, smoothing):
    world = dist.get_world_size()
    torch.manual_seed(0)
    found = []
    for vocabulary, shape in ((5 * units, (7,)), (37 * units, (2, 9))):
        logits, target = (torch.randn(*shape, vocabulary) * 5).to(dtype), torch.randint(0, vocabulary, shape)
        target.view(-1)[1] = -100
        options = {"label_smoothing": smoothing, "reduction": "mean"}
        own = logits.chunk(world, -1)[rank]
        loss, gradient = loss_and_gradient(weft.parallel_cross_entropy, own, target, invariant=units, **options)
        ordinary, its_gradient = loss_and_gradient(weft.parallel_cross_entropy, own, target, **options)
        torch.testing.assert_close(loss, ordinary, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient, its_gradient, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)
        found += [loss, communicator(None).all_gather(gradient, -1, [gradient.size(-1)] * world)]
    wrong = [
        ({"invariant": units}, logits[..., :-1], "classes must be that many equal units"),
        ({"invariant": 2 * world + 1}, logits, "each rank must have equally many"),
        ({"invariant": units, "overwrite_logits": True}, logits, "overwrite_logits=True is not supported"),
    ]
    for options, scores, text in wrong[world == 1 and 2 :]:
        with pytest.raises(ValueError, match=text):
            weft.parallel_cross_entropy(scores, target, **options)
    return found


@pytest.mark.parametrize(("units", "worlds"), [(8, (2, 4)), (12, (3,))])
@pytest.mark.parametrize(("dtype", "smoothing"), [(torch.float32, 0.1), (torch.bfloat16, 0.0)])
def test_the_loss_in_units_has_the_bits_of_one_rank(units, worlds, dtype, smoothing):
    (of_one,) = run_ranks(loss_in_units, 1, units, dtype, smoothing)
    for world in worlds:
        for found in run_ranks(loss_in_units, world, units, dtype, smoothing):
            assert all(map(torch.equal, found, of_one))


@pytest.mark.kernel
def test_units_of_one_row_begin_at_16_bytes_as_on_a_rank_that_has_no_other():
    logits = torch.randn(1, 4 * 4099)
    with by_kernels():
        for part, offset in cross_entropy._parts(logits, 0, 4):
            assert part.data_ptr() % 16 == 0 and torch.equal(part, logits[:, offset : offset + 4099])


@in_the_interpreter
@pytest.mark.kernel
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow("kernels", "pytorch_ext/ops"))])
def test_the_loss_in_units_by_kernels_has_the_bits_of_one_rank(world):
    with by_kernels():
        (of_one,) = run_ranks(loss_in_units, 1, 8, torch.bfloat16, 0.1)
        for found in run_ranks(loss_in_units, world, 8, torch.bfloat16, 0.1):
            assert all(map(torch.equal, found, of_one))
