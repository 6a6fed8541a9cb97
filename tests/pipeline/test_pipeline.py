"""weft.Pipeline: whatever the schedule, the cut and the mesh, a step is the single process's."""

import copy
import gc
import itertools
import os
import signal
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.comm.communicator import Communicator
from weft.data_parallel.reducer import Reducer
from weft.pipeline.balance import balanced, undisturbed
from weft.pipeline.schedules import SCHEDULES
from weft.sharding.shard import shard_of
from weft.testing import cases
from weft.testing.models import Llama, TiedModel, batch_of, loss_of
from weft.testing.ranks import RanksFailedError, run_ranks, try_ranks
from weft.testing.tolerance import assert_close

STAGES = {"afab": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zbv": 2, "dualpipev": 2}


def model_of():
    torch.manual_seed(0)
    return TiedModel()


def gradients_of(model, steps=1):
    for step in range(steps):
        tokens, targets = batch_of(step=step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def assert_same_step(pipe, loss, model, steps=1):
    """Loss and gradients are the unsplit model's of as many steps, whose gradients add up. Returns the names held."""
    plain_loss, plain = gradients_of(copy.deepcopy(model), steps)
    exact_loss, exact = gradients_of(copy.deepcopy(model).double(), steps)
    assert_close(loss, plain_loss, exact_loss, "loss")
    held = dict(pipe.named_parameters(remove_duplicate=False))
    assert held
    for name, parameter in held.items():
        take = getattr(shard_of(parameter), "take", lambda whole: whole)
        assert_close(parameter.grad, take(plain[name]), take(exact[name]), name)
    return set(held)


def pipeline_of(model, pp=None, *, mesh=None, schedule="1f1b", microbatches=4, loss=loss_of, **options):
    mesh = mesh or weft.init_mesh(pp=pp or torch.distributed.get_world_size(), device_type="cpu")
    return weft.Pipeline(model, mesh, schedule=schedule, microbatches=microbatches, loss=loss, **options)


def run_schedule(rank, schedule, microbatches):
    model = model_of()
    pipe = pipeline_of(model_of(), schedule=schedule, microbatches=microbatches)
    loss = pipe.step(*batch_of())
    names = assert_same_step(pipe, loss, model)
    assert_close(pipe.evaluate(*batch_of()), loss, loss.double(), "evaluate")
    loss = pipe.step(*batch_of(step=1), record_timeline=True)  # gradients of both steps add up
    assert_same_step(pipe, loss, model, steps=2)
    return names, loss, [action.name for action in pipe.timeline().actions]


@pytest.mark.parametrize(("schedule", "world"), [*cases.covering(SCHEDULES, [3]), *cases.covering(SCHEDULES, [2, 4])])
def test_every_schedule_is_the_single_process(schedule, world):
    microbatches = 4 if world == 3 and schedule != "dualpipev" else 8
    per_rank = run_ranks(run_schedule, world, schedule, microbatches, timeout_s=120)
    assert set().union(*(names for names, _, _ in per_rank)) == set(model_of().state_dict())
    assert len({loss.item() for _, loss, _ in per_rank}) == 1
    actions = per_rank[0][2]
    assert len(actions) == len(set(actions))
    stages = world * STAGES[schedule]
    assert sum("F" in name for name in actions) == stages * microbatches
    assert sum("B" in name or "W" in name for name in actions) == stages * microbatches


def run_untied(rank):
    """As a pipeline that forgets the ties would be."""
    model = model_of()
    pipe = pipeline_of(model_of())
    pipe._ties.ties.clear()
    loss = pipe.step(*batch_of())
    with pytest.raises(AssertionError, match="embedding.weight"):
        assert_same_step(pipe, loss, model)


def test_the_tolerance_would_catch_a_tie_that_is_not_summed():
    run_ranks(run_untied, 2)


def train_tied(rank, schedule):
    if rank:
        torch.manual_seed(100)  # another copy: it becomes the first holder's
        model = TiedModel()
    else:
        model = model_of()
    pipe = pipeline_of(model, schedule=schedule)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        pipe.step(*batch_of(step=step))
        optimizer.step()
    return [value for name, value in pipe.state_dict().items() if name in ("embedding.weight", "logits.weight")]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_tied_copies_stay_bit_identical_through_training(schedule):
    per_rank = run_ranks(train_tied, 2, schedule)
    assert all(map(len, per_rank))
    assert all(torch.equal(copy, per_rank[0][0]) for copies in per_rank for copy in copies)


def train_whole():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        tokens, targets = batch_of(step=step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_same(rank):
    pipe = pipeline_of(model_of(), schedule="interleaved")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        losses.append(pipe.step(*batch_of(step=step)).item())
        optimizer.step()
    return losses


def test_training_is_the_single_process_s():
    torch.testing.assert_close(
        torch.tensor(run_ranks(train_same, 2)[0]), torch.tensor(train_whole()), rtol=1e-4, atol=0
    )


def keep_own(rank):
    model = linears(4)
    stays, goes = (weakref.ref(model[2 * part].weight) for part in (rank, 1 - rank))
    pipe = pipeline_of(model, loss=F.mse_loss)
    del model
    gc.collect()
    pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    return stays() is not None, goes() is None


def test_stages_of_other_ranks_are_freed_with_the_model():
    assert run_ranks(keep_own, 2) == [(True, True)] * 2


PLAN = {
    "embedding": "vocabulary",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "logits": {"style": "column", "gather_output": True},
}


def run_on_mesh(rank, schedule, sizes):
    model, mesh = model_of(), weft.init_mesh(**sizes, device_type="cpu")
    split = model_of()
    if "tp" in sizes:
        weft.parallelize(split, mesh["tp"], plan=PLAN)
    pipe = pipeline_of(split, mesh=mesh, schedule=schedule, microbatches=2 if schedule == "1f1b" else 4)
    loss = pipe.step(*batch_of(mesh["dp"].get_local_rank(), sizes.get("dp", 1)))
    assert_same_step(pipe, loss, model)
    assert any(shard_of(parameter) for parameter in pipe.parameters()) == ("tp" in sizes)
    return loss.item()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_other_dimensions_of_the_mesh_change_nothing(schedule, sizes):
    if schedule == "zbv" and "tp" in sizes and torch.__version__.startswith("2.11."):
        with pytest.raises(RanksFailedError, match="takes a backward in two, which torch 2.11"):
            run_ranks(run_on_mesh, 4, schedule, {"pp": 2, **sizes}, timeout_s=120)
        return
    assert len(set(run_ranks(run_on_mesh, 4, schedule, {"pp": 2, **sizes}, timeout_s=120))) == 1


def run_sum(rank):
    """Two steps whose gradients add up, as a sum divided by the count of what is no padding."""
    model, mesh = model_of(), weft.init_mesh(pp=2, dp=2, device_type="cpu")
    tokens, targets = batch_of()
    targets[0, :4] = -100  # means of micro-batches are not the batch's mean

    def of_counted(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 36

    pipe = pipeline_of(model_of(), mesh=mesh, microbatches=2, loss=of_counted, reduction="sum")
    part = mesh["dp"].get_local_rank()
    for _ in range(2):
        loss = pipe.step(tokens.chunk(2)[part], targets.chunk(2)[part])
        expected = loss_of(model(tokens), targets)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    plain = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter.grad, plain[name].grad)


def test_a_sum_divided_by_its_own_count_is_the_mean_over_what_counts():
    run_ranks(run_sum, 4)


def all_travel(reducer):
    return len(reducer._waits) == len(reducer.buckets) > 0


def run_in_buckets(rank, schedule):
    """After the first step no objects travel, no rank waits at a barrier, and buckets travel before the step's end."""
    model, mesh = model_of(), weft.init_mesh(pp=2, dp=2, device_type="cpu")
    pipe = pipeline_of(model_of(), mesh=mesh, schedule=schedule, checks="off")
    part = batch_of(mesh["dp"].get_local_rank(), 2)
    pipe.step(*part)
    pipe.zero_grad()
    early = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "all_gather_object", None)
        patch.setattr(torch.distributed, "barrier", None)
        finish = Reducer.finish
        patch.setattr(Reducer, "finish", lambda reducer: early.append(all_travel(reducer)) or finish(reducer))
        loss = pipe.step(*part)
    assert_same_step(pipe, loss, model)
    return early


def test_gradients_over_dp_travel_in_buckets_from_the_last_backward_on():
    assert run_ranks(run_in_buckets, 4, "1f1b") == [[True]] * 4


class Averages(nn.Module):
    """A layer that puts a new tensor in the place of its buffer in each forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean((0, 1))
        return y


def penalize(*modules):
    for module in modules:
        sum(parameter.square().sum() for parameter in module.parameters()).backward()


BETWEEN_STEPS = {
    "nothing": lambda *modules: None,
    "a backward of the user": penalize,
    "another type": lambda *modules: [module.double() for module in modules],
    "a new parameter": lambda *modules: [
        setattr(module.get_submodule("0.linear"), "weight", nn.Parameter(torch.full((6, 6), 0.1))) for module in modules
    ],
    "frozen": lambda *modules: [module.get_submodule("2").requires_grad_(False) for module in modules],
}


def run_between_steps(rank, between):
    """Steps of two shapes over "dp", each with something between the step before and it."""
    torch.manual_seed(0)
    model = nn.Sequential(Averages(), nn.Tanh(), nn.Linear(6, 6), Averages())
    mesh = weft.init_mesh(pp=1, dp=2, device_type="cpu")
    pipe = pipeline_of(copy.deepcopy(model), mesh=mesh, microbatches=2, loss=F.mse_loss)
    for step, size in enumerate([4, 8, 4, 8, 8]):
        x, y = torch.randn(2, 2 * size, 3, 6, generator=torch.Generator().manual_seed(step)).to(model[2].weight.dtype)
        model.zero_grad()
        pipe.zero_grad()
        F.mse_loss(model(x), y).backward()
        pipe.step(x.chunk(2)[rank], y.chunk(2)[rank])
        if step == 2:
            BETWEEN_STEPS[between](model, pipe)
        for (name, ours), theirs in zip(pipe.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"{name} in step {step}")


@pytest.mark.parametrize("between", BETWEEN_STEPS)
def test_buckets_over_dp_follow_what_happens_between_steps(between):
    run_ranks(run_between_steps, 2, between)


def run_two_shapes(rank):
    pipe = pipeline_of(model_of(), microbatches=2)
    tokens, targets = batch_of()
    for size in (8, 4, 8, 4):
        pipe.step(tokens[:size], targets[:size])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weft.Pipeline, "_built", None)
        for size in (8, 4):
            pipe.zero_grad()
            loss = pipe.step(tokens[:size], targets[:size])
            torch.testing.assert_close(loss, loss_of(model_of()(tokens[:size]), targets[:size]).detach())


def test_a_schedule_is_kept_for_each_shape():
    run_ranks(run_two_shapes, 2)


def run_frozen(rank):
    """The first stage has nothing to train, and its output needs no gradient of its own."""
    model = model_of()
    model.logits.weight = nn.Parameter(model.logits.weight.detach().clone())
    trained = copy.deepcopy(model)
    for each in (model, trained):
        for part in (each.embedding, each.position, each.gate, each.blocks[0]):
            part.requires_grad_(False)
    pipe = pipeline_of(trained, schedule="zero-bubble", balance=[3, 7])
    pipe.step(*batch_of())
    tokens, targets = batch_of()
    loss_of(model(tokens), targets).backward()
    plain = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert (parameter.grad is None) == (plain[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, plain[name].grad)


def test_a_frozen_first_stage_loses_no_gradient_of_the_next():
    run_ranks(run_frozen, 2)


class Residual(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + self.short(x))


class Upcast(nn.Linear):
    def forward(self, x):
        return super().forward(x.double())


def run_types(rank):
    torch.manual_seed(0)
    model, x, targets = nn.Sequential(nn.Linear(6, 5), Upcast(5, 3).double()), torch.randn(4, 6), torch.randn(4, 3)
    expected = nn.functional.mse_loss(model(x), targets.double())
    loss = pipeline_of(model, microbatches=2, loss=nn.functional.mse_loss).step(x, targets.double())
    torch.testing.assert_close(loss, expected.detach().float())


def test_every_rank_has_the_loss_of_a_model_whose_last_stage_is_fp64():
    run_ranks(run_types, 2)


def images(channels=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, channels, 6, 6, generator=generator), torch.randint(5, (4,), generator=generator)


def convolutional():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(Residual(8, 8), Residual(8, 16)), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(trunk, nn.Flatten(), nn.Linear(16, 5))


def run_images(rank):
    """Nested Sequentials; with one micro-batch, running means are the plain model's: each is updated once a step."""
    model, (x, y) = convolutional(), images()
    pipe = pipeline_of(convolutional(), schedule="afab", microbatches=1, loss=nn.CrossEntropyLoss(torch.ones(5)))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert torch.equal(pipe.step(x, y), loss.detach())
    plain = dict(model.named_parameters())
    assert all(torch.equal(parameter.grad, plain[name].grad) for name, parameter in pipe.named_parameters())
    whole = model.state_dict()
    state = pipe.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    pipe.step(x[:2], y[:2])  # another shape
    return set(state)


def test_one_micro_batch_has_the_plain_model_s_bits_and_running_means():
    held = run_ranks(run_images, 3)
    assert set().union(*held) == set(convolutional().state_dict()) and all(held)


def mask_of(x):
    return torch.ones(x.size(1), x.size(1)).tril()


class Mask(nn.Module):
    def forward(self, x):
        return mask_of(x)


class Masked(nn.Module):
    """Each position is a mean of those up to it."""

    def __init__(self, mask):
        super().__init__()
        self.first, self.last, self.mask = nn.Linear(4, 4), nn.Linear(4, 4), mask

    def forward(self, x):
        mask = mask_of(x) if self.mask is None else self.mask(x)
        return mask @ self.last(mask @ self.first(x))


def masked(rank):
    torch.manual_seed(0)
    plain, x = Masked(Mask()), torch.randn(2, 3, 4)
    pipe = weft.Pipeline(copy.deepcopy(plain), weft.init_mesh(pp=2, device_type="cpu"), microbatches=2, loss=F.mse_loss)
    torch.testing.assert_close(pipe.step(x, x), F.mse_loss(plain(x), x))


def test_a_mask_that_a_module_of_its_own_makes_crosses():
    run_ranks(masked, 2)


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 1e9:
            return x
        for layer in self.inner:
            x = layer(x)
        return self.last(x)


def run_listed(rank):
    torch.manual_seed(0)
    model = Untraceable()
    x = torch.randn(4, 4)
    pipe = pipeline_of(
        copy.deepcopy(model), loss=F.mse_loss, layers=["first", "inner.*", "last"], balance="time", example=x[:1]
    )
    loss = F.mse_loss(model(x), torch.zeros(4, 4))
    torch.testing.assert_close(pipe.step(x, torch.zeros(4, 4)), loss.detach())
    assert sum(pipe.layers_per_stage) == 3
    return pipe.layers_per_stage


def test_layers_that_are_named_run_in_sequence_and_ranks_agree_on_measured_cuts():
    assert len(set(run_ranks(run_listed, 2))) == 1


def cut_for_a_slow_rank(rank, monkeypatch):
    seconds = 3.0 if rank else 1.0
    monkeypatch.setattr(
        "weft.pipeline.recording.measured", lambda _, forward, args, named: (*map(forward, args), seconds, 0)
    )
    options = dict(loss=F.mse_loss, balance="time", example=torch.ones(2, 4))
    return tuple(pipeline_of(linears(8), schedule=name, **options).layers_per_stage for name in ("1f1b", "zbv"))


def test_a_rank_that_is_three_times_as_slow_gets_a_third_of_the_layers(monkeypatch):
    assert run_ranks(cut_for_a_slow_rank, 2, monkeypatch) == [((6, 2), (3, 1, 1, 3))] * 2


class Saving(nn.Module):
    """Layer of one parameter whose backward needs 32 bytes of a micro-batch of [2, 4], and 32 bytes `times` over."""

    def __init__(self, times):
        super().__init__()
        self.scale, self.times = nn.Parameter(torch.ones(1)), times

    def forward(self, x):
        return torch.sin(x[:, :, None].expand(-1, -1, self.times) * self.scale).sum(-1)


def cut_within_memory(rank, memories, schedule):
    model = nn.Sequential(*map(Saving, (250, 250, 1, 1, 1, 1)))
    options = dict(loss=F.mse_loss, balance="time", example=torch.ones(2, 4), schedule=schedule)
    try:
        pipe = pipeline_of(model, memory=memories[rank], **options)
    except ValueError as error:
        return str(error)
    pipe.step(torch.ones(8, 4), torch.ones(8, 4))
    return pipe.layers_per_stage


@pytest.mark.parametrize(
    ("memories", "schedule", "expected"),
    [
        ((1e6, 16 + 64), "1f1b", (5, 1)),  # a small layer of one micro-batch
        ((2 * 8032 + 16, None), "1f1b", (1, 5)),  # a large one of two
        ((2 * 8032 + 15, None), "1f1b", "no cut fits"),
        ((4 * 8032 + 16, None), "afab", (1, 5)),
        ((None, 4 * (8032 + 4 * 64) + 5 * 16 - 1), "afab", "at most 4"),
    ],
)
def test_a_rank_takes_the_layers_that_its_memory_holds(memories, schedule, expected):
    found = run_ranks(cut_within_memory, 2, memories, schedule)
    assert found[0] == found[1]
    if expected == "at most 4":
        assert found[0][1] <= 4
    else:
        assert found[0] == expected or expected in found[0]


@pytest.mark.parametrize(
    ("costs", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([5, 1, 1, 1, 1], 2, [1, 4]),
        ([1, 1, 1, 1, 5], 3, [2, 2, 1]),
        ([3, 0, 0, 3], 3, [1, 2, 1]),
        ([0, 0, 0], 3, [1, 1, 1]),
    ],
)
def test_the_largest_part_is_as_small_as_it_can_be(costs, parts, expected):
    sizes = balanced([costs] * parts)
    sums = [sum(costs[sum(sizes[:k]) : sum(sizes[: k + 1])]) for k in range(parts)]
    best = [sum(costs[sum(expected[:k]) : sum(expected[: k + 1])]) for k in range(parts)]
    assert min(sizes) >= 1
    assert sorted(sums) == sorted(best)


def test_a_trial_leaves_no_trace_even_where_it_fails():
    norm, drawn = nn.BatchNorm1d(3), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="in the middle"), undisturbed(norm):
        norm(torch.rand(4, 3))
        raise RuntimeError("in the middle")
    assert torch.equal(norm.running_mean, torch.zeros(3)) and norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), drawn)


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


