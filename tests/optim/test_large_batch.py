"""LARS and LAMB step a split model as the whole one is stepped; rates follow the batch; DiLoCo's ranks meet on the average."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.comm.engine_communicator import EngineCommunicator
from weft.data_parallel.sharded_optimizer import piece_of
from weft.optim import layerwise
from weft.sharding.sharded_grad import WHOLE
from weft.testing import tolerance
from weft.testing.ranks import run_ranks

STEPS = 6


class Net(nn.Module):
    """Split weights along both dimensions, split and whole biases, a norm; sizes that no world divides."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.up, self.down, self.norm = nn.Linear(10, 17), nn.Linear(17, 10), nn.LayerNorm(10)
        self.out = nn.Linear(10, 4)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.out(self.norm(x + self.down(self.up(x).tanh())))


PLAN = {"embedding": "vocabulary", "up": "column", "down": "row"}


def net(group=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = Net().to(dtype)
    return model if group is None else weft.parallelize(model, group, plan=PLAN)


def loss_of(model, step, rows=slice(None)):
    generator = torch.Generator().manual_seed(step)
    tokens, wanted = torch.randint(11, (6, 5), generator=generator), torch.randn(6, 5, 4, generator=generator)
    return (model(tokens[rows]) - wanted[rows].to(model.out.weight.dtype)).square().mean()


def train(model, optimizer, steps=range(STEPS), rows=slice(None), call=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(call or model, step, rows).backward()
        optimizer.step()


def whole(model):
    found = {}
    for name, parameter in model.named_parameters():
        shard, value = weft.shard_of(parameter), parameter.detach()
        found[name] = shard.communicator.all_gather(value, shard.dim, shard.sizes) if shard else value.clone()
    return found


# The references: one process, one parameter after another, as the papers' algorithms are written.


def plain_lars(state, w, g, *, lr, momentum, decay, trust=0.001, adapt=True):
    local = trust * w.norm() / (g.norm() + decay * w.norm()) if adapt else 1.0
    state["v"] = momentum * state.get("v", 0) + lr * local * (g + decay * w)
    return w - state["v"]


def plain_lamb(state, w, g, *, lr, betas, decay, eps=1e-6, adapt=True):
    state["t"] = t = state.get("t", 0) + 1
    m = state["m"] = betas[0] * state.get("m", 0) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", 0) + (1 - betas[1]) * g * g
    u = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + decay * w
    return w - lr * (w.norm() / u.norm() if adapt else 1.0) * u


OURS = {
    "lars": lambda model: weft.LARS(weft.layerwise_groups(model, 0.1), lr=3.0, momentum=0.8, trust=0.02),
    "lamb": lambda model: weft.LAMB(weft.layerwise_groups(model, 0.1), lr=0.03, betas=(0.8, 0.95)),
}
PLAIN = {
    "lars": lambda state, w, g, **o: plain_lars(state, w, g, lr=3.0, momentum=0.8, trust=0.02, **o),
    "lamb": lambda state, w, g, **o: plain_lamb(state, w, g, lr=0.03, betas=(0.8, 0.95), **o),
}


def reference(kind, dtype, steps=STEPS):
    model = net(dtype=dtype)
    states = {}
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for name, w in model.named_parameters():
                matrix = w.dim() > 1
                options = {"decay": 0.1 if matrix else 0.0, "adapt": matrix}
                w.copy_(PLAIN[kind](states.setdefault(name, {}), w, w.grad, **options))
    return whole(model)


def train_split(rank, kind, broken=False):
    if broken:
        layerwise.place_for = lambda parameter: WHOLE  # each rank takes its shard for the whole
    model = net(weft.init_mesh(tp=dist.get_world_size(), device_type="cpu")["tp"])
    train(model, OURS[kind](model))
    return whole(model)


@pytest.fixture(scope="module", params=["lars", "lamb"])
def runs(request):
    return request.param, reference(request.param, torch.float64), reference(request.param, torch.float32)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_split_model_is_stepped_as_the_whole_one(runs, world):
    kind, exact, plain = runs
    found = run_ranks(train_split, world, kind)
    for name, value in exact.items():
        tolerance.assert_close(found[0][name], plain[name], value, name)
        assert all(torch.equal(other[name], found[0][name]) for other in found), name


def test_norms_of_shards_alone_would_be_noticed(runs):
    kind, exact, plain = runs
    found = run_ranks(train_split, 2, kind, True)[0]
    errors = [
        tolerance.error_in_tolerances(found[name], plain[name], exact[name]) for name in ("up.weight", "down.weight")
    ]
    assert min(errors) > 100


def count_collectives(rank, kind):
    model = net(weft.init_mesh(tp=2, device_type="cpu")["tp"])
    optimizer = OURS[kind](model)
    loss_of(model, 0).backward()
    calls = []
    real = EngineCommunicator.all_reduce_
    EngineCommunicator.all_reduce_ = lambda self, x, *rest: (calls.append((x.dtype, x.numel())), real(self, x, *rest))[
        1
    ]
    optimizer.step()
    return calls


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_a_step_takes_one_collective_of_two_numbers_a_split_matrix(kind):
    assert run_ranks(count_collectives, 2, kind) == [[(torch.float32, 6)]] * 2


def train_both_ways(rank, kind):
    mesh = weft.init_mesh(dp=2, tp=2, device_type="cpu")
    model = weft.DataParallel(net(mesh["tp"]), group=mesh["dp"])
    half = slice(0, 3) if mesh["dp"].get_local_rank() == 0 else slice(3, 6)
    train(model.module, OURS[kind](model), rows=half, call=Called(model))
    return whole(model.module)


class Called:
    """The wrapper, which has the module's out.weight, as loss_of asks for it."""

    def __init__(self, model):
        self.model, self.out = model, model.module.out

    def __call__(self, tokens):
        return self.model(tokens)


def test_data_and_tensor_parallel_together_give_the_whole_batchs_step(runs):
    kind, exact, plain = runs
    found = run_ranks(train_both_ways, 4, kind)
    for name, value in exact.items():
        tolerance.assert_close(found[0][name], plain[name], value, name)
        assert all(torch.equal(other[name], found[0][name]) for other in found), name


# Pieces of a sharded optimizer.

GROUPED = {
    "lars": (weft.LARS, dict(lr=3.0, momentum=0.8, trust=0.02)),
    "lamb": (weft.LAMB, dict(lr=0.03, betas=(0.8, 0.95))),
}


def sharded(model, kind):
    made, options = GROUPED[kind]
    return model.optimizer(made, weft.layerwise_groups(model, 0.1), **options)


def as_the_whole_optimizer(rank, kind, options):
    """The same steps by pieces and by whole parameters, in fp32 and fp64; a frozen matrix, clipping, two types."""
    world, steps = dist.get_world_size(), {}
    rows = slice(rank, rank + 2)
    for dtype in (torch.float64, torch.float32):
        for shards in (False, True):
            module = net(dtype=dtype)
            module.down.weight.requires_grad_(False)
            if dtype == torch.float64:
                module.norm.float()
                module.norm.register_forward_pre_hook(lambda _, x: x[0].float())
                module.norm.register_forward_hook(lambda _, x, y: y.double())
            model = weft.DataParallel(module, shard_optimizer=shards, **options)
            optimizer = sharded(model, kind) if shards else OURS[kind](model)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(Called(model), step, rows).backward()
                if step == 2:
                    model.clip_grad_norm_(0.01)
                optimizer.step()
            steps[dtype, shards] = whole(module)
    for name, exact in steps[torch.float64, False].items():
        found = steps[torch.float64, True][name]
        torch.testing.assert_close(found, exact, rtol=1e-12 if found.dtype == torch.float64 else 1e-5, atol=1e-12)
        plain, found = (steps[torch.float32, shards][name] for shards in (False, True))
        tolerance.assert_close(found, plain, exact, name)
        parts = [torch.empty_like(found) for _ in range(world)]
        dist.all_gather(parts, found)
        assert all(torch.equal(part, found) for part in parts), f"{name}: the same bits on every rank"
    return [piece_of(p).name for p in optimizer.param_groups[0]["params"] if p.numel()]


@pytest.mark.parametrize("kind", ["lars", "lamb"])
@pytest.mark.parametrize(("world", "bucket_mb"), [(1, 25), (2, 25), (3, 1e-4), (4, 25), (4, 1e-3)])
def test_pieces_are_stepped_as_the_whole_parameters_are(kind, world, bucket_mb):
    held = run_ranks(as_the_whole_optimizer, world, kind, {"bucket_mb": bucket_mb})
    assert set().union(*held) == {"embedding.weight", "up.weight", "out.weight"}
    assert world == 1 or any(len(names) < 3 for names in held), "some rank has nothing of one of them"


def broken_pieces(rank):
    layerwise.place_for = lambda parameter: WHOLE  # each rank takes its piece for the whole
    with pytest.raises(AssertionError, match="off by|not close"):
        as_the_whole_optimizer(rank, "lamb", {})


def test_norms_of_pieces_alone_would_be_noticed():
    run_ranks(broken_pieces, 2)


def hardly_anything(rank, kind):
    """Two small tensors over four ranks: two of these have nothing, and step all the same."""
    models = [weft.DataParallel(nn.Linear(2, 1).double(), shard_optimizer=on) for on in (False, True)]
    models[1].module.load_state_dict(models[0].module.state_dict())
    made, options = GROUPED[kind]
    optimizers = made(models[0].parameters(), **options), models[1].optimizer(made, **options)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(3, 2, dtype=torch.float64) + rank).square().mean().backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
    return sum(piece.numel() for piece in optimizers[1].param_groups[0]["params"])


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_ranks_without_a_piece_step_with_the_others(kind):
    assert run_ranks(hardly_anything, 4, kind) == [1, 2, 0, 0]


def count_over_pieces(rank, kind):
    model = weft.DataParallel(net(), shard_optimizer=True, bucket_mb=1e-3)
    optimizer = sharded(model, kind)
    calls = []
    real = EngineCommunicator.all_reduce_
    for step in range(2):
        loss_of(Called(model), step).backward()
        EngineCommunicator.all_reduce_ = lambda self, x, *rest: (calls.append(tuple(x.shape)), real(self, x, *rest))[1]
        optimizer.step()
        EngineCommunicator.all_reduce_ = real
    return calls


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_a_step_by_pieces_takes_one_collective_of_two_numbers_a_scaled_parameter(kind):
    assert run_ranks(count_over_pieces, 3, kind) == [[(2, 4)] * 2] * 3


def pieces_of_shards(rank, kind, path):
    """dp=2 x tp=2, stored by these, then gone on with by each rank alone, and by dp=4 without tp."""
    mesh = weft.init_mesh(dp=2, tp=2, device_type="cpu")
    model = weft.DataParallel(net(mesh["tp"]), group=mesh["dp"], shard_optimizer=True, bucket_mb=1e-3)
    half = slice(0, 3) if mesh["dp"].get_local_rank() == 0 else slice(3, 6)
    optimizer = sharded(model, kind)
    train(model.module, optimizer, range(3), half, Called(model))
    weft.save_checkpoint(model, optimizer, path)
    alone = net()
    its = OURS[kind](alone)
    four = weft.DataParallel(net(), shard_optimizer=True)
    theirs = sharded(four, kind)
    weft.load_checkpoint(alone, its, path)
    weft.load_checkpoint(four, theirs, path)
    train(model.module, optimizer, range(3, STEPS), half, Called(model))
    train(alone, its, range(3, STEPS))
    train(four.module, theirs, range(3, STEPS), call=Called(four))
    return whole(model.module), whole(alone), whole(four.module)


def test_pieces_of_shards_step_as_the_whole_and_load_on_other_meshes(runs, tmp_path):
    kind, exact, plain = runs
    found = run_ranks(pieces_of_shards, 4, kind, tmp_path / "saved")
    for name, value in exact.items():
        for way in range(3):
            tolerance.assert_close(found[0][way][name], plain[name], value, f"{name} {way}")
            assert all(torch.equal(other[way][name], found[0][way][name]) for other in found), name


def masters_and_dictionaries(rank, kind):
    """bf16 parameters with fp32 masters step as an fp32 model does that gets their gradients; state_dict resumes."""
    module = net(dtype=torch.bfloat16)
    model = weft.DataParallel(module, shard_optimizer=True, main_grad=True, bucket_mb=1e-3)
    optimizer = sharded(model, kind)
    wide = net(dtype=torch.bfloat16).float()
    its = OURS[kind](wide)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(Called(model), step).backward()
        narrow = net(dtype=torch.bfloat16)
        narrow.load_state_dict(module.state_dict())
        loss_of(narrow, step).backward()
        for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
            one.grad = other.grad.float()
        its.step()
        if step == 3:
            resumed = sharded(model, kind)
            resumed.load_state_dict(optimizer.state_dict())
            optimizer = resumed
        optimizer.step()
        for one, other in zip(model.module.parameters(), wide.parameters(), strict=True):
            torch.testing.assert_close(one.float(), other, rtol=2**-8, atol=2**-8 * float(other.abs().max()))
    return whole(module)


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_fp32_pieces_of_bf16_parameters_step_as_an_fp32_model(kind):
    one, other = run_ranks(masters_and_dictionaries, 2, kind)
    assert all(torch.equal(other[name], value) for name, value in one.items())


def pieces_of_other_parameters(rank):
    model = weft.DataParallel(net(), shard_optimizer=True)
    groups = model.optimizer(torch.optim.SGD, lr=0.1).param_groups  # which leave out what this rank has nothing of
    optimizer = weft.LAMB([piece for group in groups for piece in group["params"]])
    loss_of(Called(model), 0).backward()
    with pytest.raises(weft.CollectiveMismatchError, match="model.optimizer.weft.LAMB"):
        optimizer.step()


def test_pieces_that_not_every_rank_has_are_refused():
    run_ranks(pieces_of_other_parameters, 2)


@pytest.mark.parametrize("kind", [weft.LARS, weft.LAMB])
def test_complex_gradients_are_refused(kind):
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="takes no complex gradients"):
        kind([parameter], lr=0.1).step()


