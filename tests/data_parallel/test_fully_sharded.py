"""zero=3: parameters sharded over dp, on any mesh, learn what the unsplit model learns."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from shared_models import Mixture
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft
from weft.testing.models import Llama, TiedModel, loss_of
from weft.testing.ranks import run_ranks


def batch(step, part=0, parts=1):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(11, (12, 6), generator=generator) for _ in range(2))
    return tokens.chunk(parts)[part], targets.chunk(parts)[part]


def frozen():
    model = Llama()
    for parameter in [*model.blocks[1].parameters(), model.embedding.weight]:
        parameter.requires_grad_(False)
    return model


def shared_by_blocks():
    model = Llama()
    model.blocks[1].mlp = model.blocks[0].mlp
    return model


MODELS = {
    "llama": Llama,
    "tied": TiedModel,
    "tied llama": partial(Llama, tied=True),
    "frozen": frozen,
    "shared": shared_by_blocks,
    "experts": Mixture,
}


def plain_model(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def norm_by_torch(model):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def unsplit(name, steps):
    model = plain_model(name)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        losses.append((loss.item(), float(norm_by_torch(model))))
        optimizer.step()
    return losses, model.state_dict()


def check_learning(rank, name, sizes, by_torch, options):
    steps = 10
    expected, state = unsplit(name, steps)
    mesh = weft.init_mesh(**sizes)
    replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    model = weft.parallelize(plain_model(name), mesh, **options)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        tokens, targets = batch(step, place, replicas)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        norm = norm_by_torch(model) if by_torch else weft.clip_grad_norm_(model, 0.1)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        found = mean.item() / replicas, float(norm)
        assert found == pytest.approx(expected[step], rel=1e-9, abs=0), f"step {step}"
    for key, value in weft.full_state_dict(model).items():
        difference = (value - state[key]).abs().max()
        assert difference <= 1e-9, f"{key}: {difference}"
    weft.check_replicas(model)


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch's clip", "weft's clip"])
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(3, {"dp": 3}), (4, {"dp": 2, "tp": 2}), (4, {"dp": 2, "cp": 2}), (4, {"pp": 2, "dp": 2})],
    ids=["dp", "tp", "cp", "pp"],
)
def test_it_learns_what_the_unsplit_model_learns(world, sizes, by_torch):
    run_ranks(check_learning, world, "llama", sizes, by_torch, {"zero": 3})


@pytest.mark.slow("data_parallel", "sharding", "nn", "context_parallel", "pipeline")
@pytest.mark.parametrize(
    ("name", "world", "sizes", "options"),
    [
        ("llama", 8, {"dp": 2, "tp": 4}, {}),  # more ranks than heads of keys
        ("llama", 6, {"dp": 3, "tp": 2}, {"sequence_parallel": True}),
        ("llama", 8, {"dp": 2, "cp": 2, "tp": 2}, {}),
        ("llama", 4, {"dp": 4}, {"recompute": "full"}),
        ("llama", 4, {"dp": 2, "tp": 2}, {"recompute": "selective"}),
        ("llama", 4, {"dp": 2, "cp": 2}, {"recompute": "full"}),
        ("llama", 4, {"dp": 4}, {"zero": {"stage": 3, "reshard_after_forward": False}}),
        ("tied", 3, {"dp": 3}, {}),
        ("tied", 4, {"dp": 2, "tp": 2}, {}),
        ("shared", 4, {"dp": 2, "tp": 2}, {}),
        ("frozen", 4, {"dp": 2, "tp": 2}, {}),
        ("frozen", 4, {"dp": 2, "cp": 2}, {}),
        ("experts", 2, {"dp": 2, "ep": 2}, {}),
        ("experts", 4, {"dp": 4, "ep": 2}, {}),
        ("experts", 4, {"dp": 2, "tp": 2, "ep": 2}, {}),
        ("experts", 4, {"dp": 2, "cp": 2, "ep": 4}, {}),
    ],
)
def test_so_do_other_models_meshes_and_options(name, world, sizes, options):
    run_ranks(check_learning, world, name, sizes, True, {"zero": 3} | options)


def check_stages(rank, name, sizes, schedule, reduction, path):
    expected, state = unsplit(name, 6)
    mesh = weft.init_mesh(**sizes)
    replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    scale = 1 if reduction == "mean" else 1 / (2 * replicas)  # the loss of a micro-batch is a mean

    def loss(logits, targets):
        return scale * loss_of(logits, targets)

    options = {"microbatches": 2, "loss": loss, "schedule": schedule, "reduction": reduction}
    model = weft.parallelize(plain_model(name), mesh, zero=3, pipeline=options)
    assert not [x for x in model.parameters() if not hasattr(x, "to_local")] or "ep" in sizes
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(6):
        optimizer.zero_grad()
        found = model.step(*batch(step, place, replicas))
        norm = norm_by_torch(model) if step % 2 else weft.clip_grad_norm_(model, 0.1)
        assert (found.item(), float(norm)) == pytest.approx(expected[step], rel=1e-9, abs=0), f"step {step}"
        optimizer.step()
        if step == 2:
            model.evaluate(*batch(step, place, replicas))
            weft.save_checkpoint(model, optimizer, path)
            weft.load_checkpoint(model, optimizer, path)
    for key, value in weft.full_state_dict(model).items():
        assert (value - state[key]).abs().max() <= 1e-9, key
    weft.check_replicas(model)


def test_a_pipelines_layers_share_their_parameters(tmp_path):
    run_ranks(check_stages, 4, "llama", {"pp": 2, "dp": 2}, "1f1b", "mean", tmp_path)


@pytest.mark.slow("data_parallel", "pipeline", "sharding")
@pytest.mark.parametrize(
    ("name", "world", "sizes", "schedule", "reduction"),
    [
        ("tied llama", 4, {"pp": 2, "dp": 2}, "afab", "sum"),
        ("frozen", 4, {"pp": 2, "dp": 2}, "1f1b", "mean"),
        ("experts", 4, {"pp": 2, "dp": 2, "ep": 2}, "1f1b", "mean"),
        ("llama", 8, {"pp": 2, "dp": 2, "tp": 2}, "1f1b", "sum"),
        ("llama", 8, {"pp": 2, "dp": 2, "cp": 2}, "1f1b", "sum"),
    ],
)
def test_so_do_those_of_other_pipelines(name, world, sizes, schedule, reduction, tmp_path):
    run_ranks(check_stages, world, name, sizes, schedule, reduction, tmp_path)


def trained(sizes, zero, name="llama"):
    """Return a model after two steps with its optimizer, and the ranks' batches."""
    mesh = weft.init_mesh(**sizes)
    model = weft.parallelize(plain_model(name), mesh, zero=zero)
    kind = torch.optim.AdamW
    parameters = [x for x in model.parameters() if x.requires_grad]
    optimizer = model.optimizer(kind, lr=1e-2) if zero == 1 else kind(parameters, lr=1e-2)

    def step(number):
        replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
        tokens, targets = batch(number, place, replicas)
        optimizer.zero_grad()
        model.zero_grad()
        loss_of(model(tokens), targets).backward()
        optimizer.step()

    return model, optimizer, step