class SavedBytes:
    """Bytes that autograd's graph holds for backward, now and at most; parameters do not count."""

    def __init__(self, model):
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.now = self.most = 0

    def pack(self, x):
        held = Held(x)
        if x.untyped_storage().data_ptr() not in self.parameters:
            self.add(x.nbytes)
            weakref.finalize(held, self.add, -x.nbytes)
        return held

    def add(self, size):
        self.now += size
        self.most = max(self.most, self.now)


def peak_activations(rank, schedule):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
    pipe = pipeline_of(model, schedule=schedule, microbatches=8, loss=F.mse_loss)
    x = torch.randn(32, 16)
    saved = SavedBytes(pipe)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
        pipe.step(x, x, record_timeline=True)
    timeline = pipe.timeline()
    return saved.most, [timeline.in_flight(each) for each in range(timeline.ranks)]


def test_afab_keeps_the_activations_of_all_micro_batches_and_1f1b_of_as_many_as_stages_follow():
    ranks, microbatches = 3, 8
    afab, alternating = (run_ranks(peak_activations, ranks, schedule) for schedule in ("afab", "1f1b"))
    assert afab[0][1] == [microbatches] * ranks
    assert alternating[0][1] == [ranks - rank for rank in range(ranks)]
    for rank in range(ranks):
        assert alternating[rank][0] * microbatches == afab[rank][0] * (ranks - rank) > 0


