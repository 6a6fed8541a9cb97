"""Data parallelism with several of its options at once, and what its users do around it: never a stale value."""

import copy
import dataclasses
import io
import itertools
import math

import pytest
import torch
import torch._dynamo  # torch.compile imports it: here once, not in every rank
import torch.distributed as dist
from replicas_of_mlp import batch, loss_of, mlp
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

import weft
from weft.data_parallel.sharded_optimizer import piece_of
from weft.testing.ranks import run_ranks


class Everything(nn.Module):
    """Tied, frozen, fp64, bf16, channels last, scalar and empty parameters; buffers; the middle may be checkpointed."""

    def __init__(self, how="plain"):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first, self.middle, self.tied = nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.wide, self.narrow = nn.Linear(13, 13).double(), nn.Linear(13, 13).bfloat16()
        self.convolution = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.norm, self.last = nn.BatchNorm1d(13), nn.Linear(13, 5)

    def forward(self, x):
        x = self.first(x)
        if self.how == "plain":
            x = self._middle(x)
        else:
            x = checkpoint(self._middle, x, use_reentrant=self.how == "reentrant")
        return self.last(self.norm(x))

    def _middle(self, x):
        x = self.frozen(self.middle(x).tanh()) + self.tied(x)
        x = self.wide(x.double()).float() + self.narrow(x.bfloat16()).float()
        image = x[:, :12].reshape(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        return x * self.scale + self.convolution(image).flatten(1)[:, :13] + self.empty.sum()


def whole_and_sharded(rank, how, compiles):
    """SGD steps every element by itself, so that the bits are the same; LARS's norms are summed in another order."""
    start = dict(Everything().named_parameters())
    for wire_dtype, accumulates in itertools.product((None, torch.bfloat16), (False, True)):
        options = {"wire_dtype": wire_dtype, "bucket_mb": 1e-3}
        for kind, settings in ((torch.optim.SGD, dict(lr=0.05, momentum=0.9)), (weft.LARS, dict(lr=1.0, trust=0.01))):
            trained = []
            for shards in (False, True):
                module = Everything(how)
                model = weft.DataParallel(
                    torch.compile(module, backend="aot_eager") if compiles else module,
                    shard_optimizer=shards,
                    **options,
                )
                groups = weft.layerwise_groups(model, 0.0) if kind is weft.LARS else list(model.parameters())
                optimizer = model.optimizer(kind, groups, **settings) if shards else kind(groups, **settings)
                for step in range(3):
                    model.zero_grad(set_to_none=step != 1)
                    if accumulates:
                        with model.no_sync():
                            loss_of(model(batch(50 + step, rank, 6))).backward()
                    loss_of(model(batch(step, rank, 6))).backward()
                    optimizer.step()
                trained.append(dict(module.named_parameters()))
            for name, expected in trained[0].items():
                mine = trained[1][name]
                if kind is torch.optim.SGD:
                    assert torch.equal(mine, expected), (wire_dtype, accumulates, name)
                elif expected.numel():
                    rounding = torch.finfo(expected.dtype).eps if expected.dtype == torch.bfloat16 else 1e-5
                    step = (expected - start[name]).abs().max().item()
                    digit = 0.0 if wire_dtype is None else step / 64  # what lies between two numbers is sent as either
                    torch.testing.assert_close(mine, expected, rtol=rounding, atol=rounding + digit)
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine.detach().contiguous())
                assert all(torch.equal(part, mine) for part in parts), f"{name}: the same bits on every rank"


@pytest.mark.parametrize(
    ("world", "how", "compiles"),
    [
        pytest.param(3, "plain", False, marks=pytest.mark.slow("pytorch_ext/data_parallel")),
        (2, "reentrant", False),
        (2, "recompute", False),
        (2, "plain", True),
    ],
)
def test_everything_at_once_steps_as_the_whole_optimizer(world, how, compiles):
    run_ranks(whole_and_sharded, world, how, compiles, timeout_s=180)


def masters_of_every_type(rank):
    """Of bf16, fp32 and fp64 parameters together; beside fp32 copies that are stepped by hand."""
    models = [weft.DataParallel(Everything(), main_grad=True, shard_optimizer=on) for on in (False, True)]
    types = [parameter.dtype for parameter in Everything().parameters()]
    assert [parameter.dtype for parameter in models[1].parameters()] == types
    by_hand = {one: one.detach().float() for one in models[0].parameters() if one.requires_grad}
    optimizer = models[1].optimizer(torch.optim.SGD, lr=0.05)
    for step in range(3):
        for model in models:
            model.zero_grad()
            loss_of(model(batch(step, rank, 6))).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in by_hand.items():
                parameter.copy_(master.add_(parameter.main_grad, alpha=-0.05))
    for mine, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_of_several_types_keep_them_under_main_grad(world):
    run_ranks(masters_of_every_type, world)


