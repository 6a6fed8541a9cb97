"""A module's forward as a chain: the declared order, removal, copies, and a forward that was set before."""

import copy
import inspect
from types import MethodType

import pytest
import torch
from torch import nn

from weft.comm.registry import communicator
from weft.forward import ORDER, ForwardChain, FunctionMode, chains_in, step_of, steps_of
from weft.tensor_parallel.local_sizes import with_numbers
from weft.testing.ranks import run_ranks


def noting(name, calls):
    def step(forward, module, *args, **kwargs):
        calls.append(name)
        return forward(*args, **kwargs)

    return step


@pytest.mark.parametrize("added", [list(ORDER), list(reversed(ORDER))], ids=["in_order", "reversed"])
def test_steps_run_in_the_declared_order_whatever_was_added_first(added):
    layer, calls = nn.Linear(2, 3), []
    for name in added:
        ForwardChain.of(layer).add(name, noting(name, calls))
    x = torch.ones(1, 2)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert calls == list(ORDER) == steps_of(layer)


def test_an_unknown_step_is_refused_and_the_last_one_takes_the_chain_with_it():
    layer = nn.Linear(2, 2)
    with pytest.raises(KeyError):
        ForwardChain.of(nn.Linear(2, 2)).add("whatever", noting("", []))
    ForwardChain.of(layer).add("stage", noting("", []))
    assert [name for name, _ in chains_in(nn.Sequential(layer))] == ["0"]
    ForwardChain.of(layer).remove("stage")
    assert "forward" not in vars(layer) and step_of(layer, "stage") is None


def test_a_forward_that_was_set_before_stays_the_innermost():
    layer, calls = nn.Linear(2, 2), []
    own = MethodType(lambda self, x: 3 * x, layer)
    layer.forward = own
    ForwardChain.of(layer).add("sequence", noting("sequence", calls))
    assert layer(torch.ones(1)).item() == 3 and calls == ["sequence"]
    ForwardChain.of(layer).remove("sequence")
    assert layer.forward is own


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_a_chain_of_its_own_around_its_own_weights(copied):
    layer, seen = nn.Linear(1, 1, bias=False), []

    def step(forward, module, x):
        seen.append(module)
        return forward(x)

    ForwardChain.of(layer).add("sequence", step)
    layer(torch.ones(1))
    twin = copied(layer)
    chain = ForwardChain.of(twin)
    assert chain.module is twin and ForwardChain.of(layer).module is layer
    twin._parameters = {"weight": nn.Parameter(torch.full((1, 1), 5.0)), "bias": None}
    assert twin(torch.ones(1)).item() == 5 and seen[-1] is twin
    chain.remove("sequence")
    assert steps_of(layer) == ["sequence"]


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 4

    def forward(self, x):
        return self.heads, x.shape[-1]


def with_other_numbers(rank):
    module = Heads()
    ForwardChain.of(module).add("recompute", noting("", []))
    ranks, x = communicator(None), torch.zeros(2, 8)
    twin = with_numbers(module, group=ranks, heads=(2,), **{"x.shape[-1]": (4,)})
    again = with_numbers(twin, group=ranks, **{"x.shape[-1]": (2,)})
    assert [each(x) for each in (module, twin, again)] == [(4, 8), (2, 4), (2, 2)]


def test_a_copy_with_other_numbers_runs_its_own_forward_with_them():
    run_ranks(with_other_numbers, 1)


def test_others_see_the_modules_own_signature():
    layer = nn.Linear(2, 2)
    ForwardChain.of(layer).add("recompute", noting("", []))
    assert list(inspect.signature(layer.forward).parameters) == ["input"]


def test_a_change_of_class_is_followed():
    """As adapters do for the time of a call."""

    class Twice(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    layer = nn.Linear(1, 1)
    ForwardChain.of(layer).add("sequence", noting("", []))
    once = layer(torch.ones(1))
    layer.__class__ = Twice
    assert torch.equal(layer(torch.ones(1)), 2 * once)
    Twice.forward = nn.Linear.forward
    assert torch.equal(layer(torch.ones(1)), once)


def test_the_mode_sends_functions_to_their_handlers_and_others_to_every():
    names = []

    def every(func, args, kwargs):
        names.append(func.__name__)
        return func(*args, **kwargs)

    x = torch.ones(2)
    with FunctionMode({torch.relu: lambda func, args, kwargs: -args[0]}, every):
        assert torch.equal(torch.relu(x), -x)
        assert torch.equal(torch.add(x, x), 2 * x)
    assert "add" in names and "relu" not in names
    assert torch.equal(torch.relu(x), x)
