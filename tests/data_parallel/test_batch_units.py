"""Batches in units: the same bits on any number of ranks that share the batch, alone and with split layers."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from interpreter import by_kernels, in_the_interpreter
from same_bits import assert_same_bits, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.data_parallel import batch_units, grad_norm
from weft.invariant import unit_sums
from weft.testing.models import Llama
from weft.testing.ranks import run_ranks, try_ranks

slow = pytest.mark.slow("csrc", "pytorch_ext/ops", "pytorch_ext/tensor_parallel", "pytorch_ext/data_parallel")


class Words(nn.Module):
    """Layers of every kind with parameters: embedding, positions, norms, attention with dropout, a recurrence, a tied matrix."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(17, 24), nn.Parameter(torch.randn(9, 24))
        self.recurrent = nn.GRU(24, 24, batch_first=True)
        self.norm, self.attention = nn.LayerNorm(24), nn.MultiheadAttention(24, 4, dropout=0.1, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(24, 50), nn.Linear(50, 24), nn.Dropout(0.2)
        self.out = nn.Linear(24, 17, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.positions[: tokens.size(1)]
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.recurrent(x)[0]
        return self.out(x + self.down(self.drop(F.gelu(self.up(x)))))


def batch_of(step, sequences, rank, world):
    draw = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, 17, (2, sequences, 9), generator=draw).chunk(world, 1)[rank]
    return tokens, targets


def loss_of(logits, targets, **options):
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten(), **options)