# What is written to parameters from outside is what is stepped.


def written_to(rank):
    model = weft.DataParallel(mlp(torch.bfloat16), shard_optimizer=True, main_grad=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=1e-4)

    def step():
        loss_of(model(batch(0, rank).bfloat16())).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    first = model.module[2].weight
    pieces = [p for p in optimizer.param_groups[0]["params"] if piece_of(p).parameter is first]
    optimizer.param_groups[0]["lr"] = 0.0
    masters = [piece.clone() for piece in pieces]
    assert any((piece != piece.bfloat16().float()).any() for piece in masters), "more than bf16 can hold"
    with torch.no_grad():
        first[3:5] = 2.0
    step()
    assert (first[3:5] == 2).all()
    for piece, before in zip(pieces, masters, strict=True):
        of = piece_of(piece)
        row = torch.arange(of.start, of.stop) // first.size(1)
        written = (row >= 3) & (row < 5)
        assert (piece[written] == 2).all() and torch.equal(piece[~written], before[~written]), "the rest is as it was"
    model.module[4].bias.data.fill_(2.0)
    step()
    assert (model.module[4].bias == 2).all()
    ones = {name: torch.ones_like(value) for name, value in model.module[0].state_dict().items()}
    model.module[0].load_state_dict(ones)
    step()
    assert (model.module[0].weight == 1).all() and (model.module[0].bias == 1).all()


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_written_to_a_parameter_is_what_its_master_steps_from(world):
    run_ranks(written_to, world)


def lies_elsewhere(rank):
    model = weft.DataParallel(mlp(), shard_optimizer=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model.module[2].bias.data = torch.zeros(29)
    loss_of(model(batch(0, rank))).backward()
    with pytest.raises(RuntimeError, match="'2.bias' was given other memory since it was wrapped"):
        optimizer.step()
    for shards in (False, True):
        model = weft.DataParallel(mlp(), shard_optimizer=shards)
        loss_of(model(batch(0, rank))).backward()
        model.module[2].double()
        with pytest.raises(
            ValueError, match=r"'2.weight' is torch.float64 .*, and was torch.float32 .* when it was wrapped"
        ):
            model(batch(0, rank))


def test_parameters_that_were_moved_or_converted_after_wrapping_are_refused_by_name():
    run_ranks(lies_elsewhere, 2)


# Optimizers.


def groups_added(rank):
    """Named parameters, a single one, and a group that comes later."""
    models = [weft.DataParallel(mlp(), shard_optimizer=on) for on in (False, True)]
    optimizers = []
    for model in models:
        named, last = list(model.named_parameters())[:-1], list(model.parameters())[-1]
        whole = not model.shards_optimizer
        made = torch.optim.AdamW(named[:2], lr=0.1) if whole else model.optimizer(torch.optim.AdamW, named[:2], lr=0.1)
        made.add_param_group({"params": named[2:], "lr": 0.01})
        made.add_param_group({"params": [("last", last)]})
        optimizers.append(made)
        for step in range(3):
            made.zero_grad()
            loss_of(model(batch(step, rank))).backward()
            made.step()
    for mine, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, expected)
    for group in optimizers[1].param_groups:
        held = {name.removeprefix("module.").replace("last", "4.bias") for name in group["param_names"]}
        assert held == {piece_of(piece).name for piece in group["params"]}
    with pytest.raises(ValueError, match="not of the wrapped module"):
        optimizers[1].add_param_group({"params": [("stranger", nn.Parameter(torch.ones(3)))]})


def test_named_parameters_and_groups_that_come_later_are_stepped_by_pieces_too():
    run_ranks(groups_added, 2)


def forgotten(rank):
    model = weft.DataParallel(mlp(), shard_optimizer=True)
    loss_of(model(batch(0, rank))).backward()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(ValueError, match=f"{kind.__name__}: .* make the optimizer by model.optimizer"):
            kind(model.parameters()).step()
    with pytest.raises(ValueError, match="pass the weft.DataParallel itself"):
        weft.clip_grad_norm_(list(model.parameters()), 1.0)