def save_and_go_on(rank, sizes, zero, path):
    model, optimizer, step = trained(sizes, zero)
    for number in range(2):
        step(number)
    before = weft.state_hash(model, optimizer)
    weft.save_checkpoint(model, optimizer, path, step=2)
    step(2)
    return before, weft.full_state_dict(model)


def load_and_go_on(rank, sizes, zero, path):
    model, optimizer, step = trained(sizes, zero)
    step(7)
    weft.load_checkpoint(model, optimizer, path)
    found = weft.state_hash(model, optimizer)
    step(2)
    return found, weft.full_state_dict(model)


PLACES = {
    "0": ({"dp": 2, "tp": 2}, 0),
    "1": ({"dp": 2, "tp": 2}, 1),
    "3": ({"dp": 3}, 3),
    "3, tp": ({"dp": 2, "tp": 4}, 3),
}


@pytest.mark.slow("data_parallel", "checkpoint")
@pytest.mark.parametrize("saved", PLACES)
def test_checkpoints_go_from_each_stage_to_each_at_another_mesh(saved, tmp_path):
    sizes, zero = PLACES[saved]
    world = sizes["dp"] * sizes.get("tp", 1)
    before, expected = run_ranks(save_and_go_on, world, sizes, zero, tmp_path)[0]
    for sizes, zero in PLACES.values():
        found, state = run_ranks(load_and_go_on, sizes["dp"] * sizes.get("tp", 1), sizes, zero, tmp_path)[0]
        assert found == before
        for name, value in state.items():
            assert torch.allclose(value, expected[name], 1e-9, 1e-9), name


