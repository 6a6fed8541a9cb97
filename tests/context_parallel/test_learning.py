"""What is left alone from the second call of a kind on, what never is, and what makes a call a first one again."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.comm.engine_communicator import EngineCommunicator
from weft.context_parallel import learning
from weft.testing.models import Llama, loss_of
from weft.testing.ranks import run_ranks


class Held:
    """An object that modules hold."""

    turned = False


ELSEWHERE = Held()


class Own(nn.Module):
    """A module around a function of its own and of x [batch, sequence, 6]."""

    def __init__(self, function):
        super().__init__()
        self.scale, self.function, self.count = nn.Parameter(torch.rand(6) + 0.5), function, 0

    def forward(self, x):
        return self.function(self, x)


class Around(nn.Module):
    """A model whose own code is done position by position, around a module, beside a norm that is left alone."""

    def __init__(self, function):
        super().__init__()
        self.norm, self.own, self.last = nn.LayerNorm(6), Own(function), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.own(self.norm(x)))


def counts(module, x):
    module.count += 1
    return module.scale * x


def counts_and_turns(module, x):
    module.count += 1
    return module.scale * (x if module.count % 3 else x.flip(1))


def keeps(module, x):
    module.kept = x
    return module.scale * x


def keeps_elsewhere(module, x):
    ELSEWHERE.part = module.scale * x
    return ELSEWHERE.part + 0


def chooses(module, x):
    return module.scale * (x if random.random() < 2 else -x)


NEVER = {
    "length": lambda module, x: module.scale * x / x.size(1),
    "values": lambda module, x: module.scale * (x if (module.scale > 0).all() else -x),
    "along": lambda module, x: module.scale * (x - x.mean(1, keepdim=True)),
    "dropout": lambda module, x: module.scale * F.dropout(x, 0.0 if not module.training else 1e-9),
    "in place": lambda module, x: (module.scale * x).mul_(2),
    "positions": lambda module, x: module.scale * x + torch.arange(x.size(1)).view(-1, 1),
    "counts": counts,
    "counts and turns": counts_and_turns,
    "keeps": keeps,
    "keeps elsewhere": keeps_elsewhere,
    "python": chooses,
}


def alone_in(model) -> set[str]:
    """Names of the modules that are left alone in some kind of call."""
    names = {module: name for name, module in model.named_modules()}
    (edge,) = [hook for hook in model._forward_pre_hooks.values() if hasattr(hook, "kinds")]
    return {names[module] for kind in edge.kinds._known.values() for module in kind.alone}


def steps_as_unsplit(rank, name, count=7):
    torch.manual_seed(0)
    random.seed(0)
    function = NEVER[name]
    reference, model = Around(function), Around(function)
    model.load_state_dict(reference.state_dict())
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"), plan=None)
    for step in range(count):
        x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(step))
        outputs = []
        for each in (reference, model):
            each.zero_grad()
            outputs.append(each(x))
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(*outputs)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    return alone_in(model)


@pytest.mark.parametrize("name", NEVER)
def test_what_is_more_than_position_by_position_is_never_left_alone(name):
    for alone in run_ranks(steps_as_unsplit, 2, name):
        if name == "python":
            assert not alone
        else:
            assert "own" not in alone
        if name not in ("python", "counts", "counts and turns"):
            assert {"norm", "last"} <= alone


def turned(x):
    return x.flip(1)


class Switched(nn.Module):
    """Its own code follows what it, its class and objects in it hold."""

    flag = False

    def __init__(self):
        super().__init__()
        self.linear, self.power, self.turned, self.last = nn.Linear(6, 6), 1, [0], torch.tanh
        self.options, self.held = {"turned": False}, Held()
        self.held.held = Held()

    def forward(self, x):
        y = self.last(self.linear(x) ** self.power)
        held = (self.flag, self.turned[-1], self.options["turned"], self.held.turned, self.held.held.turned)
        return y.flip(1) if any(held) else y


class Settings(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.switched = nn.LayerNorm(6), Switched()

    def forward(self, x):
        return self.switched(self.norm(x))


def set_of_both(name, value):
    return lambda *both: [setattr(each.switched, name, value) for each in both]


def frozen(*both, requires_grad=False):
    for each in both:
        each.switched.linear.weight.requires_grad_(requires_grad)


CHANGES = {
    "nothing": lambda *both: None,
    "a number": set_of_both("power", 2),
    "a list": lambda *both: [each.switched.turned.append(1) for each in both],
    "a new attribute": set_of_both("flag", True),
    "an attribute of the class": lambda *both: setattr(Switched, "flag", True),
    "a dict": set_of_both("options", {"turned": True}),
    "a value of a dict": lambda *both: [each.switched.options.update(turned=True) for each in both],
    "an attribute of an object": lambda *both: [setattr(each.switched.held, "turned", True) for each in both],
    "an object in an object": lambda *both: [setattr(each.switched.held.held, "turned", True) for each in both],
    "a function": set_of_both("last", turned),
    "a forward": lambda *both: [setattr(each.norm, "forward", lambda x: x.roll(1, 1)) for each in both],
    "evaluation": lambda *both: [each.eval() for each in both],
    "frozen": frozen,
    "a parameter": lambda *both: [setattr(each.norm, "weight", nn.Parameter(torch.full((6,), 0.5))) for each in both],
    "a module": lambda *both: [
        setattr(each.switched, "linear", nn.Sequential(each.switched.linear, nn.Tanh())) for each in both
    ],
    "a hook": lambda *both: [each.switched.register_forward_hook(lambda *of: 2 * of[2].flip(1)) for each in both],
}


def learns(rank, change):
    """Three calls before and after a change, with two lengths and without gradients; returns the first ones' number."""
    torch.manual_seed(0)
    Switched.flag = False
    model, reference = Settings(), Settings()
    reference.load_state_dict(model.state_dict())
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"), plan=None)
    add, first = learning.Kinds.add, []

    def run(length):
        x = torch.randn(2, length, 6, generator=torch.Generator().manual_seed(length))
        outputs = []
        for each in (model, reference):
            each.zero_grad()
            outputs.append(each(x))
            if outputs[-1].requires_grad:
                outputs[-1].square().sum().backward()
        torch.testing.assert_close(*outputs)
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)

    def runs():
        before = len(first)
        for _ in range(3):
            run(9)
            run(12)
            with torch.no_grad():
                run(9)
        return len(first) - before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning.Kinds, "add", lambda kinds, *more: first.append(1) or add(kinds, *more))
        counted = [runs()]
        CHANGES[change](model, reference)
        counted.append(runs())
        if change == "frozen":
            frozen(model, reference, requires_grad=True)
            counted.append(runs())
    return counted