def clipped_by_torch(rank):
    """torch's function finds the gradients of a sharded optimizer, too."""
    model, plain = weft.DataParallel(mlp(), shard_optimizer=True), weft.DataParallel(mlp())
    optimizers = model.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, options in enumerate(({}, {"foreach": True}, {"norm_type": 1.0}, {"norm_type": math.inf})):
        norms = []
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            loss_of(one(batch(step, rank))).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01, **options))
            optimizer.step()
            optimizer.zero_grad()
            one.zero_grad()
        torch.testing.assert_close(*norms)
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)


def test_torch_clips_the_gradients_of_a_sharded_optimizer():
    run_ranks(clipped_by_torch, 2)


def test_a_sharded_model_without_its_optimizer_says_so():
    run_ranks(forgotten, 2)


def unsharded_main_grads(rank, kind):
    """LARS and LAMB step bf16 parameters by their fp32 main_grads, which torch's optimizers do not look at."""
    model = weft.DataParallel(mlp(torch.bfloat16), main_grad=True)
    plain = weft.DataParallel(mlp(torch.bfloat16))
    optimizers = [kind(one.parameters(), lr=0.1 if kind is weft.LAMB else 30.0) for one in (model, plain)]
    for step in range(3):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            (one if step == 1 else optimizer).zero_grad()
            loss_of(one(batch(step, rank).bfloat16())).backward()
            optimizer.step()
    for mine, expected, start in zip(
        model.parameters(), plain.parameters(), mlp(torch.bfloat16).parameters(), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=2**-6, atol=2**-7)
        assert not torch.equal(mine, start)


@pytest.mark.parametrize("kind", [weft.LARS, weft.LAMB])
def test_layerwise_steps_are_taken_by_main_grads(kind):
    run_ranks(unsharded_main_grads, 2, kind)


def scaled(rank, shards):
    """Check that no rank steps and the scale halves after an overflow in a parameter without a piece on rank 0."""
    model = weft.DataParallel(mlp(), shard_optimizer=shards)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1) if shards else torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = []
    for step in range(4):
        before = model.module[0].weight.detach().clone()
        optimizer.zero_grad()
        loss = loss_of(model(batch(step, rank)))
        if step == 1 and rank == 1:
            loss = loss + model.module[0].bias.sum() * float("inf")
        scaler.scale(loss).backward()
        found = bool(model.found_nonfinite)
        scaler.step(optimizer)
        scaler.update()
        assert found == torch.equal(before, model.module[0].weight)
        steps.append((found, scaler.get_scale()))
    return steps, [parameter.detach().clone() for parameter in model.parameters()]


def test_a_scaler_skips_the_same_steps_on_every_rank():
    (steps, whole), (_, other) = run_ranks(scaled, 2, False)
    (sharded_steps, sharded), (other_steps, _) = run_ranks(scaled, 2, True)
    assert steps == sharded_steps == other_steps == [(False, 8.0), (True, 4.0), (False, 4.0), (False, 4.0)]
    assert all(map(torch.equal, whole, other)) and all(map(torch.equal, whole, sharded))


def clipped(rank, shards):
    """Gradients that were unscaled, clipped or replaced since backward are clipped by the norm that they have."""
    model, plain = weft.DataParallel(mlp(), shard_optimizer=shards), weft.DataParallel(mlp())
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1) if shards else torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = (ShardedGradScaler if shards else torch.amp.GradScaler)("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model(batch(0, rank)))).backward()
    loss_of(plain(batch(0, rank))).backward()
    scaler.unscale_(optimizer)
    for limit, before in ((1e-3, plain.grad_norm), (1e-4, 1e-3)):
        norm = model.clip_grad_norm_(limit)
        torch.testing.assert_close(norm, torch.as_tensor(before, dtype=norm.dtype), rtol=1e-4, atol=0)
    if not shards:
        taken, *others = plain.parameters()
        taken.grad = None
        for one in others:
            one.grad = one.grad * 3
        expected = torch.nn.utils.get_total_norm([one.grad for one in others]).double()
        torch.testing.assert_close(plain.clip_grad_norm_(1e-3), expected, rtol=1e-6, atol=0)
        left = torch.nn.utils.get_total_norm([one.grad for one in others]).item()
        assert taken.grad is None and abs(left - 1e-3) < 1e-6


@pytest.mark.parametrize("shards", [False, True])
def test_gradients_are_clipped_by_the_norm_that_they_have_now(shards):
    run_ranks(clipped, 2, shards)


# What goes forward and backward in another order, and copies of the module.


def another_order(rank):
    """A forward in no_sync() between another forward and its backward, and the outputs of both together."""
    expected = weft.DataParallel(mlp())
    loss_of(expected(batch(0, rank))).backward()
    model = weft.DataParallel(mlp())
    for _ in range(2):
        model.zero_grad()
        output, x = model(batch(0, rank)), batch(1, rank).requires_grad_()
        with model.no_sync():
            torch.autograd.grad(model(x).sum(), x)
        loss_of(output).backward()
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
    model.zero_grad()
    output = model(batch(0, rank))
    with model.no_sync():
        also = model(batch(1, rank))
    (loss_of(output) + loss_of(also)).backward()
    loss_of(expected(batch(1, rank))).backward()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_backward_reduces_as_its_own_forward_was_asked():
    run_ranks(another_order, 2)


class GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gives):
        ctx.gives = gives
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        return dy, dy.sum(0) if ctx.gives else None, None


