"""weft.Muon on any mesh steps as torch.optim.Muon and AdamW on the unsplit model."""

import copy

import pytest
import torch
from shared_models import Mixture
from torch import nn

import weft
from weft.testing.models import Llama, loss_of
from weft.testing.ranks import run_ranks

OPTIONS = {"weight_decay": 0.2, "momentum": 0.9}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def batch(step, part=0, parts=1):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(11, (12, 6), generator=generator) for _ in range(2))
    return tokens.chunk(parts)[part], targets.chunk(parts)[part]


def plain_model(kind):
    torch.manual_seed(0)
    return kind().double()


def is_matrix(name, parameter):
    return parameter.dim() in (2, 3) and not name.endswith("bias") and not name.startswith(("embedding", "table"))


class ByTorch:
    """torch's optimizers; those of fused experts step each expert's matrix."""

    def __init__(self, model, **options):
        self.pairs = []
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            if not is_matrix(name, parameter):
                others.append(parameter)
            elif parameter.dim() == 2:
                matrices.append(parameter)
            else:
                self.pairs += [(nn.Parameter(x), parameter, number) for number, x in enumerate(parameter.detach())]
        self.optimizers = [
            torch.optim.Muon([*matrices, *(x for x, _, _ in self.pairs)], lr=0.02, **OPTIONS | options),
            torch.optim.AdamW(others, **ADAMW),
        ]

    def step(self):
        for x, parameter, number in self.pairs:
            x.grad = parameter.grad[number]
        for optimizer in self.optimizers:
            optimizer.step()


def groups_of(named):
    named = [(name.removeprefix("module."), x) for name, x in named]
    matrices = [x for name, x in named if is_matrix(name, x)]
    others = [x for name, x in named if not is_matrix(name, x)]
    return [{"params": matrices, **OPTIONS}, {"params": others, "use_muon": False, **ADAMW}]


def learn(model, optimizer, batches):
    for tokens, targets in batches:
        model.zero_grad()
        loss_of(model(tokens), targets).backward()
        optimizer.step()


def check_learning(rank, kind, sizes, options, zero, shared):
    plain = plain_model(kind)
    learn(plain, ByTorch(plain, **options), map(batch, range(6)))
    mesh = weft.init_mesh(**sizes)
    model = weft.parallelize(plain_model(kind), mesh, zero=zero)
    groups = groups_of(model.named_parameters())
    replicas = {"replicas": mesh["dp"]} if shared else {}
    make = model.optimizer if zero == 1 else lambda kind, groups, **options: kind(groups, **options)
    optimizer = make(weft.Muon, groups, lr=0.02, **options, **replicas)
    replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    learn(model, optimizer, (batch(step, place, replicas) for step in range(6)))
    state = plain.state_dict()
    for name, value in weft.full_state_dict(model).items():
        assert (value - state[name]).abs().max() < 1e-9, name
    if sizes.get("pp", 1) == 1:
        weft.check_replicas(model)


@pytest.mark.parametrize(
    ("world", "sizes", "zero", "shared"),
    [
        (1, {}, 0, False),
        (3, {"tp": 3}, 0, False),
        (3, {"dp": 3}, 0, True),
        (3, {"dp": 3}, 1, False),
        (4, {"dp": 2, "tp": 2}, 3, False),
    ],
    ids=["one process", "tp", "dp", "zero 1", "zero 3 and tp"],
)
def test_it_steps_as_torch_on_the_unsplit_model(world, sizes, zero, shared):
    run_ranks(check_learning, world, Llama, sizes, {}, zero, shared)


@pytest.mark.slow("optim", "sharding", "data_parallel")
@pytest.mark.parametrize(
    ("kind", "world", "sizes", "options", "zero", "shared"),
    [
        (Llama, 4, {"tp": 4}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, 0, False),  # equal heads of keys
        (Llama, 4, {"dp": 2, "tp": 2}, {"ns_steps": 3}, 0, True),
        (Llama, 4, {"dp": 2, "tp": 2}, {}, 1, False),
        (Llama, 8, {"dp": 2, "tp": 4}, {}, 3, False),
        (Llama, 4, {"pp": 2, "tp": 2}, {}, 0, False),
        (Llama, 4, {"cp": 2, "tp": 2}, {}, 0, False),
        (Mixture, 2, {"tp": 2}, {}, 0, False),
        (Mixture, 2, {"dp": 2, "ep": 2}, {}, 0, False),
        (Mixture, 4, {"dp": 4, "ep": 2}, {}, 0, True),
        (Mixture, 4, {"dp": 4, "ep": 2}, {}, 1, False),
        (Mixture, 4, {"dp": 4, "ep": 2}, {}, 3, False),
        (Mixture, 2, {"dp": 2, "ep": 2}, {}, 3, False),
    ],
)
def test_so_do_other_meshes_models_and_options(kind, world, sizes, options, zero, shared):
    run_ranks(check_learning, world, kind, sizes, options, zero, shared)


class LlamaInUnits(Llama):
    KV_HEADS, HIDDEN, WORDS = 4, 32, 40


def state_in_units(rank, sizes):
    mesh = weft.init_mesh(**sizes)
    torch.manual_seed(0)
    model = weft.parallelize(LlamaInUnits(), mesh, invariant=4)
    optimizer = weft.Muon(groups_of(model.named_parameters()), lr=0.02, replicas=mesh["dp"])
    for step in range(2):
        optimizer.zero_grad()
        part = batch(step, mesh["dp"].get_local_rank(), mesh["dp"].size())
        model.in_units(lambda unit: loss_of(model(unit[0]), unit[1]), part).backward()
        optimizer.step()
    return weft.state_hash(model, optimizer)


