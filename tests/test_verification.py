"""weft.verify: passes what is right, and names what is wrong."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.data_parallel.batch_units import running_unit
from weft.data_parallel.grad_norm import gradient_of
from weft.invariant.unit_sums import UnitSums
from weft.testing.ranks import run_ranks


class Tiny(nn.Module):
    """A causal model on vectors; attend(q, k, v) is its attention."""

    def __init__(self, attend=None):
        super().__init__()
        self.project, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)
        self.attend = attend or (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        x = x + self.attend(q, k, v).transpose(1, 2).flatten(-2)
        return x + self.down(F.relu(self.up(x)))


def models(attend=None):
    torch.manual_seed(0)
    reference = Tiny()
    model = Tiny(attend)
    model.load_state_dict(reference.state_dict())
    return model, reference


PLAN = {"up": "column", "down": "row"}
BATCH = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(1))


def tensor_parallel(rank):
    model, reference = models()
    weft.parallelize(model, dist.group.WORLD, plan=PLAN)
    report = weft.verify(model, reference, BATCH, probes=[weft.causal_probe(6)])
    assert report.ok, str(report)
    assert [difference.name for difference in report.differences][:2] == ["output", "gradient of project.weight"]
    assert len(report.differences) == 7
    report.raise_faults()

    class Doubled(torch.autograd.Function):
        """A gradient that is summed over the ranks once too often."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    wrong = copy.deepcopy(model)
    wrong.zero_grad()
    wrong.up.register_forward_hook(lambda module, inputs, output: Doubled.apply(output))
    report = weft.verify(wrong, reference, BATCH)
    faults = [difference.name for difference in report.differences if not difference.ok]
    assert "output" not in faults and "gradient of up.weight" in faults and "gradient of down.weight" not in faults
    with pytest.raises(AssertionError, match="FAULT .* gradient of up.weight"):
        report.raise_faults()
    assert "the runs part in up: step 0, rank 0: the gradient of input of up" in report.where
    assert report.where.endswith("it is 2 times the reference's")


def test_a_parallel_model_is_compared_with_the_unsplit_one():
    run_ranks(tensor_parallel, 2)


def in_stages(rank):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))
    split = weft.parallelize(copy.deepcopy(reference), weft.init_mesh(pp=2, device_type="cpu"))
    report = weft.verify(split, reference, BATCH)
    assert report.ok, str(report)
    gradients = {f"gradient of {name}" for name, _ in reference.named_parameters()}
    assert {difference.name for difference in report.differences} == {"output", *gradients}
    assert len(report.differences) == 1 + len(gradients)

    split.zero_grad()
    if rank == 1:
        split.get_parameter("4.weight").register_hook(lambda gradient: 2 * gradient)
    report = weft.verify(split, reference, BATCH)
    assert [difference.name for difference in report.differences if not difference.ok] == ["gradient of 4.weight"]


def test_gradients_of_every_stage_are_compared():
    run_ranks(in_stages, 2)


def context_parallel(rank, method):
    def step(model, x):
        """The model that has context attention gets a part of the sequence."""
        split = model.attend in (masked, loose)
        shard = (lambda t: weft.shard_sequence(t, dim=1)) if split else (lambda t: t)
        output = model(shard(x))
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(output)
        (output * shard(weights)).sum().backward()
        if not split:
            return output.detach()
        for parameter in model.parameters():
            weft.all_reduce(parameter.grad)
        return weft.unshard_sequence(output.detach(), dim=1)

    def masked(q, k, v):
        return weft.context_attention(q, k, v, causal=True, method=method)

    def loose(q, k, v):
        return weft.context_attention(q, k, v, method=method)

    model, reference = models(masked)
    report = weft.verify(model, reference, BATCH, step=step, probes=[weft.causal_probe(4)])
    assert report.ok, str(report)

    model, reference = models(loose)
    report = weft.verify(model, reference, BATCH, step=step, probes=[weft.causal_probe(4)])
    assert not report.ok and len(report.leaks) == dist.get_world_size()
    assert "tokens from 4 on are seen before: the output changed by" in report.leaks[0]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_mask_that_came_loose_is_a_leak(method):
    run_ranks(context_parallel, 2, method)


def test_models_of_other_names_are_refused():
    model, _ = models()
    with pytest.raises(ValueError, match="the reference has no parameter 'project.weight'"):
        weft.verify(model, nn.Sequential(nn.Identity(), nn.Linear(8, 8)), BATCH)
    model, reference = models()
    reference.unused = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the model has no parameter unused.bias, unused.weight"):
        weft.verify(model, reference, BATCH)