class MayGiveNone(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x, gives):
        return GivesNone.apply(x, self.weight, gives) * self.scale


def undefined(rank):
    model = weft.DataParallel(MayGiveNone(), unused_parameters="zero")
    for gives, expected in ((False, 0.0), (True, 2.0), (False, 0.0), (rank == 0, 1.0)):
        model.zero_grad()
        model(torch.ones(2, 3), gives).sum().backward()
        assert model.module.weight.grad.tolist() == [expected] * 3


def test_a_gradient_of_none_counts_as_zeros_and_not_as_the_last_one():
    run_ranks(undefined, 2)


def copied(rank):
    """A copy has nothing of the wrapper: what is loaded into it leaves the masters alone, and it can be stored."""
    model = weft.DataParallel(mlp(torch.bfloat16), shard_optimizer=True, main_grad=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=1e-4)
    averages = copy.deepcopy(model.module)
    for _ in range(3):
        loss_of(model(batch(0, rank).bfloat16())).backward()
        optimizer.step()
    before = [piece.clone() for piece in optimizer.param_groups[0]["params"]]
    averages.load_state_dict(model.module.state_dict())
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], before))
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    again(batch(0, rank).bfloat16())
    with pytest.raises(TypeError, match="cannot be pickled, .*: save model.module"):
        torch.save(model, io.BytesIO())


def test_copies_of_the_module_know_nothing_of_the_wrapper():
    run_ranks(copied, 2)


# Outputs, hooks, local steps.


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str = "of a kind that torch does not know as a tree"


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(13, 13), mlp()

    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = checkpoint(layer, x, use_reentrant=True)
        return [Output(x)]


def returns_a_dataclass(rank):
    torch.manual_seed(0)
    model = weft.DataParallel(Checkpointed(), bucket_mb=1e-3)
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch(step, rank))[0].logits).backward()
    return model.reducer.backwards


def test_backward_ends_once_whatever_holds_the_outputs():
    assert run_ranks(returns_a_dataclass, 2) == [3, 3]


def half_a_bucket(rank):
    model = weft.DataParallel(mlp())

    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer()[:1])
        return future

    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="the hook's future gave 1 elements for bucket 0, and the bucket has"):
        loss_of(model(batch(0, rank))).backward()


def test_a_hook_that_gives_another_size_is_refused():
    run_ranks(half_a_bucket, 2)


def not_to_be_averaged(rank):
    model = weft.DataParallel(mlp(), shard_optimizer=True)
    inner = model.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="pieces of a sharded one"):
        weft.DiLoCo(inner)
    module = mlp()
    inner = torch.optim.SGD(module[0].parameters(), lr=0.1)
    optimizer = weft.DiLoCo(inner, every=1)
    inner.add_param_group({"params": module[2].parameters()})
    loss_of(module(batch(0, rank))).backward()
    with pytest.raises(RuntimeError, match="was given more parameters since"):
        optimizer.step()


def test_diloco_refuses_what_it_would_not_average():
    run_ranks(not_to_be_averaged, 2)


def with_a_scaler(rank, unscales):
    """An overflow on one rank leaves out its inner step, and the ranks still meet in the same call."""
    results = []
    for scaled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = weft.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), every=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(9):
            overflows = rank == 1 and step in (1, 4)
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), 1.0 + rank + step)).square().mean()
            if scaled:
                scaler.scale(loss * float("inf") if overflows else loss).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                (loss * (not overflows)).backward()
                optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("unscales", [False, True])
def test_diloco_counts_the_steps_that_a_scaler_leaves_out(unscales):
    run_ranks(with_a_scaler, 2, unscales)
