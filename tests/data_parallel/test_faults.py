"""What can go wrong in data parallel training is said on every rank, by the name of the parameter or the rank."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from replicas_of_mlp import batch, loss_of, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.testing.ranks import run_ranks, try_ranks

NOTICED_WITHIN_S = 5


def another_module(rank, what):
    module = mlp()
    if rank == 1:
        if what == "more":
            module.add_module("extra", nn.Linear(5, 5))
        elif what == "fewer":
            del module[4]
        elif what == "order":
            module = nn.Sequential(*module)
            weight = module[0].weight
            del module[0].weight
            module[0].weight = weight  # now behind the bias
        elif what == "type":
            module[2].double()
        elif what == "shape":
            module[2] = nn.Linear(37, 28)
        elif what == "buffer":
            module.register_buffer("steps", torch.zeros(3))
        elif what == "strides":
            module[2].weight = nn.Parameter(module[2].weight.t().contiguous().t())
        elif what == "frozen":
            module[2].bias.requires_grad_(False)
    options = {"bucket_mb": 1} if what == "option" and rank == 1 else {}
    with pytest.raises(weft.CollectiveMismatchError) as raised:
        weft.DataParallel(module, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("more", "rank 1 has the parameter 'extra.weight' (torch.float32 (5, 5) on cpu), which rank 0 does not train"),
        ("fewer", "rank 0 has the parameter '4.weight' (torch.float32 (5, 29) on cpu), which rank 1 does not train"),
        ("order", "another order: where rank 0 has '0.weight', rank 1 has '0.bias'"),
        ("type", "'2.weight' is torch.float32 (29, 37) on cpu on rank 0, torch.float64 (29, 37) on cpu on rank 1"),
        ("shape", "'2.weight' is torch.float32 (29, 37) on cpu on rank 0, torch.float32 (28, 37) on cpu on rank 1"),
        (
            "strides",
            "'2.weight' is torch.float32 (29, 37) on cpu on rank 0, torch.float32 (29, 37) with strides (1, 29)",
        ),
        ("buffer", "'steps', which is not trained, is not there on rank 0, torch.float32 (3,) on cpu on rank 1"),
        ("frozen", "rank 0 has the parameter '2.bias' (torch.float32 (29,) on cpu), which rank 1 does not train"),
        ("option", "rank 0 has bucket_mb=25, rank 1 has bucket_mb=1"),
    ],
)
def test_ranks_that_wrap_different_modules_all_say_so_when_they_wrap_them(what, message):
    texts = set(run_ranks(another_module, 3, what))
    assert len(texts) == 1 and message in texts.pop()


def wrapped_wrongly(rank):
    module = mlp()
    model = weft.DataParallel(module)
    for again in (model, module, nn.Sequential(module)):
        with pytest.raises(ValueError, match="every rank: .*0.weight' is wrapped already"):
            weft.DataParallel(again)
    with pytest.raises(ValueError, match="rank 1: no parameter of the module requires a gradient"):
        weft.DataParallel(nn.Linear(2, 2).requires_grad_(rank != 1))
    with pytest.raises(ValueError, match="has no shape yet"):
        weft.DataParallel(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="'weight' is torch.complex64, and gradients are summed in torch.float32"):
        weft.DataParallel(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="several devices .*'bias' on meta"):
        odd = nn.Linear(2, 2)
        odd.bias = nn.Parameter(torch.empty(2, device="meta"))
        weft.DataParallel(odd)
    for options in (
        {"unused_parameters": "ignore"},
        {"bucket_mb": 0},
        {"wire_dtype": torch.int8},
        {"main_grad": True, "average": False},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            weft.DataParallel(mlp(), **options)
    with pytest.raises(TypeError, match="copy model.module"):
        copy.deepcopy(model)


def test_what_cannot_be_wrapped_is_refused_on_every_rank():
    run_ranks(wrapped_wrongly, 2)


def changed_later(rank):
    model = weft.DataParallel(mlp())
    model.module[0].register_parameter("late", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"not those that were wrapped \(new '0.late'\)"):
        model(batch(0, rank))
    del model.module[0].late
    loss_of(model(batch(0, rank))).backward()
    model.module[0].weight = nn.Parameter(torch.ones(37, 13))
    with pytest.raises(ValueError, match="new '0.weight'; gone '0.weight'"):
        model(batch(0, rank))
    model = weft.DataParallel(mlp())
    model.module[0] = nn.Linear(13, 37)
    with pytest.raises(ValueError, match="new '0.weight', '0.bias'; gone '0.weight', '0.bias'"):
        model(batch(0, rank))
    fixed = weft.DataParallel(mlp(), main_grad=True)
    fixed.module[0].requires_grad_(False)
    with pytest.raises(ValueError, match="freeze first, then wrap"):
        fixed(batch(0, rank))
    model = weft.DataParallel(mlp())
    with model.no_sync():
        loss_of(model(batch(0, rank))).backward()
    model.module[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0.weight', '0.bias' frozen while gradients from no_sync\(\) wait"):
        model(batch(0, rank))
    model.zero_grad()
    model.module[0].requires_grad_(True)
    model(batch(0, rank))
    model.module[0].requires_grad_(False)
    loss_of(model(batch(0, rank))).backward()


def test_a_module_that_changed_after_wrapping_is_refused():
    run_ranks(changed_later, 2)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 5)

    def forward(self, x, branches):
        for name in branches:
            x = getattr(self, name)(x)
        return self.last(x)


def leave_out(rank, warm):
    """Rank 1 leaves a branch out, at first or once buckets travel early; afterwards all is well again."""
    model = weft.DataParallel(Branches(), bucket_mb=1e-4)
    if warm:
        loss_of(model(batch(0, rank), ["first", "second"])).backward()
        model.zero_grad()
    with pytest.raises(RuntimeError) as raised:
        loss_of(
            model(batch(0, rank), ["first"] if rank == 1 else ["second"] if rank == 2 else ["first", "second"])
        ).backward()
    for _ in range(2):
        model.zero_grad()
        loss_of(model(batch(0, rank), ["first", "second"])).backward()
        gradients = [torch.empty_like(model.module.first.weight) for _ in range(3)]
        dist.all_gather(gradients, model.module.first.weight.grad)
        assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    return str(raised.value)


@pytest.mark.parametrize("warm", [False, True])
def test_unused_parameters_are_named_with_their_ranks_on_every_rank(warm):
    texts = set(run_ranks(leave_out, 3, warm))
    assert len(texts) == 1
    text = texts.pop()
    for expected in (
        "'second.weight' on rank 1",
        "'second.bias' on rank 1",
        "'first.weight' on rank 2",
        'unused_parameters="zero"',
    ):
        assert expected in text


def leave_out_on_gpus_alone(rank, sharded):
    """As over a group of GPUs alone, where no host waits for the result of a backward before it begins the next."""
    model = weft.DataParallel(Branches(), bucket_mb=1e-4, shard_optimizer=sharded)
    model.reducer._consensus._read_later = True
    loss_of(model(batch(0, rank), ["first", "second"])).backward()
    texts = []
    for step in range(5):
        names = ["first"] if rank == 1 and step == 1 else ["first", "second"]
        try:
            loss_of(model(batch(0, rank), names)).backward()
        except RuntimeError as error:
            texts.append(str(error))
            continue
        texts.append("")
    return texts


@pytest.mark.parametrize("sharded", [False, True])
def test_without_a_hosts_group_the_rank_itself_and_the_next_forward_of_all_raise_once(sharded):
    heard = "DataParallel, backward 3: rank 1 has an error, which its message names"
    for rank, texts in enumerate(run_ranks(leave_out_on_gpus_alone, 3, sharded)):
        assert ("'second.weight' on rank 1" in texts.pop(1)) == (rank == 1)
        assert texts == ["", heard, "", ""]


def gives_up(rank, how):
    """A rank whose loss is not of the model makes no backward; its next one must not pass for the one it left out."""
    model = weft.DataParallel(mlp(), unused_parameters="zero")
    loss_of(model(batch(0, rank))).backward()
    output = model(batch(1, rank))
    if rank != 1:
        loss_of(output).backward()
    else:
        time.sleep(0.1)
        if how == "other":
            dist.barrier()
        return
    raise AssertionError("a sum without rank 1")


def test_a_rank_that_leaves_a_backward_out_is_found():
    outcomes = try_ranks(gives_up, 3, "other")
    for rank in (0, 1, 2):
        assert isinstance(outcomes[rank].error, weft.CollectiveMismatchError), outcomes[rank]
    outcomes = try_ranks(gives_up, 3, "leaves")
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, weft.RankLostError) and "rank 1" in str(outcomes[rank].error)


class RaiseOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if ctx.fails:
            raise ArithmeticError("out of luck")
        return dy, None


def raises_midway(rank):
    """Every rank's backward raises after buckets have gone; the next one starts clean."""
    model = weft.DataParallel(mlp(), bucket_mb=1e-4)
    expected = None
    for step in range(4):
        model.zero_grad()
        fails = step == 2
        hook = model.module[2].register_forward_pre_hook(lambda _, x, f=fails: RaiseOnce.apply(x[0], f))
        if fails:
            with pytest.raises(ArithmeticError):
                loss_of(model(batch(0, rank))).backward()
        else:
            loss_of(model(batch(0, rank))).backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            assert expected is None or all(map(torch.equal, gradients, expected))
            expected = gradients
        hook.remove()


