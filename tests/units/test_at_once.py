"""Several units of a batch in one call: the bits of calls unit by unit, for whatever a model does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from same_bits import make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.data_parallel.batch_units import BatchUnits, one_unit_at_a_time
from weft.testing.ranks import run_ranks, try_ranks
from weft.units.at_once import AtOnce

BITS_OF_ROWS = Path(__file__).parents[1] / "helpers/bits_of_rows.py"


@pytest.mark.parametrize(
    "capability",
    ["default", *(pytest.param(name, marks=pytest.mark.slow("pytorch_ext/units")) for name in ("avx2", "avx512"))],
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
        self.layer, self.function = nn.Linear(16, 16), function

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


def bits(rank, make, kind, loss):
    """Return whether three steps have the bits of calls unit by unit, and the classes of the calls at once."""
    torch.manual_seed(0)
    module = make()
    if isinstance(module, Does):
        module.rnn = nn.GRU(16, 16, batch_first=True)
    model = weft.DataParallel(module.to(kind), invariant=4, unused_parameters="zero")
    seen = []
    call = BatchUnits._call
    BatchUnits._call = lambda self, functions, *args: (
        seen.append(type(functions).__name__),
        call(self, functions, *args),
    )[1]

    def step(x):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(7)
        if loss == "none":
            y = model(x)
            y.float().square().sum().backward()
        elif loss == "mean":
            y = model.in_units(lambda x: 0.5 * model(x).float().square().mean() + 1, x)
            y.backward()
        else:
            y = model.in_units(
                lambda x, to: F.cross_entropy(model(x).flatten(0, -2).float(), to.flatten()), x, target_of(x)
            )
            y.backward()
        return [y.detach(), *[p.grad for p in (x, *model.parameters()) if p.grad is not None]]

    def target_of(x):
        with torch.no_grad(), one_unit_at_a_time():
            sizes = model(x).shape[:-1]
        return torch.arange(sizes.numel()).view(sizes) % 3

    same = []
    for _ in range(3):
        x = torch.randn(8, 9, 16).to(kind).requires_grad_()
        found = step(x)
        with one_unit_at_a_time():
            expected = step(x)
        same.append(len(found) == len(expected) and all(map(torch.equal, found, expected)))
    model.eval()
    seen.append("eval")
    with torch.no_grad():
        outputs = [model(x) for _ in range(2)]
        with one_unit_at_a_time():
            outputs.append(model(x))
    return all(same), seen, all(torch.equal(y, outputs[0]) for y in outputs)


@pytest.mark.parametrize("loss", ["none", "mean", "cross entropy"])
@pytest.mark.parametrize("name", AT_ONCE)
def test_units_at_once_have_the_bits_of_units_alone(name, loss):
    for kind in (torch.float32, torch.bfloat16):
        ((same, seen, same_in_eval),) = run_ranks(bits, 1, AT_ONCE[name], kind, loss)
        assert same and same_in_eval, kind
        assert seen == ["Trial", "AtOnce", "AtOnce", "eval", "Trial", "AtOnce"], seen


@pytest.mark.parametrize("name", UNIT_BY_UNIT)
def test_what_is_not_alone_in_its_row_runs_unit_by_unit(name):
    ((same, seen, same_in_eval),) = run_ranks(bits, 1, UNIT_BY_UNIT[name], torch.float32, "none")
    assert same and (same_in_eval or "random" in name)
    assert "AtOnce" not in seen[: seen.index("eval")]


def train(rank, family, attention, kind):
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
    return [learnt is not None for learnt in model._batch._learnt.values()]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("gpt2", "sdpa"), ("gemma", "sdpa"), ("qwen2", "sdpa")]
)
def test_models_of_transformers_run_at_once(family, attention, kind):
    assert run_ranks(train, 1, family, attention, kind) == [[True]]


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
    call = BatchUnits._call
    BatchUnits._call = lambda self, functions, *args: (
        seen.append(type(functions) is AtOnce),
        call(self, functions, *args),
    )[1]
    x = torch.randn(8, 16)
    for function in (torch.tanh, torch.tanh, torch.relu, torch.relu, torch.tanh, torch.relu, torch.relu):
        model.module.after = function
        y = model(x)
        with one_unit_at_a_time():
            found.append(torch.equal(y, model(x)))
    model.module.layer.weight.requires_grad_(False)
    model(x).sum().backward()
    return found, seen


def test_a_forward_that_leaves_its_path_runs_unit_by_unit():
    ((same, seen),) = run_ranks(change_the_path, 1)
    assert all(same)
    # Trial, at once, [left, trial], at once, [left, trial], [left, and no trial is kept], unit by unit; then a new kind.
    assert seen == [False, True, True, False, True, True, False, True, False, False]


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