def load_states(rank):
    mesh = weft.init_mesh(dp=2, tp=2)
    torch.manual_seed(1)
    other = Llama().double().state_dict()
    model = weft.parallelize(plain_model("llama"), mesh, zero=3)
    model.load_state_dict(other)  # of the whole model
    assert all(torch.equal(x, other[name]) for name, x in weft.full_state_dict(model).items())
    own = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(weft.full_state_dict(weft.parallelize(plain_model("llama"), mesh["tp"])))
    model.load_state_dict(own)
    assert all(torch.equal(x, other[name]) for name, x in weft.full_state_dict(model).items())
    loss_of(model(batch(0)[0]), batch(0)[1])  # without a backward: what is outside of blocks stays gathered
    model.load_state_dict(other)
    model = model.to(torch.float32).to(torch.float64)  # other Parameters
    model.load_state_dict(model.state_dict(), assign=True)
    model.load_state_dict(other)
    assert all(torch.equal(x, other[name]) for name, x in weft.full_state_dict(model).items())
    loss_of(model(batch(0)[0]), batch(0)[1]).backward()
    assert weft.clip_grad_norm_(model, 1.0) > 0
    with pytest.raises(RuntimeError, match="size mismatch|has shape"):
        model.load_state_dict({name: x[:1] for name, x in other.items()})


def test_it_loads_whole_state_dicts_and_its_own():
    run_ranks(load_states, 4)


def look_between(rank):
    """Forwards between backward and step, and norms by hand, see the parts."""
    mesh = weft.init_mesh(dp=2, tp=2)
    plain, model = plain_model("llama"), weft.parallelize(plain_model("llama"), mesh, zero=3)
    (tokens, targets), part = batch(0), batch(0, mesh["dp"].get_local_rank(), 2)
    loss_of(plain(tokens), targets).backward()
    loss_of(model(part[0]), part[1]).backward()
    model(part[0])
    norm = nn.utils.get_total_norm([x.grad for x in plain.parameters()])
    gradients = [x.grad for x in model.parameters()]
    by_hand = [torch.stack([change(g).norm() for g in gradients]).norm() for change in CHANGES]
    for found in (*by_hand, sum(((g**2).sum() for g in gradients), start=0.0).sqrt(), weft.clip_grad_norm_(model, 1e9)):
        torch.testing.assert_close(found.double(), norm, rtol=1e-9, atol=0)
    loss = loss_of(model(part[0]), part[1])
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e9), norm, rtol=1e-9, atol=0)
    with pytest.raises(TypeError):
        model(part[0], "one argument too many")
    assert {type(x).__name__ for x in model.parameters()} == {"DTensor"}
    model.zero_grad()
    loss_of(model(part[0]), part[1]).backward()
    torch.testing.assert_close(weft.clip_grad_norm_(model, 1e9), norm, rtol=1e-9, atol=0)


CHANGES = (lambda g: g, torch.clone, torch.Tensor.detach, lambda g: g.data, lambda g: 2 * (g / 2))


def test_what_looks_between_forward_and_step_sees_the_parts():
    run_ranks(look_between, 4)


def experts_of_one_rank(rank):
    mesh = weft.init_mesh(dp=2, ep=2)
    plain = plain_model("experts")
    frozen = copy.deepcopy(plain)
    for layer in frozen.layers:
        layer.experts.requires_grad_(False)
    model = weft.parallelize(frozen, mesh, zero=3)
    for layer in model.layers:
        layer.experts.requires_grad_(True)
    (tokens, targets), part = batch(0), batch(0, mesh["dp"].get_local_rank(), 2)
    loss_of(plain(tokens), targets).backward()
    norm = nn.utils.get_total_norm([x.grad for x in plain.parameters()])
    for again in (False, True):
        if again:
            model.load_state_dict(model.state_dict(), assign=True)
        model.zero_grad()
        loss_of(model(part[0]), part[1]).backward()
        torch.testing.assert_close(weft.clip_grad_norm_(model, 1e9), norm, rtol=1e-9, atol=0)


def test_experts_that_one_rank_has_alone_are_averaged_over_dp():
    run_ranks(experts_of_one_rank, 2)