def saved_by_llama(rank):
    torch.manual_seed(0)
    model, tokens = Llama(4), torch.randint(Llama.WORDS, (8, 32))
    plain = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(plain.pack, lambda held: held.tensor):
        loss = loss_of(model(tokens), tokens)
    del loss
    pipe = pipeline_of(model, schedule="afab", microbatches=4, loss=loss_of)
    saved = SavedBytes(pipe)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
        pipe.step(tokens, tokens)
    return saved.most, plain.most


def test_stages_together_save_what_the_plain_model_saves():
    """The angles, which no parameter has made, need no gradient on any stage."""
    per_rank = run_ranks(saved_by_llama, 2)
    saved, plain = sum(saved for saved, _ in per_rank), per_rank[0][1]
    assert plain <= saved <= 1.05 * plain


def draw(rank, folder):
    pipe = pipeline_of(model_of(), schedule="zero-bubble", microbatches=4)
    with pytest.raises(ValueError, match="no step was recorded"):
        pipe.timeline()
    pipe.step(*batch_of(), record_timeline=True)
    timeline = pipe.timeline()
    if rank == 0:
        timeline.save_png(folder / "step.png")
    return timeline


def test_a_timeline_gives_what_ran_when(tmp_path):
    timeline, other = run_ranks(draw, 2, tmp_path)
    assert timeline == other
    assert timeline.formula == pytest.approx(1 / 5)
    assert 0 < timeline.bubble < 1
    end_of = {action.name: action.end for action in timeline.actions}
    for action in timeline.actions:
        assert 0 <= action.start <= action.end
        stage, microbatch = action.stage, action.microbatch
        # Ranks' clocks begin at a barrier, which they leave at slightly different times: order is certain within a rank.
        if action.kind != "F":
            assert end_of[f"{stage}F{microbatch}"] <= action.start
        if action.kind == "W":
            assert end_of[f"{stage}I{microbatch}"] <= action.start
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def linears(count):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Dying(nn.Linear):
    """Ends its rank in the second backward."""

    def forward(self, x):
        return _DieInBackward.apply(super().forward(x))


