"""The branches of a block on different ranks: the same output and gradients, and each parameter on its rank alone."""

import copy
import re

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank
import torch.distributed as dist
from torch import nn

import weft
from weft.nn import Branches
from weft.testing.ranks import run_ranks


class ConvNorm(nn.Module):
    def __init__(self, inputs, outputs, kernel, padding=0):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


class SideBySide(nn.ModuleDict):
    """Branches as a plain model has them."""

    def __init__(self, branches, combine="concat", dim=1):
        super().__init__(branches)
        self.combine, self.dim = combine, dim

    def forward(self, x):
        outputs = [branch(x) for branch in self.values()]
        return torch.cat(outputs, self.dim) if self.combine == "concat" else sum(outputs)


def inception():
    pool = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvNorm(5, 1, 1))
    tall = nn.Sequential(ConvNorm(5, 3, 1), ConvNorm(3, 7, 5, padding=2))
    wide = nn.Sequential(ConvNorm(5, 2, 1), ConvNorm(2, 3, 3, padding=1))
    return SideBySide({"point": ConvNorm(5, 4, 1), "tall": tall, "wide": wide, "pool": pool})


def summed():
    """A sum with the input itself among its terms."""
    terms = {f"conv{n}": nn.Sequential(nn.Conv2d(15, 15, n, padding=n // 2), nn.Tanh()) for n in (1, 3, 5)}
    return SideBySide({"itself": nn.Identity(), **terms}, "sum")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inception, self.summed, self.head = nn.Conv2d(3, 5, 1), inception(), summed(), nn.Linear(15, 2)

    def forward(self, x):
        return self.head(self.summed(self.inception(self.stem(x))).mean((-2, -1)))


def split(whole, group=None, assignment=None):
    """Return a copy with its branches over ranks."""
    model = copy.deepcopy(whole)
    for name, block in list(model.named_children()):
        if isinstance(block, SideBySide):
            given = assignment if name == "inception" else None
            ours = Branches(dict(block), combine=block.combine, dim=block.dim, group=group, assignment=given)
            setattr(model, name, ours)
    return model


def net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def batch(step):
    return torch.randn(4, 3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps, clip):
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        clip(model)
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10, msg=lambda text: f"{what}: {text}")


def check_same(model, whole, same=close):
    for name, parameter in model.named_parameters():
        shard, value = weft.shard_of(parameter), whole.get_parameter(name)
        same(parameter.detach(), (shard.take(value) if shard else value).detach(), name)
    for name, buffer in model.named_buffers():
        same(buffer, whole.get_buffer(name), name)


def to_the_bit(found, expected, what):
    assert torch.equal(found, expected), what


def check_gradients(whole, x):
    model = split(whole)
    assert set(dict(model.named_parameters())) == set(dict(whole.named_parameters()))
    found = []
    for one in (model, whole):
        x.grad = None
        one(x).square().sum().backward()
        found.append(x.grad)
    close(*found, "dx")
    for name, parameter in model.named_parameters():
        shard, gradient = weft.shard_of(parameter), whole.get_parameter(name).grad
        close(parameter.grad, shard.take(gradient) if shard else gradient, f"d{name}")
    check_same(model, whole)  # the running statistics


def check_steps(rank, whole, path):
    """Steps of the split model, and of what was stored of it and is loaded as the plain one."""
    model = weft.DataParallel(
        copy.deepcopy(split(whole)),
        group=dist.new_group([rank], use_local_synchronization=True),
    )
    optimizer, plain = sgd(model), sgd(whole)
    train(model, optimizer, range(3), lambda m: m.clip_grad_norm_(0.1))
    train(whole, plain, range(3), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    check_same(model.module, whole)
    weft.save_checkpoint(model, optimizer, path)
    other = net(1)
    its = sgd(other)
    weft.load_checkpoint(other, its, path)
    check_same(model.module, other, to_the_bit)
    train(other, its, range(3, 5), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    train(whole, plain, range(3, 5), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    for name, value in whole.state_dict().items():
        close(other.state_dict()[name], value, name)


def check_loads(whole, x):
    """A whole state_dict, into branches on ranks that were given."""
    assignment = [(n + 1) % dist.get_world_size() for n in range(4)]
    again = split(net(2), assignment=assignment)
    again.load_state_dict(whole.state_dict())
    twin = copy.deepcopy(again)
    twin.load_state_dict(whole.state_dict(), assign=True)
    for one in (again, twin):
        one.eval(), whole.eval()
        close(one(x).detach(), whole(x).detach(), "a whole state_dict")
        assert all(weft.shard_of(p) for name, p in one.named_parameters() if name.startswith("inception"))
    with pytest.raises(
        RuntimeError, match=r"inception.point.conv.weight has shape \(2,\); expected .*whole \(4, 5, 1, 1\)"
    ):
        again.load_state_dict({**whole.state_dict(), "inception.point.conv.weight": torch.zeros(2)})
    return sum(p.numel() for p in again.inception.parameters())


def check_training(rank, path):
    whole, x = net(), batch(9).requires_grad_()
    check_gradients(copy.deepcopy(whole), x)
    check_steps(rank, whole, path)
    return check_loads(whole, x)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_branches_train_and_are_stored_as_the_block_on_one_rank(world, tmp_path):
    held = run_ranks(check_training, world, tmp_path / "saved")
    everything = sum(p.numel() for p in inception().parameters())
    assert sum(held) == everything, "every parameter is on one rank"
    assert world == 1 or max(held) < everything


OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "LAMB": lambda model: weft.LAMB(weft.layerwise_groups(model, 0.1), lr=0.03),
}


def check_replicas(rank):
    """Two by two ranks: batches are split as well, and norms are of all branches on every rank."""
    mesh = weft.init_mesh(dp=2, tp=2, device_type="cpu")
    rows = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    for kind, sharded in (("AdamW", False), ("AdamW", True), ("LAMB", False)):
        whole = net().eval()
        inner = split(whole, mesh["tp"])
        model = weft.DataParallel(inner, group=mesh["dp"], shard_optimizer=sharded)
        plain = OPTIMIZERS[kind](whole)
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01) if sharded else OPTIMIZERS[kind](model)
        for step in range(2):
            model.zero_grad(), plain.zero_grad()
            model(batch(step)[rows]).square().mean().backward()
            whole(batch(step)).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            torch.testing.assert_close(model.clip_grad_norm_(0.1), expected, rtol=1e-6, atol=0)
            optimizer.step(), plain.step()
        for name, parameter in inner.named_parameters():
            shard, value = weft.shard_of(parameter), whole.get_parameter(name)
            mine = shard.take(value) if shard else value
            torch.testing.assert_close(parameter, mine, rtol=1e-6, atol=1e-7, msg=f"{kind} {name}")


def test_replicas_of_branches_and_every_kind_of_optimizer():
    run_ranks(check_replicas, 4)


def check_by_hand(rank):
    names = ("keys", "dim", "combine")  # of methods and of what a layer might hold
    assert Branches({name: nn.Linear(2, 2) for name in names})(torch.ones(1, 2)).shape == (1, 6)
    for combine, dim in (("concat", -1), ("sum", 1)):
        torch.manual_seed(0)
        layers = {"left": nn.Linear(4, 3), "middle": nn.Linear(4, 3), "right": nn.Linear(4, 3)}
        if combine == "concat":
            layers["right"] = nn.Linear(4, 6)
        model = Branches(copy.deepcopy(layers), combine=combine, dim=dim, assignment=(1, 0, 1)).double()
        assert model.assignment == (1, 0, 1) and {name for name, _ in model.named_children()} == set(layers)
        x = torch.randn(2, 4, dtype=torch.float64)
        outputs = [layer.double()(x) for layer in layers.values()]
        close(model(x).detach(), (torch.cat(outputs, dim) if combine == "concat" else sum(outputs)).detach(), combine)
    torch.manual_seed(0)
    whole = Net()
    report = weft.verify(split(whole), whole, batch(0).float())
    assert report.ok, str(report)


def test_branches_are_built_by_hand_and_verified():
    run_ranks(check_by_hand, 2)


def check_random_numbers(rank):
    """Each rank draws for its branches; afterwards all draw alike, though one drew more."""
    model = Branches([nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))], assignment=(0, 1))
    torch.manual_seed(0)
    y = model(torch.ones(1, 200))
    halves = [half != 0 for half in y.chunk(2, 1)]
    assert 0.3 < halves[0].float().mean() < 0.7 and 0.1 < halves[1].float().mean() < 0.4
    found = [None] * 2
    dist.all_gather_object(found, torch.rand(1).item())
    return found[0] == found[1]


def test_ranks_draw_alike_after_branches_that_draw():
    assert all(run_ranks(check_random_numbers, 2))


def check_refusals(rank):
    scalar = nn.Linear(4, 4)
    scalar.temperature = nn.Parameter(torch.ones(()))
    tied = [nn.Linear(4, 4) for _ in range(3)]
    tied[2].weight = tied[0].weight
    split = nn.ModuleDict({"b": weft.ParallelLinear(4, 4, style="column", gather_output=True)})["b"]
    inner = Branches([nn.Linear(4, 4), split, nn.Linear(4, 4)])
    calls = dist.group.WORLD.engine.group.calls
    for message, call in (
        ("2 branches cannot be placed on 3 ranks", lambda: Branches(tied[:2])),
        ("temperature has no dimension", lambda: Branches([nn.Linear(4, 4), nn.Linear(4, 4), scalar])),
        ("0.weight and 2.weight are one parameter in two branches", lambda: Branches(tied)),
        (
            "assignment=.0, 0, 1. must name a rank for each",
            lambda: Branches([*tied[:2], nn.Linear(4, 4)], assignment=(0, 0, 1)),
        ),
        ("combine='product' is not one of 'concat', 'sum'", lambda: Branches(tied, combine="product")),
        ("1 is split over ranks inside of a branch", lambda: inner(torch.ones(2, 4))),
    ):
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            call()
    assert dist.group.WORLD.engine.group.calls == calls, "nothing was communicated"


def test_branches_that_cannot_be_placed_are_refused():
    run_ranks(check_refusals, 3)


class Sums(nn.Linear):
    def forward(self, x):
        return super().forward(x).cumsum(1)


class Words(nn.Module):
    """Branches over a sequence; one branch looks along it."""

    def __init__(self):
        super().__init__()
        self.block = SideBySide({"left": nn.Linear(4, 4), "sums": Sums(4, 4), "right": nn.Linear(4, 4)}, dim=-1)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.block(x.tanh()))


def check_shared_sequences(rank):
    torch.manual_seed(0)
    whole = Words().double()
    mesh = weft.init_mesh(cp=2, tp=2, device_type="cpu")
    model = weft.parallelize(split(whole, mesh["tp"]), mesh["cp"], plan={})
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    found, expected = (x.clone().requires_grad_() for _ in range(2))
    y, z = model(found), whole(expected)
    torch.testing.assert_close(y, z)
    (y * y.detach().cos()).sum().backward()
    (z * z.detach().cos()).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    for name, parameter in model.named_parameters():
        gradient = whole.get_parameter(name).grad
        if parameter.numel():
            torch.testing.assert_close(
                parameter.grad.as_subclass(torch.Tensor), gradient, msg=lambda text, n=name: f"{n}: {text}"
            )
    model = weft.parallelize(split(whole, mesh["tp"]), mesh["cp"], plan={}, context={"strict": True})
    with pytest.raises(ValueError, match="strict: .* would be gathered .*: Branches takes the whole"):
        model(x)


def test_a_shared_sequence_is_gathered_for_branches():
    run_ranks(check_shared_sequences, 4)