def raises_before_micro_batches(rank):
    """Rank 0 is through with its micro-batch before rank 1 has sent what it had of the backward that raised."""
    model = weft.DataParallel(mlp(), bucket_mb=1e-4)
    loss_of(model(batch(0, rank))).backward()
    model.zero_grad()
    hook = model.module[2].register_forward_pre_hook(lambda _, x: RaiseOnce.apply(x[0], True))
    time.sleep(0.3 * rank)
    with pytest.raises(ArithmeticError):
        loss_of(model(batch(0, rank))).backward()
    hook.remove()
    model.zero_grad()
    with model.no_sync():
        loss_of(model(batch(1, rank))).backward()
    loss_of(model(batch(2, rank))).backward()
    expected = weft.DataParallel(mlp(), bucket_mb=1e-4)
    with expected.no_sync():
        loss_of(expected(batch(1, rank))).backward()
    loss_of(expected(batch(2, rank))).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_backward_after_one_that_raised_starts_clean():
    run_ranks(raises_midway, 2)
    run_ranks(raises_before_micro_batches, 2)


def bad_gradient(rank, what):
    if what == "sparse":
        model = weft.DataParallel(nn.Sequential(nn.Embedding(7, 3, sparse=rank == 1), nn.Linear(3, 2)))
        output = model(torch.tensor([1, 2])).sum()
    elif what == "graph":
        model = weft.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        output = model(torch.ones(2, 3)).square().sum()
    elif what.startswith("taken"):  # an optimizer that steps in backward; by hooks from before the wrapper, or after it
        module = nn.Linear(3, 3)
        hooked = module.weight if rank == 1 else nn.Parameter(torch.ones(1))
        if what == "taken before":
            hooked.register_post_accumulate_grad_hook(take_away)
        model = weft.DataParallel(module, unused_parameters="zero")
        if what == "taken after":
            hooked.register_post_accumulate_grad_hook(take_away)
        output = model(torch.ones(2, 3)).sum()
    else:  # one rank uses the weight in one checkpoint more than it did when the order was learned
        model = weft.DataParallel(Repeated())
        model(torch.ones(2, 3), 1).sum().backward()
        output = model(torch.ones(2, 3), 2 if rank == 1 else 1).sum()
    with pytest.raises(RuntimeError) as raised:
        output.backward(create_graph=what == "graph" and rank == 1)
    return str(raised.value)