def overflow(rank):
    mesh = weft.init_mesh(dp=2, tp=2)
    model = weft.parallelize(plain_model("llama").float(), mesh, zero=3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    tokens, targets = batch(0, mesh["dp"].get_local_rank(), 2)
    states = []
    for step in range(3):
        states.append(weft.state_hash(model))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(tokens), targets)
        scaler.scale(loss).backward()
        if step == 1 and rank == 0:
            model.blocks[1].mlp.up.weight.grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
    states.append(weft.state_hash(model))
    assert states[1] == states[2] and len(set(states)) == 3


def test_an_overflow_in_one_ranks_part_skips_the_step_on_all():
    run_ranks(overflow, 4)


def step_by_norms(rank, kind, path):
    mesh = weft.init_mesh(dp=2, tp=2)
    plain, model = plain_model("llama"), weft.parallelize(plain_model("llama"), mesh, zero=3)
    optimizers = [kind(weft.layerwise_groups(each, 0.1), lr=0.1) for each in (plain, model)]
    for step in range(4):
        tokens, targets = batch(step)
        part = batch(step, mesh["dp"].get_local_rank(), 2)
        for each, optimizer, (inputs, labels) in zip(
            (plain, model), optimizers, ((tokens, targets), part), strict=True
        ):
            optimizer.zero_grad()
            loss_of(each(inputs), labels).backward()
            optimizer.step()
        if step == 1:
            weft.save_checkpoint(model, optimizers[1], path)
            weft.load_checkpoint(model, optimizers[1], path)
    for name, value in weft.full_state_dict(model).items():
        assert (value - plain.state_dict()[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("kind", [weft.LARS, weft.LAMB])
def test_optimizers_that_sum_norms_know_the_parts(kind, tmp_path):
    run_ranks(step_by_norms, 4, kind, tmp_path)


def blocks(rank):
    def mlp():
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))

    for model, expected in (
        (nn.Sequential(mlp(), nn.Linear(4, 4)), {"", "0"}),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {""}),
        (nn.ModuleDict({"a": nn.ModuleList([mlp(), mlp()])}), {"", "a.0", "a.1"}),
        (nn.ModuleDict({"a": nn.ModuleList([nn.ModuleDict({"b": mlp()})])}), {"", "a.0.b"}),
    ):
        if isinstance(model, nn.ModuleDict):
            model = Holder(model)
            expected = {f"inner.{name}" if name else "" for name in expected}
        weft.parallelize(model, weft.init_mesh(dp=2), zero=3)
        assert {name for name, module in model.named_modules() if isinstance(module, FSDPModule)} == expected


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x


def test_blocks_are_the_elements_of_the_outermost_lists():
    run_ranks(blocks, 2)


def verified(rank):
    mesh = weft.init_mesh(dp=2, tp=2)
    reference = plain_model("llama").float()
    model = weft.parallelize(copy.deepcopy(reference), mesh, zero=3)
    report = weft.verify(model, reference, batch(0)[0])
    assert report.ok, str(report)
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    assert not weft.verify(model, reference, batch(0)[0]).ok


def test_verify_compares_its_parts():
    run_ranks(verified, 4)


