"""A pipeline with `invariant`: the bits of one process, whatever the schedule, the cut and the mesh."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from same_bits import DROPS, assert_same_bits, make_model
from torch import nn

import weft
from weft.invariant import unit_sums
from weft.pipeline.unit_gradients import UnitGradients
from weft.testing.ranks import run_ranks, try_ranks

slow = pytest.mark.slow(
    "csrc", "pytorch_ext/ops", "pytorch_ext/tensor_parallel", "pytorch_ext/data_parallel", "pytorch_ext/pipeline"
)


class Words(nn.Module):
    """Blocks with dropout and a skip connection over several of them, between an embedding and its tied matrix."""

    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(19, 24), nn.ModuleList(map(self.block, range(5)))
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, 19, bias=False)
        self.out.weight = self.words.weight

    def block(self, number):
        return nn.Sequential(nn.Linear(24, 36), nn.GELU(), nn.Dropout(0.2), nn.Linear(36, 24))

    def forward(self, tokens):
        x = first = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.out(self.norm(x + first))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def model_of(family):
    torch.manual_seed(0)
    if family == "mlp":
        layers = [
            nn.Linear(15, 24),
            nn.GELU(),
            nn.LayerNorm(24),
            nn.Linear(24, 36),
            nn.SiLU(),
            nn.Linear(36, 24),
            nn.Tanh(),
        ]
        return nn.Sequential(*layers, nn.Linear(24, 7))
    if family == "words":
        return Words()
    name, tied, *drops = family.split()
    return make_model(name, "sdpa", tie_word_embeddings=tied == "tied", **(DROPS[name] if drops else {}))


def batch_of(family, step, sequences):
    draw = torch.Generator().manual_seed(step)
    if family == "mlp":
        return torch.randn(sequences, 15, generator=draw), torch.randint(0, 7, (sequences,), generator=draw)
    return torch.randint(0, 19, (2, sequences, 9), generator=draw).unbind()


def train(rank, family, kind, units, steps, wrap, sizes, options):
    """Train on one process with DataParallel, or in stages; every other step adds up the gradients of two batches."""
    mesh = weft.init_mesh(**sizes)
    stages, dp = mesh["pp"].size() > 1, mesh["dp"].size()
    model = model_of(family).to(kind)
    own_loss = family not in ("mlp", "words")
    loss_function = F.cross_entropy if family == "mlp" else loss_of
    options = options if own_loss else {"loss": loss_function, **options}
    if wrap == "parallelize":
        model = weft.parallelize(model, mesh, invariant=units, pipeline=options if stages else None)
    else:
        model = (
            weft.Pipeline(model, mesh, invariant=units, **options)
            if stages
            else weft.DataParallel(model, invariant=units)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, wide = {}, torch.promote_types(kind, torch.float32)

    def keep(text, value_of):
        for name, parameter in model.named_parameters():
            shard, value = weft.shard_of(parameter), value_of(parameter)
            value = value.detach().as_subclass(torch.Tensor)
            found[f"{text} {name.removeprefix('module.')}"] = (value if shard is None else shard.gather(value)).clone()

    for step in range(steps):
        for part in range(1 + step % 2):
            whole = batch_of(family, 2 * step + part, 2 * units)
            inputs, targets = (x.chunk(dp)[mesh["dp"].get_local_rank()] for x in whole)
            inputs = inputs.to(kind) if inputs.is_floating_point() else inputs
            batch = ({"input_ids": inputs, "labels": targets},) if own_loss else (inputs, targets)
            if stages:
                found[f"{step} {part} before"] = model.evaluate(*batch)
                loss = model.step(*batch)
            else:
                function = (lambda batch: model(**batch).loss) if own_loss else lambda x, y: loss_function(model(x), y)
                with torch.no_grad():
                    found[f"{step} {part} before"] = model.in_units(function, *batch).to(wide)
                loss = model.in_units(function, *batch)
                loss.backward()
            found[f"{step} {part} loss"] = loss.detach().to(wide)
        keep(f"{step} gradient", lambda parameter: parameter.grad)
        found[f"{step} norm"] = weft.clip_grad_norm_(model, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        keep(f"{step}", lambda parameter: parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            keep(f"{step} {name}", lambda parameter, name=name: optimizer.state[parameter][name])
    return found


def train_each(rank, family, kind, units, steps, runs):
    return [train(rank, family, kind, units, steps, *run) for run in runs]


def check(family, kind, units, steps, wrap, *runs):
    """Compare the training on each mesh with that of one process; meshes of as many ranks share their processes."""
    of_one = run_ranks(train, 1, family, kind, units, steps, wrap, {}, {}, timeout_s=120)[0]
    for world in {math.prod(sizes.values()) for sizes, _ in runs}:
        own = [(wrap, *run) for run in runs if math.prod(run[0].values()) == world]
        for found in zip(*run_ranks(train_each, world, family, kind, units, steps, own, timeout_s=280), strict=True):
            assert set().union(*found) == set(of_one)  # each stage has its part
            for of_rank in found:
                assert_same_bits({name: of_one[name] for name in of_rank}, [of_rank])


@pytest.mark.parametrize(
    ("family", "kind", "wrap", "mesh", "options"),
    [
        ("mlp", torch.float32, "parallelize", {"pp": 2}, {}),
        ("words", torch.bfloat16, "each", {"pp": 2, "dp": 2}, {"schedule": "interleaved", "stages_per_rank": 3}),
    ],
)
def test_stages_train_to_the_bits_of_one_process(family, kind, wrap, mesh, options):
    check(family, kind, 6, 2, wrap, (mesh, options))


SCHEDULES = [{"schedule": name} for name in ("1f1b", "afab", "zero-bubble", "interleaved", "zbv", "dualpipev")]


@slow
@pytest.mark.parametrize(
    ("family", "kind", "units", "wrap", "schedules"),
    [
        ("mlp", torch.float64, 6, "each", SCHEDULES),
        ("words", torch.float32, 12, "parallelize", SCHEDULES),
        ("llama untied", torch.float32, 4, "parallelize", SCHEDULES[:3]),
        ("llama tied", torch.bfloat16, 4, "parallelize", SCHEDULES[:3]),
        ("gpt2 tied dropping", torch.float32, 4, "parallelize", SCHEDULES[:3]),
    ],
)
def test_every_schedule_trains_to_the_bits_of_one_process(family, kind, units, wrap, schedules):
    check(family, kind, units, 2, wrap, *(({"pp": 2}, schedule) for schedule in schedules))


@slow
@pytest.mark.parametrize(
    ("family", "kind", "units", "steps"),
    [
        ("words", torch.bfloat16, 12, 20),
        ("llama untied", torch.float32, 4, 3),
        ("llama tied", torch.bfloat16, 4, 3),
        ("gpt2 tied dropping", torch.float32, 4, 3),
    ],
)
@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}])
def test_every_mesh_trains_to_the_bits_of_one_process(family, kind, units, steps, mesh):
    check(family, kind, units, steps, "parallelize", (mesh, {}))


def add_in_sequence(sums, total, add):
    """Add the units one after another instead of in the tree."""
    (_, middle), (_, high) = left, right = [(0, 0), *sums][-2:]
    if middle:
        sums[0, high] = add(sums.pop(left), sums.pop(right))


FAULTS = {
    "none": lambda: None,
    "sums in sequence": lambda: setattr(unit_sums, "add_up", add_in_sequence),
    "gradients that add up in .grad": lambda: setattr(UnitGradients, "take", take_after_the_last),
}
take = UnitGradients.take


def take_after_the_last(self, number, microbatch):
    if microbatch + 1 == len(self._here):
        for unit in range(microbatch):
            self._alone[number].put(unit, [torch.zeros_like(p) for p in self._alone[number].trained])
        take(self, number, microbatch)


def step_with_faults(rank):
    """Return the gradients of a step with each fault."""
    found = {}
    for fault, plant in FAULTS.items():
        add_up = unit_sums.add_up
        plant()
        torch.manual_seed(0)
        pipe = weft.Pipeline(model_of("mlp"), weft.init_mesh(pp=2), invariant=6, loss=F.cross_entropy)
        pipe.step(*batch_of("mlp", 0, 12))
        found[fault] = torch.cat([p.grad.as_subclass(torch.Tensor).flatten() for p in pipe.parameters()])
        unit_sums.add_up, UnitGradients.take = add_up, take
    return found


def test_a_fault_is_seen_in_the_bits():
    for found in run_ranks(step_with_faults, 2):
        for fault, gradients in found.items():
            torch.testing.assert_close(gradients, found["none"])
            assert torch.equal(gradients, found["none"]) == (fault == "none"), fault


class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Expanded(nn.Module):
    """A sum, whose gradient is one number for all positions."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x):
        return self.out(x.sum(1))


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