def test_with_invariant_it_has_the_same_bits_on_every_mesh():
    meshes = {1: {}, 2: {"tp": 2}, 4: {"dp": 2, "tp": 2}}
    assert len({run_ranks(state_in_units, world, sizes)[0] for world, sizes in meshes.items()}) == 1


class Fused(nn.Module):
    """Query, key and value in one matrix."""

    ROWS = (12, 6, 6)

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(10, 24, bias=False), nn.Linear(24, 11, bias=False)

    def forward(self, tokens):
        return self.out(torch.tanh(self.qkv(torch.nn.functional.one_hot(tokens, 11)[..., :10].double())))


def check_fused(rank, sizes, zero):
    plain = plain_model(Fused)
    apart = [nn.Parameter(x) for x in plain.qkv.weight.detach().split(Fused.ROWS)]
    optimizer = torch.optim.Muon([plain.out.weight, *apart], lr=0.02, **OPTIONS)
    mesh = weft.init_mesh(**sizes)
    fused = {"qkv": {"style": "column", "parts": Fused.ROWS}, "out": {"style": "row", "parts": Fused.ROWS}}
    model = weft.parallelize(plain_model(Fused), mesh, plan=fused if "tp" in sizes else None, zero=zero)
    groups = [{"params": [model.out.weight]}, {"params": [model.qkv.weight], "parts": Fused.ROWS}]
    split = weft.Muon(groups, lr=0.02, **OPTIONS)
    for step in range(4):
        tokens, targets = batch(step)
        plain.zero_grad()
        loss_of(plain(tokens), targets).backward()
        for x, gradient in zip(apart, plain.qkv.weight.grad.split(Fused.ROWS), strict=True):
            x.grad = gradient
        optimizer.step()
        part = batch(step, mesh["dp"].get_local_rank(), mesh["dp"].size())
        learn(model, split, [part])
    for name, value in weft.full_state_dict(model).items():
        assert (value - plain.state_dict()[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize(("sizes", "zero"), [({"tp": 2}, 0), ({"dp": 2}, 3)], ids=["tp", "zero 3"])
def test_fused_matrices_are_orthogonalised_apart(sizes, zero):
    run_ranks(check_fused, 2, sizes, zero)


def save_and_load(rank, path):
    mesh = weft.init_mesh(dp=2, tp=2)
    states = []
    for zero in (3, 0):
        model = weft.parallelize(plain_model(Llama), mesh, zero=zero)
        optimizer = weft.Muon(groups_of(model.named_parameters()), lr=0.02)
        batches = [batch(step, mesh["dp"].get_local_rank(), 2) for step in range(3)]
        if not states:
            learn(model, optimizer, batches[:2])
            weft.save_checkpoint(model, optimizer, path)
        else:
            weft.load_checkpoint(model, optimizer, path)
        learn(model, optimizer, batches[2:])
        states.append(weft.full_state_dict(model))
    for name, value in states[1].items():
        assert (value - states[0][name]).abs().max() < 1e-9, name


def test_a_checkpoint_has_its_state(tmp_path):
    run_ranks(save_and_load, 4, tmp_path)


def test_what_has_no_matrices_is_refused():
    vector, kernel = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2, 3, 3))
    for parameter in (vector, kernel):
        with pytest.raises(ValueError, match="Muon steps matrices, and a parameter has the shape"):
            weft.Muon([parameter])
    with pytest.raises(ValueError, match="must add up to the 4 rows"):
        weft.Muon([{"params": [nn.Parameter(torch.ones(4, 2))], "parts": (1, 2)}])
    with pytest.raises(ValueError, match="momentum should be >= 0"):
        weft.Muon([nn.Parameter(torch.ones(4, 2))], momentum=-1)
    sparse = nn.Parameter(torch.ones(4, 2))
    sparse.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="takes no sparse gradients"):
        weft.Muon([sparse]).step()


def test_parameters_may_come_and_go_and_the_optimizer_be_copied():
    layers = [nn.Linear(3, 3, bias=False).double() for _ in range(3)]
    plain = copy.deepcopy(layers)
    ours, theirs = (kind([x.weight for x in those]) for kind, those in ((weft.Muon, layers), (torch.optim.Muon, plain)))
    for step in range(6):
        for those, optimizer in ((layers, ours), (plain, theirs)):
            optimizer.zero_grad()
            for layer in (those[step % 3], those[(step + 1) % 3]):
                layer(torch.full((2, 3), 0.5 + step, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        if step == 3:
            ours = copy.deepcopy(ours)
            for layer, weight in zip(layers, ours.param_groups[0]["params"], strict=True):
                layer.weight = weight
    for layer, other in zip(layers, plain, strict=True):
        torch.testing.assert_close(layer.weight, other.weight, rtol=1e-9, atol=0)
    transposed = nn.Parameter(torch.randn(4, 3).t())
    transposed.grad = torch.randn(4, 3).t()
    weft.Muon([transposed]).step()


def keep_fp32(rank):
    model = weft.DataParallel(nn.Linear(4, 4).bfloat16(), shard_optimizer=True, main_grad=True)
    optimizer = model.optimizer(
        weft.Muon, [{"params": [model.module.weight]}, {"params": [model.module.bias], "use_muon": False}]
    )
    for _ in range(2):
        optimizer.zero_grad()
        model.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


def test_its_state_stays_in_fp32():
    run_ranks(keep_fp32, 2)