def take_away(parameter):
    parameter.grad = None


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, times):
        x = x.requires_grad_()
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", "rank 1: the gradient of '0.weight' is torch.sparse_coo; gradients must be dense"),
        ("graph", "rank 1: the gradient of '0.weight' is to be differentiated (create_graph=True)"),
        ("taken before", "rank 1: a hook took the gradient of 'weight' away before the ranks had summed it"),
        ("taken after", "rank 1: a hook took the gradient of 'weight' away before the ranks had summed it"),
        ("repeated", "rank 1: 'layer.weight' got another gradient after the 1 that it got in the first backward"),
    ],
)
def test_a_gradient_that_cannot_be_reduced_is_named_with_its_rank(what, message):
    texts = set(run_ranks(bad_gradient, 2, what))
    assert len(texts) == 1
    assert all(part in text for text in texts for part in message.split(": ", 1))


def not_finite(rank, checks):
    model = weft.DataParallel(mlp(), check_gradients=checks, bucket_mb=1e-3)
    for step in range(4):
        model.zero_grad()
        x = batch(step, rank)
        output = model(x)
        loss = loss_of(output)
        if step == 2 and rank == 1:
            loss = loss + model.module[2].bias.sum() * float("inf")
        loss.backward()
        assert bool(model.found_nonfinite) == (step == 2)
        assert model.found_nonfinite.shape == (1,) and model.found_nonfinite.dtype == torch.float32
        assert model.nonfinite_parameters() == ({"2.bias": [1] if checks else []} if step == 2 else {})


@pytest.mark.parametrize("checks", [False, True])
def test_a_gradient_that_is_not_finite_is_named(checks):
    run_ranks(not_finite, 3, checks)


def die_in_backward(rank, point):
    model = weft.DataParallel(mlp(), bucket_mb=1e-4)
    for step in range(3):
        if rank == 1 and step == point:
            model.module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss_of(model(batch(step, rank))).backward()


@pytest.mark.parametrize("point", [0, 2])
def test_a_rank_killed_in_backward_is_named_on_every_other(point):
    outcomes = try_ranks(die_in_backward, 3, point)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError) and "rank 1" in str(survivor.error), survivor
        assert survivor.seconds < NOTICED_WITHIN_S