def train_words(rank, units, loss, kind, steps):
    """Train on batches of two sequences for each unit; every other step adds up the gradients of two batches."""
    world = dist.get_world_size()
    torch.manual_seed(rank)  # the model and its random numbers are rank 0's
    model = weft.DataParallel(Words().to(kind), average=loss != "sum outside", invariant=units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        for part in range(1 + step % 2):
            tokens, targets = batch_of(2 * step + part, 2 * units, rank, world)
            if loss == "in units":
                result = model.in_units(lambda x, y: loss_of(model(x), y), tokens, targets)
                found[f"{step} loss"] = result.detach()
            elif loss == "sum outside":
                result = loss_of(model(tokens), targets, reduction="sum") / (2 * units * 9)
            else:
                result = loss_of(model(tokens), targets)
            result.backward()
        found |= {f"{step} gradient {name}": p.grad.clone() for name, p in model.module.named_parameters()}
        found[f"{step} norm"] = weft.clip_grad_norm_(model, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{step} {name}": p.detach().clone() for name, p in model.module.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("loss", "units", "worlds", "kind", "steps"),
    [
        ("in units", 12, (2, 3), torch.float32, 2),
        ("in units", 8, (2,), torch.bfloat16, 2),
        ("sum outside", 12, (3,), torch.float32, 2),
        ("mean outside", 8, (4,), torch.float32, 2),
        pytest.param("in units", 12, (1, 2, 3, 4, 6), torch.bfloat16, 20, marks=slow),
        pytest.param("in units", 8, (2, 4, 8), torch.float32, 20, marks=slow),
    ],
)
def test_every_number_of_ranks_trains_to_the_same_bits(loss, units, worlds, kind, steps):
    (of_one,) = run_ranks(train_words, 1, units, loss, kind, steps)
    for world in worlds:
        assert_same_bits(of_one, run_ranks(train_words, world, units, loss, kind, steps))


def compare_with_one_model_in_fp64(rank, units):
    world = dist.get_world_size()
    torch.manual_seed(1)
    whole = Words().eval()
    model = weft.DataParallel(whole, invariant=units).eval()
    exact = Words().double().eval()
    exact.load_state_dict(whole.state_dict())
    tokens, targets = batch_of(0, 2 * units, 0, 1)
    wanted = loss_of(exact(tokens), targets)
    wanted.backward()
    own, own_targets = batch_of(0, 2 * units, rank, world)
    loss = model.in_units(lambda x, y: loss_of(model(x), y), own, own_targets)
    loss.backward()
    torch.testing.assert_close(loss.double(), wanted, atol=1e-5, rtol=1e-5)
    for (name, p), q in zip(whole.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, atol=1e-6, rtol=1e-4, msg=name)
    norm = math.sqrt(sum(q.grad.square().sum().item() for q in exact.parameters()))
    assert math.isclose(model.grad_norm, norm, rel_tol=1e-5)
    assert torch.equal(weft.clip_grad_norm_(model, 1e9), model.grad_norm)
    torch.testing.assert_close(model(own).double(), exact(own), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("units", "world"), [(4, 1), (6, 3)])
def test_gradients_are_those_of_the_whole_batch(units, world):
    run_ranks(compare_with_one_model_in_fp64, world, units)


class Llama24(Llama):
    """Llama of four heads of keys and eight of queries."""

    KV_HEADS, HIDDEN, WORDS = 4, 40, 32


def keep(found, text, model, value_of):
    for name, parameter in model.module.named_parameters():
        shard, value = weft.shard_of(parameter), value_of(parameter).detach()
        found[f"{text} {name}"] = (value if shard is None else shard.gather(value)).clone()


def train_a_model(rank, family, attention, kind, dp, steps):
    """Train a model of transformers, whose loss comes from its forward, or a Llama with its loss in units."""
    torch.manual_seed(0)
    model = (Llama24(1) if family is None else make_model(family, attention)).to(kind)
    mesh = weft.init_mesh(dp=dp, tp=dist.get_world_size() // dp)
    model = weft.parallelize(model, mesh, invariant=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 32, (8, 13), generator=draw).chunk(dp)[mesh["dp"].get_local_rank()]
        if family is None:
            logits = model(tokens)
            loss = model.in_units(lambda x: loss_of(model(x), x), tokens)
        else:
            output = model(input_ids=tokens, labels=tokens)
            loss, logits = output.loss, output.logits
        loss.backward()
        found[f"{step} logits"] = weft.all_gather(logits.detach(), group=mesh["dp"])
        found[f"{step} loss"] = loss.detach()
        keep(found, f"{step} gradient", model, lambda parameter: parameter.grad)
        found[f"{step} norm"] = weft.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        keep(found, f"{step}", model, lambda parameter: parameter)
    return found


@in_the_interpreter
@pytest.mark.kernel
@slow
def test_a_model_by_kernels_trains_to_the_same_bits_on_any_mesh():
    with by_kernels():  # the interpreter takes most of a minute beside other tests
        (of_one,) = run_ranks(train_a_model, 1, None, "", torch.float32, 1, 1, timeout_s=140)
        assert_same_bits(of_one, run_ranks(train_a_model, 4, None, "", torch.float32, 2, 1, timeout_s=140))


@pytest.mark.parametrize(
    ("family", "attention", "kind", "steps", "meshes"),
    [
        (None, "", torch.float32, 2, ((4, 2),)),
        *(
            pytest.param(*case, ((2, 2), (4, 2), (4, 1)), marks=slow)
            for case in (
                ("llama", "sdpa", torch.float32, 20),
                ("gpt2", "eager", torch.bfloat16, 20),
                ("gemma", "sdpa", torch.float32, 3),
                ("qwen2", "sdpa", torch.bfloat16, 3),
            )
        ),
    ],
)
def test_models_train_to_the_same_bits_on_any_mesh(family, attention, kind, steps, meshes):
    (of_one,) = run_ranks(train_a_model, 1, family, attention, kind, 1, steps)
    for world, dp in meshes:
        assert_same_bits(of_one, run_ranks(train_a_model, world, family, attention, kind, dp, steps))


def make_units_of_ranks(self, module, ranks, units, *options):
    make_units(self, module, ranks, ranks.world_size, *options)


def add_in_rank_order(ranks, units, local):
    parts = ranks.all_gather(local.sum(0, keepdim=True), 0, [1] * ranks.world_size)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def draw_on_each_rank(self, arguments):
    whole, size, seed = agree(self, arguments)
    return whole, size, None if seed is None else seed + self.ranks.rank


make_units, agree = batch_units.BatchUnits.__init__, batch_units.BatchUnits._agreed
FAULTS = {
    "none": lambda: None,
    "kernels that follow the ranks' batch": lambda: setattr(batch_units.BatchUnits, "__init__", make_units_of_ranks),
    "rank order": lambda: setattr(unit_sums, "sum_over_nodes", add_in_rank_order),
    "random numbers of ranks": lambda: setattr(batch_units.BatchUnits, "_agreed", draw_on_each_rank),
}


def train_with_a_fault(rank, fault):
    FAULTS[fault]()
    found = train_words(rank, 12, "in units", torch.float32, 1)
    return {name: value for name, value in found.items() if "gradient" in name}


def test_a_fault_is_seen_in_the_bits():
    (of_one,) = run_ranks(train_with_a_fault, 1, "none")
    for fault in FAULTS:
        found = run_ranks(train_with_a_fault, 2, fault)[0]
        same = all(torch.equal(value, found[name]) for name, value in of_one.items())
        assert same == (fault == "none"), fault


def norms(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 40), nn.Linear(40, 7))
    plan = {"0": "column", "2": "row"}
    weft.parallelize(model, weft.init_mesh(tp=dist.get_world_size())["tp"], plan=plan, invariant=4)
    model(torch.randn(5, 40)).square().sum().backward()
    found = [weft.clip_grad_norm_(model, 1e9, norm_type=p) for p in (2.0, math.inf)]
    whole = [p.grad if (s := weft.shard_of(p)) is None else s.gather(p.grad) for p in model.parameters()]
    exact = torch.cat([g.double().flatten() for g in whole])
    torch.testing.assert_close(torch.stack(found), torch.stack([exact.norm(), exact.abs().max()]), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="the norm is 2 or inf"):
        weft.clip_grad_norm_(model, 1.0, norm_type=3.0)
    for p in model.parameters():
        p.grad.zero_()
    assert weft.clip_grad_norm_(model, 1.0) == 0
    model[2].bias.grad[0] = math.nan
    assert weft.clip_grad_norm_(model, 1.0).isnan()
    return found


def test_the_norm_does_not_follow_the_ranks():
    of_one = run_ranks(norms, 1)[0]
    assert run_ranks(norms, 4) == [of_one] * 4


@pytest.mark.parametrize(("scale", "kind"), [(1e-30, torch.float32), (3e38, torch.bfloat16), (1e300, torch.float64)])
def test_sums_of_squares_are_exact_in_any_order(scale, kind):
    g = (torch.randn(100_003) * torch.rand(100_003).pow(8)).clamp(-1, 1).double().mul(scale).to(kind)
    exponent = int(torch.frexp(g.abs().max().double()).exponent)
    sums = grad_norm._squares([g], exponent)
    parts = [grad_norm._squares([part], exponent) for part in g[torch.randperm(len(g))].split([7, 60_000, 39_996])]
    assert torch.equal(sums, sum(parts))
    relative = (g.double() * math.ldexp(1.0, -exponent)).square().sum()
    torch.testing.assert_close(sums.sum(), relative, rtol=1e-9, atol=0)


class Sometimes(nn.Module):
    """The second layer takes part only where the first token is 1."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.always(x)
        return y + self.sometimes(x) if x[0, 0] == 1 else y


def train_sometimes(rank, unused):
    torch.manual_seed(0)
    model = weft.DataParallel(Sometimes(), invariant=4, unused_parameters=unused, average=False)
    x = torch.randn(4, 4)
    x[:, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    model(x.chunk(dist.get_world_size())[rank]).square().sum().backward()
    return {name: p.grad for name, p in model.module.named_parameters()}


def test_units_without_a_gradient_count_as_zeros():
    (of_one,) = run_ranks(train_sometimes, 1, "zero")
    assert of_one["sometimes.weight"].any()
    for world in (2, 4):
        assert_same_bits(of_one, run_ranks(train_sometimes, world, "zero"))
        for outcome in try_ranks(train_sometimes, world, "error"):
            assert "'sometimes.weight' in 3, 'sometimes.bias' in 3" in str(outcome.error)


class Keeps(nn.Module):
    """A module that has a fault of its own in forward."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.layer = fault, nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.kept = [self.layer.weight]

    def forward(self, x):
        if self.fault == "buffer":
            self.seen += 1
        if self.fault == "other buffer":
            self.seen = self.seen + 1
        if self.fault == "kept":
            return self.layer(x) + x @ self.kept[0]
        if self.fault == "reentrant":
            return checkpoint(self.layer, x.requires_grad_(), use_reentrant=True).sum()
        return self.layer(x).sum(0) if self.fault == "shape" and x[0, 0, 0] > 0 else self.layer(x)


def make_what_is_refused(rank, world):
    def refused(text, call, error=ValueError):
        with pytest.raises(error, match=text):
            call()

    def of(fault="", **options):
        return weft.DataParallel(Keeps(fault), **{"invariant": 4, **options})

    refused("the 2 ranks that share the batch must divide it", lambda: of(invariant=3))
    refused("shard_optimizer=True is not supported with invariant=4", lambda: of(shard_optimizer=True))
    refused("main_grad=True is not supported", lambda: of(main_grad=True))
    refused("wire_dtype=torch.bfloat16 is not supported", lambda: of(wire_dtype=torch.bfloat16))
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    refused("1 is a BatchNorm1d", lambda: weft.DataParallel(norm, invariant=4))
    refused("1 is a BatchNorm1d", lambda: weft.parallelize(norm, weft.init_mesh(dp=2), plan=None, invariant=4))
    refused("is compiled", lambda: weft.DataParallel(torch.compile(nn.Linear(4, 4)), invariant=4))
    refused("needs invariant=None", lambda: of().register_comm_hook(None, print))
    refused("make the model with", lambda: weft.DataParallel(nn.Linear(4, 4)).in_units(print))
    mesh = weft.init_mesh(tp=2)
    split = weft.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], plan={"0": "column"})
    refused(
        "0.weight is split over 2 ranks without units", lambda: weft.DataParallel(split, group=mesh["dp"], invariant=4)
    )
    x = torch.zeros(4, 2, 4)
    refused("must be 4 equal units together, 2 on each rank; .* can be 2, 6", lambda: of()(x[:3]))
    refused("batches of (4, 2|2, 4)|4, 2 must be", lambda: of()(x[: 4 - 2 * rank]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    refused("compute in 1, 2 threads", lambda: of()(x))
    torch.set_num_threads(threads)
    refused(r"shape \(2,\) beside a batch of 4", lambda: of().in_units(print, x, torch.zeros(2)))
    refused("scalar of torch.int64", lambda: of().in_units(lambda x: x.sum().long(), x), TypeError)
    x[2:, 0, 0] = 1
    refused("outputs of units have the shapes", lambda: of("shape")(x))
    refused("forward changed the buffers seen", lambda: of("buffer")(x), RuntimeError)
    refused("forward changed the buffers seen", lambda: of("other buffer")(x), RuntimeError)
    text = "'layer.* is used as a parameter of the module"
    refused(text, lambda: of("kept", unused_parameters="zero")(x), RuntimeError)
    reentrant = of("reentrant", unused_parameters="zero")
    refused("pass use_reentrant=False", lambda: reentrant(x), RuntimeError)
    refused("pass use_reentrant=False", lambda: reentrant.eval()(x), RuntimeError)
    sparse = weft.DataParallel(nn.Embedding(5, 3, sparse=True), invariant=4)
    refused("must be dense", lambda: sparse(torch.zeros(4, 1, dtype=torch.int64)).sum().backward(), TypeError)


def test_what_has_no_form_in_units_is_refused():
    run_ranks(make_what_is_refused, 2, 2)


def average_over_three(rank):
    model = weft.DataParallel(nn.Linear(4, 4), invariant=6)
    with pytest.raises(ValueError, match="rounds in another way than one process"):
        model(torch.ones(2, 4)).mean().backward()
    model.in_units(lambda x: model(x).mean(), torch.ones(2, 4)).backward()
    with torch.no_grad():
        return model(torch.ones(2, 4)).shape


def test_an_average_over_three_ranks_is_computed_in_units():
    assert run_ranks(average_over_three, 3) == [torch.Size([2, 4])] * 3


def train_on(rank, folder, kind, dp, first, last):
    """Train from step `first`, which a checkpoint has, to step `last`, and save one there."""
    torch.manual_seed(17 + rank)
    mesh = weft.init_mesh(dp=dp, tp=dist.get_world_size() // dp)
    if kind is Words:
        model = weft.DataParallel(Words(), invariant=4)
    else:
        torch.manual_seed(0)
        model = weft.parallelize(Llama24(1), mesh, invariant=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first:
        assert weft.load_checkpoint(model, optimizer, folder).step == first
    for step in range(first, last):
        tokens, targets = batch_of(step, 8, mesh["dp"].get_local_rank(), dp)
        model.in_units(lambda x, y: loss_of(model(x), y), tokens, targets).backward()
        weft.clip_grad_norm_(model, 0.3)
        optimizer.step()
        optimizer.zero_grad()
    weft.save_checkpoint(model, optimizer, folder, step=last)
    return {**weft.full_state_dict(model), "random": torch.rand(2)}


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [(Words, ((4, 4), (1, 1), (2, 2))), pytest.param(Llama24, ((4, 2), (2, 1), (4, 4), (2, 2), (4, 1)), marks=slow)],
)
def test_a_run_goes_on_with_other_ranks_as_if_it_was_not_interrupted(kind, meshes, tmp_path):
    (alone,) = run_ranks(train_on, 1, tmp_path / "alone", kind, 1, 0, len(meshes))
    for step, (world, dp) in enumerate(meshes):
        found = run_ranks(train_on, world, tmp_path / "several", kind, dp, step, step + 1)[0]
    assert_same_bits(alone, [found])