class Twice(nn.Module):
    """A weight used twice in the first stage, and once in the last one."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.again.weight = self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.again(self.first(x)))


class Idle(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.idle = nn.Parameter(torch.ones(3))


def linear():
    return nn.Linear(6, 6)


class Layer(nn.Sequential):
    """Of several modules, and no list that is cut."""


def dropping_twice():
    """Return blocks with one dropout in both stages."""
    drop = nn.Dropout(0.1)
    return nn.Sequential(Layer(linear(), drop), Layer(linear(), drop))


REFUSED_STEPS = {
    "1 draws random numbers": dropping_twice,
    "0 draws random numbers": lambda: nn.Sequential(Noisy(6, 6), linear()),
    "a value that leaves stage 0 is not contiguous": lambda: nn.Sequential(Layer(linear(), Turned()), linear()),
    "the gradient of a value that enters stage 1 is not contiguous": lambda: nn.Sequential(linear(), Expanded()),
    "'first.weight' is used several times in stage 0": Twice,
    "parameters got no gradient in some of the units: '0.idle' in 4": lambda: nn.Sequential(Idle(), linear()),
}


def take_what_is_refused(rank):
    mesh = weft.init_mesh(pp=2)
    layers = nn.Sequential(linear(), linear())
    for text, options in {
        "each of 1 ranks of dp has 4, not microbatches=2": {"microbatches": 2},
        "the loss is the mean over units, not reduction='sum'": {"reduction": "sum"},
    }.items():
        with pytest.raises(ValueError, match=text):
            weft.Pipeline(layers, mesh, loss=F.mse_loss, invariant=4, **options)
    with pytest.raises(ValueError, match='the mesh has no dimension "dp"'):
        weft.Pipeline(layers, mesh["pp"], loss=F.mse_loss, invariant=4)
    with pytest.raises(ValueError, match="0.1 is a BatchNorm1d"):
        normed = nn.Sequential(nn.Sequential(linear(), nn.BatchNorm1d(6)), linear())
        weft.Pipeline(normed, mesh, loss=F.mse_loss, invariant=4)
    with pytest.raises(ValueError, match='invariant with "pp" is for a Pipeline'):
        weft.parallelize(layers, mesh, invariant=2)
    with pytest.raises(TypeError, match="microbatches is missing"):
        weft.Pipeline(layers, mesh, loss=F.mse_loss)
    for text, make in REFUSED_STEPS.items():
        torch.manual_seed(0)
        balance = [2, 1] if make is Twice else "parameters"
        pipe = weft.Pipeline(make(), mesh, balance=balance, loss=loss_of_any_shape, invariant=4)
        earlier = [torch.ones_like(p) for p in pipe.parameters()]
        for parameter, gradient in zip(pipe.parameters(), earlier, strict=True):
            parameter.grad = gradient
        with pytest.raises((ValueError, RuntimeError), match=text):
            pipe.step(torch.randn(8, 6, 6), torch.zeros(8))
        assert all(p.grad is gradient for p, gradient in zip(pipe.parameters(), earlier, strict=True))


def loss_of_any_shape(y, targets):
    return (y.square().flatten(1).sum(1) - targets).square().mean()


def test_what_would_have_other_bits_is_refused_on_every_rank():
    run_ranks(take_what_is_refused, 2)


def step_with_other_batches(rank, threads):
    mesh = weft.init_mesh(pp=2, dp=2)
    dp = mesh["dp"].get_local_rank()
    torch.set_num_threads(1 + dp if threads else 1)
    pipe = weft.Pipeline(nn.Sequential(linear(), linear()), mesh, loss=F.mse_loss, invariant=4)
    size = 4 if threads else 4 + 4 * dp
    pipe.step(torch.ones(size, 6), torch.ones(size, 6))


@pytest.mark.parametrize(("threads", "text"), [(False, "2, 4|4, 8"), (True, "1, 2 as the size of their threads")])
def test_ranks_with_other_batches_or_threads_are_refused(threads, text):
    for outcome in try_ranks(step_with_other_batches, 4, threads):
        assert re.search(text, str(outcome.error))


def train_on(rank, folder, sizes, first, last):
    """Train from step `first`, which a checkpoint has, to step `last`, and save one there."""
    torch.manual_seed(17)
    mesh = weft.init_mesh(**sizes)
    stages, dp = mesh["pp"].size() > 1, mesh["dp"].size()
    model = weft.parallelize(Words(), mesh, invariant=4, pipeline={"loss": loss_of} if stages else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first:
        assert weft.load_checkpoint(model, optimizer, folder).step == first
    for step in range(first, last):
        batch = [x.chunk(dp)[mesh["dp"].get_local_rank()] for x in batch_of("words", step, 8)]
        if stages:
            model.step(*batch)
        else:
            model.in_units(lambda x, y: loss_of(model(x), y), *batch).backward()
        weft.clip_grad_norm_(model, 0.3)
        optimizer.step()
        optimizer.zero_grad()
    weft.save_checkpoint(model, optimizer, folder, step=last)
    return {**weft.full_state_dict(model), "random": torch.rand(2)}


def test_a_run_goes_on_in_stages_and_without_as_if_it_was_not_interrupted(tmp_path):
    meshes = ({"pp": 2, "dp": 2}, {})
    alone = run_ranks(train_on, 1, tmp_path / "alone", {}, 0, len(meshes))[0]
    for step, sizes in enumerate(meshes):
        world = math.prod(sizes.values())
        found = run_ranks(train_on, world, tmp_path / "several", sizes, step, step + 1)[0]
    assert_same_bits(alone, [found])