class _DieInBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        _DieInBackward.calls += 1
        if _DieInBackward.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return dy


def step_until_one_dies(rank, schedule, layer):
    model = linears(6)
    if rank == 1:
        model[layer] = Dying(4, 4)
    torch.manual_seed(1)
    x = torch.randn(6, 4)
    pipeline_of(model, schedule=schedule, microbatches=3, loss=F.mse_loss).step(x, x)


@pytest.mark.parametrize(("schedule", "layer"), [("1f1b", 2), ("interleaved", 1)])
def test_a_rank_that_dies_in_a_step_is_named(schedule, layer):
    outcomes = try_ranks(step_until_one_dies, 3, schedule, layer, timeout_s=30)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, weft.RankLostError) and "rank 1" in str(survivor.error), survivor


def step_until_a_partner_dies(rank):
    """Its partner in tensor parallelism notices inside of a stage, whose errors torch wraps."""
    mesh, model = weft.init_mesh(pp=2, tp=2, device_type="cpu"), linears(4)
    weft.parallelize(model, mesh["tp"], plan={"2": {"style": "column", "gather_output": True}})
    if rank == 3:
        forwards = itertools.count()  # number 0 finds the shapes
        model[3].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(forwards) == 1 else None)
    x = torch.randn(4, 4)
    pipeline_of(model, mesh=mesh, microbatches=2, loss=F.mse_loss).step(x, x)


