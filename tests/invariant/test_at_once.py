"""Several units of a batch in one call: the bits of calls unit by unit, for whatever a model does."""

import gc
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from same_bits import assert_same_bits, make_model
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import weft
from weft.data_parallel.batch_units import one_unit_at_a_time
from weft.invariant.at_once import AtOnce
from weft.invariant.known_calls import KnownCalls
from weft.testing.ranks import run_ranks, try_ranks

BITS_OF_ROWS = Path(__file__).parents[1] / "helpers/bits_of_rows.py"


@pytest.mark.parametrize(
    "capability",
    ["default", *(pytest.param(name, marks=pytest.mark.slow("pytorch_ext/invariant")) for name in ("avx2", "avx512"))],
)
def test_functions_give_a_row_the_same_bits_beside_any_others(capability):
    """ATen has no AVX-512 on some processors, and takes the best that there is."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, BITS_OF_ROWS], capture_output=True, text=True, env=environment)
    assert done.stdout == "other bits: []\n", done.stdout + done.stderr


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other_norm = RMSNorm(), nn.RMSNorm(16)
        self.up, self.down, self.drop = nn.Linear(16, 50), nn.Linear(50, 16), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(self.other_norm(x))))))


class Tied(nn.Module):
    """A matrix in a lookup and in a product, a block that runs twice, and positions."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.block = nn.Embedding(17, 16), nn.Parameter(torch.randn(9, 16)), Block()
        self.out = nn.Linear(16, 17, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        x = self.words((x[..., 0].abs() * 5).long().clamp(max=16)) + self.positions[: x.size(1)]
        return self.out(self.block(self.block(x)))


class Attends(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.qkv, self.out, self.norm = heads, nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Image(nn.Module):
    """A token of its own before those of patches."""

    def __init__(self):
        super().__init__()
        self.first, self.patches = nn.Parameter(torch.randn(1, 1, 16)), nn.Conv1d(16, 16, 3)
        self.norm, self.attention, self.block = nn.GroupNorm(2, 16), Attends(1), Block()

    def forward(self, x):
        x = self.norm(self.patches(x.transpose(1, 2))).transpose(1, 2)
        return self.block(self.attention(torch.cat([self.first.expand(x.size(0), -1, -1), x], 1)))[:, 0]


class Adapted(nn.Module):
    """Parameters made of others, a frozen one, and a checkpoint."""

    def __init__(self):
        super().__init__()
        self.frozen, self.block = nn.Linear(16, 16), Block()
        self.frozen.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(16, 4))
        self.normed, self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = self.frozen(x) + F.linear(F.linear(x, self.down), self.up) * self.scale.exp()
        y = checkpoint(lambda y: self.block(self.normed(y)), y, use_reentrant=False)
        return F.relu(y @ (self.frozen.weight * self.scale), inplace=True)


class Does(nn.Module):
    """A linear layer and a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function, self.rnn = nn.Linear(16, 16), function, nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        return self.function(self, self.layer(x))


def write(module, y):
    y = y * 1
    y[:, 0] = 0
    return y


AT_ONCE = {
    "block": Block,
    "tied": Tied,
    "attends": lambda: Attends(1),
    "attends in heads": lambda: Attends(4),
    "image": Image,
    "adapted": Adapted,
    "in place": lambda: Does(lambda module, y: y.add_(1).mul_(0.5)),
    "of other sizes": lambda: Does(lambda module, y: y.view(-1, y.size(-1)).softmax(-1).view(y.shape).cumsum(-1)),
    "grouped": lambda: Does(lambda module, y: y[:, :, None].expand(y.size(0), y.size(1), 3, 16).sum(2)),
    "rolled": lambda: Does(lambda module, y: y.roll(1, 0)),
    "einsum": lambda: Does(lambda module, y: torch.einsum("btd,de->bte", y, module.layer.weight)),
}
UNIT_BY_UNIT = {
    "attention of torch": lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
    "recurrence": lambda: Does(lambda module, y: module.rnn(y)[0]),
    "rows of the batch": lambda: Does(lambda module, y: y - y.mean(0)),
    "number of rows": lambda: Does(lambda module, y: y / len(y)),
    "positions first": lambda: Does(lambda module, y: module.layer(y.transpose(0, 1)).transpose(0, 1)),
    "values": lambda: Does(lambda module, y: y if y.sum() > 0 else -y),
    "random": lambda: Does(lambda module, y: y + torch.rand_like(y)),
    "other random": lambda: Does(lambda module, y: y * torch.rand(len(y), 1, 1).round()),
    "written": lambda: Does(write),
    "twice": lambda: Does(lambda module, y: y + y.std(0, keepdim=True).expand(y.shape)),
    "unseen": lambda: Does(lambda module, y: y * torch.from_numpy(y.detach().numpy().copy())),
}


def recording(seen):
    """Append the class of each call at once to a list."""
    call = KnownCalls._call
    KnownCalls._call = lambda self, functions, *args: (
        seen.append(type(functions).__name__),
        call(self, functions, *args),
    )[1]


def loss_of(kind):
    """Return a function of a model and its input: the output, or a loss in units."""

    def cross_entropy(model, x):
        with torch.no_grad(), one_unit_at_a_time():
            sizes = model.eval()(x).shape[:-1]
        to = torch.arange(sizes.numel()).view(sizes) % 3
        model.train()
        return model.in_units(lambda x, to: F.cross_entropy(model(x).flatten(0, -2).float(), to.flatten()), x, to)

    return {
        "none": lambda model, x: model(x),
        "mean": lambda model, x: model.in_units(lambda x: 0.5 * model(x).float().square().mean() + 1, x),
        "cross entropy": cross_entropy,
    }[kind]


def train(make, kind, loss, alone, before=None, steps=4):
    """Return outputs and gradients of some steps, and the state of random numbers after them."""
    torch.manual_seed(0)
    model = weft.DataParallel(make().to(kind), invariant=4, unused_parameters="zero")
    found = []
    for step in range(steps):
        x = torch.randn(8, 9, 16, generator=torch.Generator().manual_seed(step)).to(kind).requires_grad_()
        model.zero_grad()
        if before is not None:
            before(model.module, step)
        with one_unit_at_a_time() if alone else nullcontext():
            y = loss(model, x)
        (y if y.dim() == 0 else y.float().square().sum()).backward()
        found.append([y.detach(), x.grad, *[p.grad for p in model.parameters()]])
    model.eval()
    with torch.no_grad(), one_unit_at_a_time() if alone else nullcontext():
        found += [[model(x)] for _ in range(2)]
    return [*found, [torch.get_rng_state()]]


def bits(rank, make, kind, loss, before=None, steps=4):
    """Return whether all steps have the bits of calls unit by unit, and the classes of the calls at once."""
    expected, seen = train(make, kind, loss, True, before, steps), []
    recording(seen)
    found = train(make, kind, loss, False, before, steps)
    pairs = [pair for step in zip(found, expected, strict=True) for pair in zip(*step, strict=True)]
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs), seen


@pytest.mark.parametrize("loss", ["none", "mean", "cross entropy"])
@pytest.mark.parametrize("name", AT_ONCE)
def test_units_at_once_have_the_bits_of_units_alone(name, loss):
    for kind in (torch.float32, torch.bfloat16):
        ((same, seen),) = run_ranks(bits, 1, AT_ONCE[name], kind, loss_of(loss))
        assert same, kind
        assert seen == ["Trial", "AtOnce", "AtOnce", "AtOnce", "Trial", "AtOnce"], seen


@pytest.mark.parametrize("name", UNIT_BY_UNIT)
def test_what_is_not_alone_in_its_row_runs_unit_by_unit(name):
    ((same, seen),) = run_ranks(bits, 1, UNIT_BY_UNIT[name], torch.float32, loss_of("none"))
    assert same
    assert seen[:3] == ["Trial"] * 3  # of the steps; without gradients some may run at once


def train_a_family(rank, family, attention, kind):
    model = weft.parallelize(make_model(family, attention).to(kind), weft.init_mesh(), invariant=4)

    def step(tokens):
        model.zero_grad()
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return [output.loss.detach(), output.logits.detach(), *[p.grad for p in model.parameters()]]

    for number in range(3):
        tokens = torch.randint(0, 104, (8, 13), generator=torch.Generator().manual_seed(number))
        found = step(tokens)
        with one_unit_at_a_time():
            assert all(map(torch.equal, found, step(tokens)))
    return [learnt is not None for learnt in model._batch.known._learnt.values()]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("gpt2", "sdpa"), ("gemma", "sdpa"), ("qwen2", "sdpa")]
)
def test_models_of_transformers_run_at_once(family, attention, kind):
    assert run_ranks(train_a_family, 1, family, attention, kind) == [[True]]


class Holds(Does):
    """A layer, a norm, words, parameters of its own and a number that changes from step to step."""

    def __init__(self, function):
        super().__init__(function)
        self.norm, self.words, self.kept = nn.LayerNorm(16), nn.Embedding(5, 16), None
        self.weight, self.other, self.number = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16)), 0.0


def masked(model, x):
    def loss(x, shown):
        return model(x)[shown].float().square().mean()

    return model.in_units(loss, x, x[..., 0].detach() > -10 * (model.module.number == 0))


def auxiliary(model, x):
    def loss(x):
        y = model(x).float()
        return y.abs().mean() + model.module.number * y.square().sum() / x.size(0)

    return model.in_units(loss, x)


def uses_three_times(module, y):
    first = module.weight.exp()
    y = y * module.weight
    return (torch.tanh(y) + y * module.weight) * first


def normed_twice(module, y):
    more = module.norm.weight + 1
    return module.norm(module.layer(module.norm(y))) * more


def looked_up_twice(module, y):
    normed, ids = F.normalize(module.words.weight, dim=-1), (y[..., 0].abs() * 3).long().clamp(max=3)
    y = module.layer(module.words(ids) + module.words(ids + 1) * y)
    return torch.einsum("btd,vd->btv", y, normed)


def in_checkpoints(module, y):
    offset = module.words(torch.arange(y.size(1)) % 5).mean(-1) * module.other[0]
    return checkpoint(lambda y: module.layer(y) * offset[:, None], y, use_reentrant=False)


def keeps_a_size(module, y):
    if module.kept is None:
        module.kept = torch.ones(y.size(0), 1, 1)
    return y * module.kept


HABITS = {
    "a mask of other counts": (lambda module, y: y, masked),
    "noise": (lambda module, y: y + torch.randn_like(y), None),
    "a dropout that begins later": (lambda module, y: F.dropout(y, module.number, module.training), None),
    "a loss that begins later": (lambda module, y: y, auxiliary),
    "a gradient by the number of rows": (lambda module, y: y.detach() + (y - y.detach()) / len(y), None),
    "a parameter in three places": (uses_three_times, None),
    "a norm in two places": (normed_twice, None),
    "words in three places": (looked_up_twice, None),
    "a value of parameters in checkpoints": (in_checkpoints, None),
    "one tensor in three places": (lambda module, y: y.tanh() + torch.addcmul(y, y, y), None),
    "a size that is kept": (keeps_a_size, None),
    "writes to its input": (lambda module, y: module.layer(y.detach().mul_(0.5)), None),
}


def begin_later(module, step):
    module.number = 0.0 if step < 2 else 0.3


@pytest.mark.parametrize("name", HABITS)
def test_habits_of_models_keep_their_bits(name):
    function, loss = HABITS[name]
    for kind in (torch.float32, torch.bfloat16):
        ((same, _),) = run_ranks(bits, 1, lambda: Holds(function), kind, loss or loss_of("none"), begin_later, 5)
        assert same, kind


def give_other_things(rank):
    """Return what calls give that is no tensor, and outputs of inputs with other strides."""
    found = []
    for function in (
        lambda module, y: (y, y.numel()),
        lambda module, y: None,
        lambda module, y: {"a": (y, "text", None)},
    ):
        model = weft.DataParallel(Does(function), invariant=4)
        outputs = [model(torch.ones(8, 9, 16)) for _ in range(3)]
        found.append(
            [tree_map(lambda x: x if not isinstance(x, torch.Tensor) else len(x), output) for output in outputs]
        )
    model = weft.DataParallel(Does(lambda module, y: y * y.sum(-1, keepdim=True)), invariant=4)
    x = torch.randn(16, 9, 8).permute(2, 1, 0)
    y = [model(x.contiguous()) for _ in range(2)][1]
    return found, torch.equal(model(x), y)


def test_outputs_that_are_no_tensors_do_not_change():
    (((numbers, nothing, trees), same_for_any_strides),) = run_ranks(give_other_things, 1)
    assert numbers == [(8, 2 * 9 * 16)] * 3
    assert nothing == [None] * 3
    assert trees == [{"a": (8, "text", None)}] * 3
    assert same_for_any_strides


def train_with_masks(rank):
    """Train with masks, so that ranks learn in other steps."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = weft.DataParallel(nn.Linear(16, 16), invariant=4)
    found = {}
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        x, shown = torch.randn(8, 9, 16, generator=draw), torch.rand(8, 9, generator=draw) > 0.3
        shown[:4] |= step < 2
        x, shown = x.chunk(world)[rank], shown.chunk(world)[rank]
        loss = model.in_units(lambda x, shown: model(x)[shown].square().mean(), x, shown)
        loss.backward()
        found |= {f"{step} loss": loss.detach(), f"{step} gradient": model.module.weight.grad.clone()}
    return found


def test_ranks_that_learn_in_other_steps_have_the_same_bits():
    (of_one,) = run_ranks(train_with_masks, 1)
    for world in (2, 4):
        assert_same_bits(of_one, run_ranks(train_with_masks, world))


class Mixed(nn.Module):
    """Words, an adapted block, attention, and a matrix that is tied."""

    def __init__(self):
        super().__init__()
        self.words, self.adapted, self.attention = nn.Embedding(24, 16), Adapted(), Attends(2)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        return self.out(self.norm(self.attention(self.adapted(self.words(tokens)))))


def train_on_a_mesh(rank, sizes, units, context, kind):
    torch.manual_seed(0)
    mesh = weft.init_mesh(**sizes)
    model = weft.parallelize(Mixed().to(kind), mesh, plan=None, invariant=units, **context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, seen = {}, []
    recording(seen)
    for step in range(4):
        tokens = torch.randint(0, 24, (12, 7), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        loss = model.in_units(lambda x: F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()), tokens)
        loss.backward()
        named = model.module.named_parameters()
        found |= {f"{step} gradient {name}": p.grad.clone() for name, p in named if p.requires_grad}
        found |= {f"{step} loss": loss.detach(), f"{step} norm": weft.clip_grad_norm_(model, 0.5)}
        optimizer.step()
        optimizer.zero_grad()
    assert len(model._batch.here) == 1 or seen[-1] == "AtOnce", seen
    return found


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("units", "context", "meshes"),
    [
        (6, {}, ({"dp": 2}, {"dp": 3}, {"dp": 6})),
        (12, {}, ({"dp": 2}, {"dp": 3}, {"dp": 4})),
        (6, {"context": {"units": 3}}, ({"cp": 3}, {"dp": 2})),
        (4, {"context": {"units": 2}}, ({"cp": 2}, {"dp": 2, "cp": 2})),
    ],
)
def test_any_number_of_units_has_the_same_bits_on_any_ranks(units, context, meshes, kind):
    (of_one,) = run_ranks(train_on_a_mesh, 1, {}, units, context, kind)
    for sizes in meshes:
        assert_same_bits(of_one, run_ranks(train_on_a_mesh, math.prod(sizes.values()), sizes, units, context, kind))


def count_tensors(rank, sizes, context):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), Adapted(), Attends(1), nn.LayerNorm(16), nn.Linear(16, 20))
    model = weft.parallelize(model, weft.init_mesh(**sizes), plan=None, invariant=4, **context)
    counts, seen = [], []
    recording(seen)
    for _ in range(3):
        for _ in range(3):
            model(torch.zeros(8, 12, dtype=torch.long)).sum().backward()
        gc.collect()
        counts.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))
    return counts, seen[-1]