def test_without_adaption_lamb_is_adamw_and_lars_is_momentum():
    one, other = net(), net()
    train(one, weft.LAMB(one.parameters(), 0.01, eps=1e-8, weight_decay=0.1, adapt=False))
    train(other, torch.optim.AdamW(other.parameters(), 0.01, eps=1e-8, weight_decay=0.1))
    for name, value in whole(other).items():
        torch.testing.assert_close(whole(one)[name], value, rtol=1e-5, atol=1e-6)
    one, other = net(), net()
    train(one, weft.LARS(one.parameters(), 0.1, momentum=0.9, adapt=False))
    train(other, torch.optim.SGD(other.parameters(), 0.1, momentum=0.9))
    for name, value in whole(other).items():
        torch.testing.assert_close(whole(one)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [weft.LARS, weft.LAMB])
def test_where_a_norm_is_zero_the_step_is_not_scaled(kind):
    zero, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = kind([zero, still], lr=0.5)
    zero.grad, still.grad = torch.full((3, 2), 2.0), torch.zeros(3, 2)
    optimizer.step()
    expected = -1.0 if kind is weft.LARS else -0.5
    torch.testing.assert_close(zero.detach(), torch.full((3, 2), expected))
    assert torch.equal(still, torch.ones(3, 2))


def test_lambs_bounds_limit_the_weights_norm():
    parameter = nn.Parameter(torch.full((2, 2), 3.0))  # of norm 6
    parameter.grad = torch.ones(2, 2)
    weft.LAMB([parameter], lr=0.1, bounds=(0.0, 4.0)).step()
    torch.testing.assert_close(parameter.detach(), torch.full((2, 2), 3.0 - 0.1 * 4 / 2))


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_of_16_bit_parameters_state_and_arithmetic_are_in_fp32_also_after_loading(kind, tmp_path):
    model = net(dtype=torch.bfloat16)
    optimizer = OURS[kind](model)
    train(model, optimizer, range(3))
    other = net(dtype=torch.bfloat16)
    other.load_state_dict(model.state_dict())
    loaded = OURS[kind](other)
    loaded.load_state_dict(optimizer.state_dict())
    stored = net(dtype=torch.bfloat16)
    weft.save_checkpoint(model, optimizer, tmp_path)
    restored = OURS[kind](stored)
    weft.load_checkpoint(stored, restored, tmp_path)
    for one, its in ((model, optimizer), (other, loaded), (stored, restored)):
        train(one, its, range(3, 5))
        tensors = [value for state in its.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        assert tensors and all(value.dtype == torch.float32 for value in tensors)
    for a, b, c in zip(model.parameters(), other.parameters(), stored.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_options_out_of_range_are_refused_by_name():
    parameters = [nn.Parameter(torch.ones(2))]
    for make, text in [
        (lambda: weft.LARS(parameters, -1), "LARS: lr=-1 must not be negative"),
        (lambda: weft.LARS(parameters, 1, eps=math.nan), "LARS: eps=nan must not be negative"),
        (lambda: weft.LAMB(parameters, weight_decay=-0.1), "LAMB: weight_decay=-0.1"),
        (lambda: weft.LAMB(parameters, betas=(0.9, 1.0)), "LAMB: betas=(0.9, 1.0) must be at least 0 and less than 1"),
        (lambda: weft.LAMB(parameters, bounds=(3, 1)), "LAMB: bounds=(3, 1)"),
        (lambda: schedule(batch=0), "linear_scaling: batch=0"),
        (lambda: schedule(warmup_steps=-1), "warmup_steps=-1"),
    ]:
        with pytest.raises(ValueError) as raised:
            make()
        assert text in str(raised.value)


# The learning rate.


def schedule(lr=0.1, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)
    return weft.linear_scaling(optimizer, **{"batch": 1024, "base_batch": 256, "warmup_steps": 5} | options)


def rates(made, steps):
    found = []
    for _ in range(steps):
        found += made.get_last_lr()
        made.optimizer.step()
        made.step()
    return found


def test_the_rate_rises_to_k_times_over_the_warm_up_and_then_decays():
    made = schedule(decay=lambda step: 0.1 if step >= 7 else 1.0)
    assert rates(made, 9) == pytest.approx([0.1, 0.16, 0.22, 0.28, 0.34, 0.4, 0.4, 0.04, 0.04])
    assert rates(schedule(warmup_steps=0), 2) == pytest.approx([0.4, 0.4])
    resumed = schedule()
    half = schedule()
    rates(half, 3)
    resumed.load_state_dict(half.state_dict())
    assert rates(resumed, 2) == pytest.approx([0.28, 0.34])


# Local steps.

OUTER = {"every": 3, "lr": 0.7, "momentum": 0.9}


def rows_of(rank, world):
    return slice(6 * rank // world, 6 * (rank + 1) // world)


def local_steps(rank, dtype, options, split_at=None, path=None):
    """Two rounds and one step; at split_at, everything goes into a checkpoint and on from there."""
    world = dist.get_world_size()

    def fresh(seed):
        model = net(dtype=dtype)
        if rank != 0 or seed:
            nn.init.zeros_(model.up.weight)  # until it has rank 0's, or what was stored
        return model, weft.DiLoCo(torch.optim.AdamW(model.parameters(), 0.01), **OUTER, **options)

    model, optimizer = fresh(0)
    if split_at is None:
        train(model, optimizer, range(7), rows_of(rank, world))
    else:
        alone = weft.init_mesh(dp=world, device_type="cpu")["tp"]  # each worker stores its own
        train(model, optimizer, range(split_at), rows_of(rank, world))
        weft.save_checkpoint(model, optimizer, path / str(rank), group=alone)
        dictionary = optimizer.state_dict()
        for way in ("checkpoint", "state_dict"):
            other, resumed = fresh(1)
            if way == "checkpoint":
                weft.load_checkpoint(other, resumed, path / str(rank), group=alone)
            else:
                other.load_state_dict(model.state_dict())
                resumed.load_state_dict(dictionary)
                model, optimizer = other, resumed
            train(other, resumed, range(split_at, 7), rows_of(rank, world))
            if way == "checkpoint":
                stored = whole(other)
        assert all(torch.equal(stored[name], value) for name, value in whole(model).items())
    return whole(model)


def plain_diloco(world, dtype, nesterov=True):
    """Algorithm 1 in one process; each worker's parameters after the seventh step."""
    workers = [net(dtype=dtype) for _ in range(world)]
    inner = [torch.optim.AdamW(model.parameters(), 0.01) for model in workers]
    start = [parameter.detach().clone() for parameter in workers[0].parameters()]
    velocity = [torch.zeros_like(one) for one in start]
    for step in range(7):
        for rank, (model, optimizer) in enumerate(zip(workers, inner, strict=True)):
            train(model, optimizer, [step], rows_of(rank, world))
        if (step + 1) % 3 == 0:
            with torch.no_grad():
                for place, parameters in enumerate(zip(*(model.parameters() for model in workers), strict=True)):
                    delta = start[place] - sum(parameters) / world
                    velocity[place] = 0.9 * velocity[place] + delta
                    start[place] = start[place] - 0.7 * (delta + 0.9 * velocity[place] if nesterov else velocity[place])
                    for parameter in parameters:
                        parameter.copy_(start[place])
    return [whole(model) for model in workers]


@pytest.mark.parametrize(("world", "nesterov"), [(1, True), (2, True), (2, False), (3, True)])
def test_diloco_is_its_algorithm(world, nesterov):
    exact, plain = (plain_diloco(world, dtype, nesterov) for dtype in (torch.float64, torch.float32))
    found, small = (
        run_ranks(local_steps, world, torch.float32, {"nesterov": nesterov, "bucket_mb": bucket_mb})
        for bucket_mb in (25, 1e-4)
    )
    for rank in range(world):
        for name, value in exact[rank].items():
            tolerance.assert_close(found[rank][name], plain[rank][name], value, f"{name} of rank {rank}")
            assert torch.equal(found[rank][name], small[rank][name]), "whatever the buckets are"


def test_diloco_resumes_to_the_same_bits_within_a_round(tmp_path):
    straight = run_ranks(local_steps, 2, torch.bfloat16, {})
    resumed = run_ranks(local_steps, 2, torch.bfloat16, {}, 4, tmp_path)
    for one, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(other[name], value) for name, value in one.items())
    assert not all(torch.equal(straight[1][name], value) for name, value in straight[0].items()), "their own steps"


def averages(rank):
    model = net()
    optimizer = weft.DiLoCo(torch.optim.SGD(model.parameters(), 0.1), every=2, lr=1, momentum=0)
    train(model, optimizer, range(2), rows_of(rank, 2))
    return whole(model)


def test_with_rate_one_and_no_momentum_it_is_periodic_averaging():
    models = [net(), net()]
    for rank, model in enumerate(models):
        train(model, torch.optim.SGD(model.parameters(), 0.1), range(2), rows_of(rank, 2))
    one, other = run_ranks(averages, 2)
    for name, value in one.items():
        assert torch.equal(value, other[name])
        mean = (whole(models[0])[name] + whole(models[1])[name]) / 2
        torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-7)


def half_a_digit(rank):
    """Rank 0 goes up by the last digit of a bf16 1.0 in each round, rank 1 stays."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = weft.DiLoCo(torch.optim.SGD([weight], 1.0), every=1, lr=1, momentum=0)
    seen = []
    for _ in range(4):
        weight.grad = torch.full_like(weight, -(2.0**-7) if rank == 0 else 0.0)
        optimizer.step()
        seen.append(float(weight[0].detach()))
    return seen


def test_outer_steps_smaller_than_a_parameters_last_digit_add_up():
    for seen in run_ranks(half_a_digit, 2):
        assert seen[1::2] == [1 + 2.0**-7, 1 + 2 * 2.0**-7]


def wrong_checkpoint(rank, path):
    model = net()
    optimizer = weft.DiLoCo(torch.optim.SGD(model.parameters(), 0.1), **OUTER)
    train(model, optimizer, range(2), rows_of(rank, 2))
    with pytest.raises(weft.CheckpointError, match="workers that differ on purpose each save their own"):
        weft.save_checkpoint(model, optimizer, path)
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        weft.DiLoCo(optimizer.inner, every=0)


def test_workers_that_differ_are_not_stored_as_one(tmp_path):
    run_ranks(wrong_checkpoint, 2, tmp_path)