def test_a_rank_that_dies_inside_of_a_stage_is_named():
    outcomes = try_ranks(step_until_a_partner_dies, 4, timeout_s=30)
    assert outcomes[3].exit_code == -signal.SIGKILL
    assert isinstance(outcomes[2].error, weft.RankLostError), outcomes[2]


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(layer(x), training=self.training)
        return x


class Around(nn.Module):
    """Does something of its own around its layers."""

    def __init__(self, what):
        super().__init__()
        self.layers, self.what, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), what, 0

    def forward(self, x):
        if self.what == "count":
            self.calls += 1
            x = x / self.calls
        with torch.no_grad() if self.what == "freeze" else nullcontext():
            x = self.layers[0](x)
        if self.what == "draw":
            x = x * torch.rand(4)
        if self.what == "constant":
            x = x * torch.tensor(2.0)
        return self.layers[1](x)


class SharedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.last(self.norm(self.first(x))))


class Reaching(nn.Module):
    """Its own code uses the weight of a layer that is split by rows over the ranks of `pp`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (
            weft.RowParallelLinear.from_linear(nn.Linear(4, 4), split_input=True) for _ in range(2)
        )

    def forward(self, x):
        return self.last(self.first(x)) + self.last.weight.sum()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


class Hooked(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_forward_hook(lambda module, inputs, output: output)


def expect_refusals(rank):
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    refusals = [
        (dict(model=linears(1)), "needs 2 stages, and the model has 1 layers with parameters \\(0\\).*fewer ranks"),
        (dict(model=linears(3), schedule="zbv"), 'needs 4 stages, and the model has 3 layers.*"1f1b"'),
        (dict(schedule="1F1B"), "schedule='1F1B' is not one of 'afab', '1f1b'"),
        (dict(microbatches=1), "cannot run 1 micro-batches on 2 ranks.*microbatches=2 or more"),
        (dict(microbatches=3, schedule="dualpipev"), "each of the 4 stages: microbatches=4 or more"),
        (dict(microbatches=5, schedule="interleaved"), "rounds must be equal: microbatches=4"),
        (dict(microbatches=1, schedule="zero-bubble"), "each of the 2 ranks: microbatches=2 or a multiple"),
        (dict(microbatches=0, schedule="afab"), "needs at least one"),
        (dict(stages_per_rank=2), "'1f1b' has 1 stages on a rank, got stages_per_rank=2"),
        (dict(balance=[1, 2]), "balance=\\[1, 2\\] must be 2 numbers, 1 or more, that add up to 4 layers"),
        (dict(balance="size"), "balance='size' is not"),
        (dict(balance="time"), "pass it as example="),
        (dict(memory=1e9), "memory= is for balance=.time. and schedules with one stage"),
        (dict(reduction="none"), "reduction='none'"),
        (dict(mesh=weft.init_mesh(tp=2, device_type="cpu")["tp"]), 'a dimension "pp", got one with the dimensions'),
        (dict(mesh=None), 'must be a DeviceMesh with a dimension "pp", got NoneType'),
        (dict(model=Around("count")), "changes calls outside of its layers"),
        (
            dict(model=Reaching(), example=torch.ones(1, 4)),
            "last.weight is used by sum outside of its layer, and is split over ranks",
        ),
        (dict(model=SharedNorm(), balance=[2, 2]), "norm keeps running means, and stages of several ranks use it"),
        (dict(loss=Scaled()), "the loss has parameters"),
        (dict(model=nn.ReLU()), "no layer with parameters"),
        (
            dict(model=nn.Sequential(linears(4)), layers=["1.*"]),
            "names '1.\\*', and no module is called that; there are 0",
        ),
    ]
    for options, text in refusals:
        known = dict(model=linears(4), mesh=mesh, microbatches=4, loss=F.mse_loss) | options
        with pytest.raises(ValueError, match=text):
            weft.Pipeline(known.pop("model"), known.pop("mesh"), **known)
    pipe = weft.Pipeline(linears(4), mesh, microbatches=4, loss=F.mse_loss)
    with pytest.raises(
        ValueError, match="a batch of 6 cannot be cut into 4 equal.*choose microbatches from .1, 2, 3, 6."
    ):
        pipe.step(torch.randn(6, 4), torch.randn(6, 4))
    with pytest.raises(ValueError, match=r"targets is \(8, 4\), and the batch is 4"):
        pipe.step(torch.randn(4, 4), torch.randn(8, 4))
    with pytest.raises(TypeError, match="targets must be a tensor .*, got NoneType"):
        pipe.step(torch.randn(4, 4), None)
    with pytest.raises((TypeError, RuntimeError), match="takes 2 positional arguments but 3 were given"):
        pipe.step((torch.randn(4, 4), torch.randn(4, 4)), torch.randn(4, 4))
    with pytest.raises(TypeError, match="a Pipeline cannot be copied"):
        copy.deepcopy(pipe)
    setattr(pipe, str(2 * rank), nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=f"{2 * rank}.weight has gone since the model was cut"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    with pytest.raises(TypeError, match="call step"):
        pipe(torch.randn(4, 4))
    with pytest.raises(ValueError, match="ranks differ.*rank 0 has .'1f1b', 4.*rank 1 has .'1f1b', 8"):
        weft.Pipeline(linears(4), mesh, microbatches=4 * (rank + 1), loss=F.mse_loss)


def test_what_cannot_be_done_is_refused_with_the_way_out():
    run_ranks(expect_refusals, 2)


def give_main_grad(rank):
    pipe = pipeline_of(model_of())
    pipe.embedding.weight.main_grad = torch.zeros(17, 12)
    with pytest.raises(ValueError, match="gradient of embedding.weight goes to main_grad"):
        pipe.step(*batch_of())


def test_a_main_grad_that_would_not_be_summed_is_refused():
    run_ranks(give_main_grad, 2)


class Choosing(nn.Module):
    """Which of its two matrices it uses depends on the batch; it uses the third for none."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.left(x) if x[0, 0] > 0 else self.right(x)