@pytest.mark.parametrize(("sizes", "context"), [({}, {}), ({"cp": 2}, {"context": {"units": 2}})])
def test_no_tensors_are_left_of_a_step(sizes, context):
    for (_, second, third), last in run_ranks(count_tensors, max(sizes.values(), default=1), sizes, context):
        assert last == "AtOnce"
        assert second == third


class Wanders(nn.Module):
    """Calls another function in each third forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.after = nn.Linear(16, 16), torch.tanh

    def forward(self, x):
        return self.after(self.layer(x))


def change_the_path(rank):
    model = weft.DataParallel(Wanders(), invariant=4)
    seen, found = [], []
    recording(seen)
    x = torch.randn(8, 16)
    for function in (torch.tanh, torch.tanh, *[torch.relu, torch.tanh] * 3, torch.tanh):
        model.module.after = function
        y = model(x)
        with one_unit_at_a_time():
            found.append(torch.equal(y, model(x)))
    return found, seen


def test_a_forward_that_leaves_its_path_runs_unit_by_unit():
    ((same, seen),) = run_ranks(change_the_path, 1)
    assert all(same)
    # A path, and five times another one. Then no trial is made, until other parameters train.
    assert seen == ["Trial", "AtOnce", *["AtOnce", "Trial"] * 4, "AtOnce"]


def misuse(rank):
    model = weft.DataParallel(nn.Linear(16, 16), invariant=4)
    x = torch.randn(8, 16)
    for _ in range(2):
        model(x).sum().backward()

    def plain(self, func, args, kwargs):
        self._number += 1
        return func(*args, **kwargs)

    AtOnce.function = plain
    model(x).sum().backward()


def test_a_gradient_of_several_units_together_raises():
    (outcome,) = try_ranks(misuse, 1)
    assert "a gradient of several units together" in str(outcome.error)