def refuse(rank):
    mesh = weft.init_mesh(dp=2, tp=2)
    for zero, sub, message in (
        (2, mesh, "zero=2 must be 0 .* 1 .* or 3"),
        (3, mesh["tp"], 'zero=3 needs a mesh with "dp"'),
        (1, mesh["tp"], 'zero=1 needs a mesh with "dp"'),
        ({"stage": 3, "mp": 1}, mesh, "zero has no option 'mp'"),
        ({"stage": 1, "mp_policy": None}, mesh, "zero has no option 'mp_policy'"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.parallelize(plain_model("llama"), sub, zero=zero)
    for change, message in (
        (lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(()))), "'scale' has no dimension"),
        (lambda model: setattr(model.logits, "weight", nn.Parameter(torch.ones(24, 37).t())), "is not contiguous"),
        (lambda model: model.norm.float(), "have several types"),
        (lambda model: setattr(model.embedding, "sparse", True), "'embedding' has sparse gradients"),
    ):
        model = plain_model("llama")
        change(model)
        with pytest.raises(ValueError, match=message):
            weft.parallelize(model, mesh["dp"], zero=3)
    if rank == 0:
        model.extra = nn.Linear(2, 2)
    with pytest.raises((ValueError, weft.CollectiveMismatchError)):
        weft.parallelize(model, mesh["dp"], zero=3)
    model = weft.parallelize(plain_model("llama"), mesh["dp"], zero=3)
    loss_of(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(TypeError, match="Adafactor is not known to update each element by itself"):
        torch.optim.Adafactor(model.parameters()).step()
    with pytest.raises(ValueError, match="zero=3 is not supported with invariant=4"):
        weft.parallelize(plain_model("llama"), mesh, zero=3, invariant=4)
    stages, pipeline = weft.init_mesh(pp=2, dp=2), {"microbatches": 2, "loss": loss_of}
    for name, zero, more, message in (
        ("llama", 1, {}, "zero=1 is not supported with pipeline"),
        ("llama", 3, {"schedule": "interleaved"}, "zero=3 is not supported with the schedule 'interleaved'"),
        ("llama", 3, {"schedule": "zero-bubble"}, "zero=3 is not supported with the schedule 'zero-bubble'"),
        ("tied", 3, {}, "'position.weight' is outside of the layers"),
        ("shared", 3, {}, "is shared by layers of one rank"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.parallelize(plain_model(name), stages, zero=zero, pipeline=pipeline | more)


def test_what_it_cannot_do_is_refused_on_every_rank():
    run_ranks(refuse, 4)


def average(rank, sizes):
    mesh = weft.init_mesh(**sizes)
    plain, means = plain_model("tied"), AveragedModel(plain_model("tied"), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model = weft.parallelize(plain_model("tied"), mesh, zero=3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each, mean, optimizer, part in (
            (plain, means, optimizers[0], (0, 1)),
            (model, ema, optimizers[1], (mesh["dp"].get_local_rank(), mesh["dp"].size())),
        ):
            tokens, targets = batch(step, *part)
            optimizer.zero_grad()
            loss_of(each(tokens), targets).backward()
            optimizer.step()
            mean.update_parameters(each)
    tokens, _ = batch(9)
    with torch.no_grad():
        assert torch.allclose(ema(tokens), means(tokens), 1e-9, 1e-9)
        assert torch.allclose(model(tokens), plain(tokens), 1e-9, 1e-9)
    loss_of(ema(tokens), tokens).backward()  # the copy trains too
    assert type(next(ema.parameters()).grad) is type(next(model.parameters()).grad)


@pytest.mark.parametrize("sizes", [{"dp": 3}, {"dp": 2, "tp": 2}], ids=["dp", "tp"])
def test_averaged_model_averages_it(sizes):
    run_ranks(average, sizes["dp"] * sizes.get("tp", 1), sizes)


def by_hand(rank):
    """torch's own fully_shard leaves the split layers' gradients without their place, so torch's norms are wrong."""
    mesh = weft.init_mesh(dp=2, tp=2)
    model = weft.parallelize(Llama(), mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        assert sum("zero=3" in str(warning.message) for warning in caught) == times
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = weft.parallelize(Llama(), mesh, zero=3)
        tokens, targets = batch(mesh["dp"].get_local_rank())
        loss_of(model(tokens), targets).backward()


def test_torchs_own_sharding_of_split_layers_is_warned_of_once():
    run_ranks(by_hand, 4)


MADE_BEFORE = {
    "zero=3": (dict(dp=2), dict(zero=3), True),
    "tp and zero=3": (dict(dp=2, tp=2), dict(zero=3), True),
    "stages": (dict(pp=2), dict(), True),
    "a pipeline": (dict(pp=2), dict(pipeline=dict(microbatches=2, loss=loss_of)), True),
    "a pipeline and zero=3": (dict(pp=2, dp=2), dict(zero=3, pipeline=dict(microbatches=2, loss=loss_of)), True),
    "experts": (dict(dp=2, ep=2), dict(), False),
    "tp and dp": (dict(dp=2, tp=2), dict(), False),
}


def make_before(rank, sizes, options, replaced):
    model = Mixture() if "ep" in sizes else Llama()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    model = weft.parallelize(model, weft.init_mesh(**sizes), **options)
    after = set(map(id, model.parameters()))
    gone = sum(id(parameter) not in after for parameter in parameters)
    assert bool(gone) == replaced
    for _ in range(2):
        if gone:
            with pytest.raises(ValueError, match=rf"AdamW: {gone} of {len(parameters)} parameters .* after the call"):
                optimizer.step()
        else:
            optimizer.step()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()


@pytest.mark.parametrize("case", list(MADE_BEFORE))
def test_an_optimizer_of_replaced_parameters_does_not_step(case):
    sizes, options, replaced = MADE_BEFORE[case]
    run_ranks(make_before, math.prod(n for name, n in sizes.items() if name != "ep"), sizes, options, replaced)