def step_apart(rank):
    mesh = weft.init_mesh(pp=2, dp=2, device_type="cpu")
    torch.manual_seed(0)
    model, parts = nn.Sequential(Choosing(), nn.Linear(4, 4)), [torch.ones(2, 4), -torch.ones(2, 4)]
    pipe = pipeline_of(copy.deepcopy(model), mesh=mesh, microbatches=2, loss=F.mse_loss)
    part, expected = parts[mesh["dp"].get_local_rank()], dict(model.named_parameters())
    for _ in range(2):  # gradients add up
        for each in parts:
            F.mse_loss(model(each), each).div(2).backward()
        pipe.step(part, part)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad)
    return {name for name, parameter in pipe.named_parameters() if parameter.grad is None}


def test_replicas_may_use_other_layers():
    assert set().union(*run_ranks(step_apart, 4)) == {"0.never.weight", "0.never.bias"}


def step_in_other_types(rank):
    """A constant of the model's own code, and steps with and without autocast: stages send another type."""
    torch.manual_seed(0)
    model, x = Around("constant"), torch.arange(16.0).view(4, 4).sin()
    pipe = pipeline_of(copy.deepcopy(model), microbatches=2, loss=lambda y, x: F.mse_loss(y.float(), x))
    for wanted in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=wanted):
            expected = F.mse_loss(model(x).float(), x)
            torch.testing.assert_close(pipe.step(x, x), expected.detach())