@pytest.mark.parametrize("change", CHANGES)
def test_calls_of_a_new_kind_and_changes_are_learnt_anew(change):
    """Three kinds: two lengths with gradients, and one without. What is trained again was known before."""
    after = {"nothing": [0], "a forward": [0], "frozen": [3, 0]}.get(change, [3])
    assert run_ranks(learns, 2, change) == [[3, *after]] * 2


class SumOfSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class Scaled(nn.Module):
    """Works with its parameter as one: with its class and with an attribute that a user gave it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        assert isinstance(self.weight, nn.Parameter)
        return x * self.weight * self.weight.gain


class Uses(nn.Module):
    """A model that uses parameters of modules which are left alone, in one of several ways besides."""

    def __init__(self, way):
        super().__init__()
        self.way, self.norm, self.inner, self.last = way, nn.LayerNorm(6), nn.Sequential(Scaled()), nn.Linear(6, 6)
        self.inner[0].weight.gain = 2.0

    def forward(self, x):
        with torch.set_grad_enabled(self.way == "with gradients" or torch.is_grad_enabled()):
            y = self.last(self.inner(self.norm(x)))
            if self.way == "custom function":
                return y.square().sum() + SumOfSquares.apply(self.last.weight)
            if self.way == "late" and x.flatten()[0] > 0:
                return y.square().sum() + self.last.weight.square().sum()
            return y.square().mean()


def uses(rank, way):
    torch.manual_seed(0)
    reference, model = Uses(way), Uses(way)
    model.load_state_dict(reference.state_dict())
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"), plan=None)
    for sign in (-1, -1, 1, 1, -1, 1):
        x = sign * torch.rand(2, 7, 6, generator=torch.Generator().manual_seed(sign + 1))
        for each in (reference, model):
            each.zero_grad()
            with torch.set_grad_enabled(way != "with gradients"):
                loss = each(x)
            loss.backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    return alone_in(model)


@pytest.mark.parametrize("way", ["as a parameter", "custom function", "late", "with gradients"])
def test_parameters_of_modules_that_are_left_alone_are_used_as_in_the_plain_model(way):
    assert run_ranks(uses, 2, way) == [{"norm", "inner", "last"}] * 2


def recomputes(rank):
    torch.manual_seed(0)
    model, reference = Llama(2, dropout=0.0), Llama(2, dropout=0.0)
    reference.load_state_dict(model.state_dict())
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"), plan=None, recompute="full")
    tokens = torch.randint(Llama.WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for each in (model, reference):
            each.zero_grad()
            loss_of(each(tokens), tokens).backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_what_is_left_alone_in_a_forward_may_run_again_in_backward():
    run_ranks(recomputes, 2)


def frozen_and_unused(rank):
    torch.manual_seed(0)
    model = Llama(2)
    model.unused = nn.Linear(3, 3)
    model.embedding.weight.requires_grad_(False)
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"), plan=None)
    tokens = torch.randint(Llama.WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        model.zero_grad()
        loss_of(model(tokens), tokens).backward()
        without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        assert without == {"embedding.weight", "unused.weight", "unused.bias"}
    model.embedding.weight.requires_grad_()
    for _ in range(2):
        loss_of(model(tokens), tokens).backward()
        assert model.embedding.weight.grad is not None


def test_a_parameter_without_a_gradient_keeps_none():
    run_ranks(frozen_and_unused, 2)


class Noisy(nn.Module):
    """Draws for its output [batch, sequence, 6] from a value of its input on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return y + torch.rand(6) if x.flatten()[0] > 0 else y