class Shifted(nn.Module):
    """Has gradients that are zero in exact arithmetic: of the bias of a key, and of a bias before a batch norm."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.before, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        x = x + self.down(F.relu(self.up(x)))
        x = torch.softmax(self.query(x) @ self.key(x).T, -1) @ x
        return self.norm(self.before(x))


def shifted(dtype=torch.float32):
    torch.manual_seed(0)
    reference = Shifted().to(dtype)
    return copy.deepcopy(reference), reference, torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def zero_in_theory(rank, dtype):
    model, reference, x = shifted(dtype)
    weft.parallelize(model, dist.group.WORLD, plan=PLAN)
    report = weft.verify(model, reference, x)
    assert report.ok, str(report)
    noted = {difference.name: difference.error for difference in report.differences if "rounding" in difference.note}
    assert set(noted) == {"gradient of key.bias", "gradient of before.bias"}
    assert max(difference.allowed for difference in report.differences) < 0.5

    model.key.bias.register_hook(lambda gradient: gradient + 10)
    report = weft.verify(model, reference, x)
    assert [difference.name for difference in report.differences if not difference.ok] == ["gradient of key.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gradient_that_is_zero_in_theory_is_right_where_rounding_is_left_of_it(dtype):
    run_ranks(zero_in_theory, 2, dtype)


def one_element(gradient):
    changed = gradient.clone()
    changed.view(-1)[gradient.abs().argmax()] *= 1.5
    return changed


FAULTS = {"missing": torch.zeros_like, "twice": lambda g: 2 * g, "half": lambda g: g / 2, "one element": one_element}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_gradient_is_found_in_every_parameter(fault, dtype):
    _, reference, x = shifted(dtype)
    for name, parameter in reference.named_parameters():
        if name not in ("key.bias", "before.bias"):
            model = copy.deepcopy(reference)
            model.get_parameter(name).register_hook(FAULTS[fault])
            report = weft.verify(model, reference, x)
            assert [d.name for d in report.differences if not d.ok] == [f"gradient of {name}"], f"{name}\n{report}"
            assert parameter.grad is None


def left_as_it_was(rank, options):
    model, reference, x = shifted()
    model = weft.DataParallel(model, **options)
    if options.get("shard_optimizer"):
        model.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        (3 * model(x)).square().sum().backward()
    held = [gradient_of(p) for p in [*model.parameters(), *model.pieces()]] + list(model.buffers())
    before = [None if tensor is None else tensor.clone() for tensor in held]
    report = weft.verify(model, reference, x)
    assert report.ok, str(report)
    after = [gradient_of(p) for p in [*model.parameters(), *model.pieces()]] + list(model.buffers())
    assert any(tensor is not None and tensor.any() for tensor in after[: -len(list(model.buffers()))])
    for was, kept in zip(before, after, strict=True):
        assert (was is None) == (kept is None) and (was is None or torch.equal(was, kept))
    model.module.norm.bias.register_hook(lambda gradient: gradient / 2)
    report = weft.verify(model, reference, x)
    assert [d.name for d in report.differences if not d.ok] == ["gradient of module.norm.bias"]


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"main_grad": True}], ids=str)
def test_a_model_with_gradients_is_compared_and_keeps_them(options):
    run_ranks(left_as_it_was, 2, options)


def alone_on_each_rank():
    """Return a mesh of this rank alone."""
    names = ("copies", "pp", "dp", "cp", "tp")
    return init_device_mesh("cpu", (dist.get_world_size(), 1, 1, 1, 1), mesh_dim_names=names)[names[1:]]


def step_of_either(model, batch):
    """Run a step of a pipeline, or of one process; return the loss of the whole batch."""
    if isinstance(model, weft.Pipeline):
        return model.step(batch, batch)
    loss = model.in_units(lambda x, y: F.mse_loss(model(x), y), batch, batch)
    loss.backward()
    return loss.detach()


def nudge(rank, unit, direction):
    """Return a forward hook that changes one element of an output or of its gradient in one unit on one rank."""

    def change(x):
        y = x.clone()
        y.view(-1)[3] += 1e-3
        return y

    def hook(module, args, output):
        if (dist.get_rank(), running_unit()) == (rank, unit):
            if direction == "forward":
                return change(output)
            output.register_hook(change)
        return None

    return hook


def in_bits(rank):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    batch = torch.randn(8, 8)
    reference = weft.parallelize(copy.deepcopy(plain), alone_on_each_rank(), invariant=4)

    def check(sizes, place, hook, text, **options):
        stages = {"pipeline": {"loss": F.mse_loss}} if "pp" in sizes else {}
        model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(**sizes), invariant=4, **stages)
        assert weft.verify(model, reference, batch, bitwise=True, **options).ok
        named = dict(model.named_modules())
        layer = named.get(place) or named.get(f"module.{place}")
        if layer is not None:
            layer.register_forward_hook(hook)
        report = weft.verify(model, reference, batch, bitwise=True, **options)
        assert report.first is not None and not report.ok
        assert report.first.startswith(text), report.first
        with pytest.raises(AssertionError, match=f"first other bits: {text}"):
            report.raise_faults()

    check({"dp": 2}, "1", nudge(1, 3, "forward"), "forward of 1, unit 3: 1 of 32 elements differ on rank 1")
    check({"dp": 2}, "3", nudge(0, 1, "backward"), "backward to the output of 3, unit 1: 1 of 16 elements differ")
    check({"tp": 2}, "0", nudge(1, 2, "forward"), "forward of 0, unit 2: 1 of 16 elements differ on rank 1")
    check({"pp": 2}, "3", nudge(1, 0, "forward"), "forward of 3, unit 0: 1 of 16", step=step_of_either)
    with pytest.raises(ValueError, match="give the probes to a call without it"):
        weft.verify(plain, plain, batch, bitwise=True, probes=[weft.causal_probe(1)])

    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(dp=2), invariant=4)
    total = UnitSums.total
    UnitSums.total = lambda self: [x.mul_(1 + 1e-3 * (self.ranks.world_size > 1)) for x in total(self)]
    report = weft.verify(model, reference, batch, bitwise=True)
    UnitSums.total = total
    assert report.first is None and not report.ok
    assert [d.ok for d in report.differences] == [True, *[False] * 8]
    model.zero_grad()


def test_the_first_other_bit_is_named_with_its_module_and_unit():
    run_ranks(in_bits, 2)