def test_steps_may_change_between_types():
    run_ranks(step_in_other_types, 2)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x):
        return self.after(torch.fft.fft(self.before(x))).abs()


def cross_as_complex(rank):
    model, x = Spectral(), torch.arange(16.0).view(4, 4).sin()
    pipe = pipeline_of(copy.deepcopy(model), microbatches=2, loss=F.mse_loss)
    loss = F.mse_loss(model(x), x)
    loss.backward()
    torch.testing.assert_close(pipe.step(x, x), loss.detach())
    expected = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_gradients_of_complex_activations_cross():
    run_ranks(cross_as_complex, 2)


class Counts(nn.Module):
    """One of its layers gives a number that a later one uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Rows(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x, rows = self.layers[1](self.layers[0](x))
        for layer in self.layers[2:]:
            x = layer(x) * rows
        return x


class Rows(nn.Linear):
    def forward(self, x):
        return super().forward(x), x.size(0)


def cross_as_number(rank):
    torch.manual_seed(0)
    model, x = Counts(), torch.arange(16.0).view(4, 4).sin()
    parts = [F.mse_loss(model(part), part) for part in x.chunk(2)]
    pipe = pipeline_of(model, microbatches=2, loss=F.mse_loss)
    torch.testing.assert_close(pipe.step(x, x), (sum(parts) / 2).detach())


def test_a_number_that_a_layer_gives_crosses():
    run_ranks(cross_as_number, 2)