def draws_late(rank):
    model = Noisy()
    weft.parallelize(model, weft.init_mesh(cp=2, device_type="cpu"), plan=None)
    found = []
    for step, sign in enumerate([-1, -1, 1, 1]):
        torch.manual_seed(100 * step + rank)
        x = torch.full((2, 8, 6), float(sign))
        found.append(model(x)[0])
    return found


def test_ranks_draw_alike_also_in_a_branch_that_the_first_call_did_not_take():
    for found in run_ranks(draws_late, 2):
        for positions in found:
            torch.testing.assert_close(positions, positions[:1].expand(8, 6))


def collectives(rank):
    """All-reduces of each backward."""
    torch.manual_seed(0)
    model = weft.parallelize(Llama(3), weft.init_mesh(cp=2, device_type="cpu"), plan=None)
    tokens = torch.randint(Llama.WORDS, (2, 8), generator=torch.Generator().manual_seed(0))
    counted, calls, reduce = [], [], EngineCommunicator.all_reduce_

    def noted(ranks, x, *more):
        calls.append(x)
        return reduce(ranks, x, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCommunicator, "all_reduce_", noted)
        for _ in range(3):
            loss = loss_of(model(tokens), tokens)
            calls.clear()
            loss.backward()
            counted.append(len(calls))
    return counted


def test_gradients_of_what_is_left_alone_travel_together():
    for first, *later in run_ranks(collectives, 2):
        assert first > 20 and later == [1, 1]


class Dropping(nn.Module):
    """Attention that drops probabilities, beside modules that are left alone."""

    def __init__(self, with_attention=True):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) if with_attention else None
        self.rest = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        if self.projections is not None:
            q, k, v = (project(x).unflatten(-1, (4, 4)).transpose(1, 2) for project in self.projections)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training, is_causal=True)
            x = x + self.drop(y.transpose(1, 2).flatten(2))
        return self.rest(x)


def repeated_calls(rank, sizes, options, with_attention, training):
    """Return the output, the gradients and the generator's state of four calls with one seed."""
    torch.manual_seed(0)
    model, x = Dropping(with_attention), torch.randn(4, 12, 16)
    model = weft.parallelize(model, weft.init_mesh(**sizes, device_type="cpu"), **options).train(training)
    found = []
    for _ in range(4):
        torch.manual_seed(11)
        out = model(x)
        out.square().sum().backward()
        found.append([out.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    return found


IN_UNITS = {"invariant": 4, "context": {"units": 4}}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("sizes", "options", "with_attention"),
    [
        ({"cp": 2}, {}, True),
        ({"cp": 2}, {"context": "ulysses"}, True),
        ({"cp": 2}, IN_UNITS, False),
        ({"tp": 1}, IN_UNITS, False),
    ],
    ids=["ring", "ulysses", "units over cp", "units"],
)
def test_a_call_that_is_learnt_draws_as_later_ones_do(sizes, options, with_attention, training):
    world = max(sizes.values())
    for first, *later in run_ranks(repeated_calls, world, sizes, options, with_attention, training):
        for call in later:
            assert all(torch.equal(x, y) for x, y in zip(first, call, strict=True))
