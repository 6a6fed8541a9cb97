"""weft.verify: passes what is right, and names what is wrong."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.data_parallel.grad_norm import gradient_of
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
