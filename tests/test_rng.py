"""Random numbers of models with `invariant`: what is dropped follows from the module, the unit and the call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from weft.forward.running import followed
from weft.rng import UnitDraws, drops, name_modules, part_of


class Two(nn.Module):
    def __init__(self, p=0.3):
        super().__init__()
        self.first, self.second = nn.Dropout(p), nn.Dropout(p)
        name_modules(self)

    def forward(self, x):
        return [self.first(x), self.second(x), self.first(x)]


def masks(model, seed, order=None, x=None):
    """Return which elements are kept by each dropout of the model."""
    with followed(model), UnitDraws(seed):
        return [y != 0 for y in (order or model)(torch.ones(4000) if x is None else x)]


def test_what_is_dropped_follows_from_the_module_and_the_call():
    model = Two()
    before = torch.get_rng_state()
    found = masks(model, 5)
    assert torch.equal(torch.get_rng_state(), before)
    for mask in found:
        assert abs(mask.float().mean() - 0.7) < 0.05
    for other in (found[1], found[2], masks(model, 6)[0]):
        assert not torch.equal(found[0], other)
    # Another order of modules, or none of the others, changes nothing.
    second, first, again = masks(model, 5, lambda x: [model.second(x), model.first(x), model.first(x)])
    assert all(map(torch.equal, (first, second, again), found))
    assert torch.equal(masks(model, 5, lambda x: [model.second(x)])[0], found[1])


def test_units_drop_other_elements_in_any_order():
    model = Two()

    def of(*units):
        found = {}
        for unit in units:
            with part_of("cp", 1), part_of("tp", unit):
                found[unit] = model.first(torch.ones(1000)) != 0
        return list(found.values())

    zero, one = masks(model, 5, lambda x: [y.float() for y in of(0, 1)])
    assert not torch.equal(zero, one)
    assert torch.equal(masks(model, 5, lambda x: [y.float() for y in of(1)])[0], one)


def test_without_a_seed_one_number_of_the_generator_is_drawn_if_something_drops():
    model = Two()
    torch.manual_seed(1)
    found = masks(model, None)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert all(map(torch.equal, masks(model, int(torch.randint(2**62, (1,)))), found))
    assert torch.equal(torch.get_rng_state(), after)
    masks(model.eval(), None)
    assert torch.equal(torch.get_rng_state(), after)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.two = nn.Linear(50, 50), Two()
        name_modules(self)

    def forward(self, x, **options):
        def layer(x):
            return F.dropout(sum(self.two(self.linear(x))), 0.2)

        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False, **options) if options else layer(x)
        return x


def of_selected():
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


CHECKPOINTS = ({}, {"preserve_rng_state": True}, {"preserve_rng_state": False}, {"context_fn": of_selected})


def test_a_checkpoint_drops_the_same_again():
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(7, 50)
    gradients = []
    for options in CHECKPOINTS:
        with followed(model), UnitDraws(3):
            y = model(x, **options)
        loss = y.square().sum()
        loss.backward(retain_graph=True)
        if "context_fn" not in options:  # torch allows one backward there
            model.zero_grad()
            loss.backward()  # from a second recomputation
        gradients.append((y.detach(), model.linear.weight.grad))
        model.zero_grad()
    for found in gradients[1:]:
        assert all(map(torch.equal, gradients[0], found))
    assert torch.utils.checkpoint._CheckpointFrame.__name__ == "_CheckpointFrame"


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Dropout1d(0.5), (2, 60, 3)),
        (nn.Dropout2d(0.5), (2, 60, 3, 2)),
        (nn.Dropout3d(0.5), (2, 60, 3, 2, 2)),
        (nn.AlphaDropout(0.5), (200,)),
        (nn.FeatureAlphaDropout(0.5), (2, 60, 3)),
        (nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), (2, 60, 4)),
    ],
)
def test_every_function_that_drops_is_found(module, shape):
    name_modules(module)
    x = torch.randn(shape)
    inputs = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)

    def run(seed):
        with followed(module), UnitDraws(seed):
            y = module(*inputs)
        return y if isinstance(y, torch.Tensor) else y[0]

    before = torch.get_rng_state()
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert torch.equal(torch.get_rng_state(), before)
    module.eval()
    assert torch.equal(run(1), run(2))


def test_calls_that_drop_nothing_are_known():
    x = torch.ones(1, 2, 3, 4)
    assert drops(F.scaled_dot_product_attention, (x, x, x), {"dropout_p": 0.1})
    assert not drops(F.scaled_dot_product_attention, (x, x, x), {})
    assert (
        drops(F.dropout, (x,), {}) and not drops(F.dropout, (x, 0.5, False), {}) and not drops(F.dropout, (x, 0.0), {})
    )
    assert not drops(F.alpha_dropout, (x,), {}) and not drops(torch.add, (x, x), {})


class Noisy(nn.Module):
    """A layer that drops, and then draws numbers of torch's generator."""

    def __init__(self):
        super().__init__()
        self.linear, self.two = nn.Linear(50, 50), Two()
        name_modules(self)

    def forward(self, x, again):
        def layer(x):
            y = self.two(self.linear(x))[0]
            return (y * torch.rand_like(y)).tanh()

        return checkpoint(layer, x, use_reentrant=False) if again else layer(x)


@pytest.mark.parametrize("seed", [None, 3])
def test_other_numbers_of_a_checkpoint_are_the_same_again(seed):
    torch.manual_seed(0)
    model, x, gradients = Noisy(), torch.randn(7, 50), []
    for again in (False, True):
        torch.manual_seed(1)
        with followed(model), UnitDraws(seed):
            y = model(x, again)
        y.square().sum().backward()
        gradients.append((y.detach(), model.linear.weight.grad))
        model.zero_grad()
    assert all(map(torch.equal, *gradients))


def test_a_reentrant_checkpoint_is_refused():
    model = Two()
    with followed(model), UnitDraws(1), pytest.raises(RuntimeError, match="pass use_reentrant=False"):
        checkpoint(model.first, torch.ones(3, requires_grad=True), use_reentrant=True)
    checkpoint(model.first, torch.ones(3, requires_grad=True), use_reentrant=True)
