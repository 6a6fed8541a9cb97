"""A forward that was set on a module itself is called however the model is split, or refused by name."""

import copy
import functools
from types import MethodType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.pipeline.forward_cut import ForwardCut
from weft.testing.ranks import run_ranks

WIDTH, LENGTH = 12, 8


class Attends(nn.Module):
    """Its code reads the number of heads, and drops attention weights."""

    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        self.heads, self.dropout, self.calls = 4, dropout, 0

    def forward(self, x):
        q, k, v = (layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in self.qkv)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return x + self.out(y.transpose(1, 2).flatten(2))


def doubled(self, x):
    self.calls += 1
    return 2 * type(self).forward(self, x)


class Decoder(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first, self.blocks = nn.Linear(5, WIDTH), nn.ModuleList(Attends(dropout) for _ in range(2))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def model_of(dropout=0.0, bind=MethodType):
    torch.manual_seed(0)
    model = Decoder(dropout)
    for block in model.blocks:
        block.forward = bind(doubled, block)
    return model


def inputs_of():
    return torch.randn(4, LENGTH, 5, generator=torch.Generator().manual_seed(1))


HEADS = {
    "blocks.*.qkv.*": {"style": "column", "unit": WIDTH // 4},
    "blocks.*.out": "row",
    "blocks.*": {"style": "attributes", "heads": (2, 2), "own_random_numbers": True},
}
WAYS = {
    "tp": ({"tp": 2}, {}),
    "tp by heads": ({"tp": 2}, {"plan": HEADS}),
    "tp by heads, recomputed": ({"tp": 2}, {"plan": HEADS, "recompute": "full"}),
    "tp recomputed": ({"tp": 2}, {"recompute": "full"}),
    "tp in units": ({"tp": 2}, {"invariant": 2}),
    "dp in units": ({"dp": 2}, {"invariant": 4, "plan": None}),
    "cp": ({"cp": 2}, {"plan": None}),
    "cp and tp": ({"cp": 2, "tp": 2}, {}),
    "stages": ({"pp": 2}, {"plan": None}),
    "stages and tp, recomputed": ({"pp": 2, "tp": 2}, {"recompute": "full"}),
}


def trains(rank, sizes, options, dropout):
    mesh = weft.init_mesh(**sizes)
    plain = model_of().train()
    inner = model_of(dropout).train()  # which is changed in place
    model = weft.parallelize(inner, mesh, **options)
    replicas = mesh["dp"].size()
    found = model(inputs_of().chunk(replicas)[mesh["dp"].get_local_rank()])
    found.square().sum().backward()
    called = torch.tensor([sum(block.calls for block in inner.blocks)])
    dist.all_reduce(called)
    assert called >= 2
    if dropout:
        assert not torch.equal(model(inputs_of().chunk(replicas)[mesh["dp"].get_local_rank()]), found)
        return
    expected = plain(inputs_of())
    torch.testing.assert_close(found, expected.chunk(replicas)[mesh["dp"].get_local_rank()], rtol=1e-4, atol=1e-5)
    (expected.square().sum() / replicas).backward()
    for name, parameter in inner.named_parameters():
        if parameter.grad is not None and not parameter.is_meta:
            shard, whole = weft.shard_of(parameter), plain.get_parameter(name).grad
            part = whole if shard is None else shard.take(whole)
            torch.testing.assert_close(parameter.grad.as_subclass(torch.Tensor), part, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_called_on_any_mesh(way):
    sizes, options = WAYS[way]
    world = 1
    for size in sizes.values():
        world *= size
    run_ranks(trains, world, sizes, options, 0.0)


@pytest.mark.parametrize("way", ["tp", "tp by heads", "tp by heads, recomputed", "cp"])
def test_it_is_called_where_its_own_code_drops(way):
    sizes, options = WAYS[way]
    run_ranks(trains, 2, sizes, options, 0.5)


def pipelines(rank):
    plain, model = model_of(), model_of()
    pipe = weft.Pipeline(model, weft.init_mesh(pp=2), microbatches=2, loss=F.mse_loss)
    targets = inputs_of().flip(0)
    loss = F.mse_loss(plain(inputs_of()), targets)
    for _ in range(2):
        torch.testing.assert_close(pipe.step(inputs_of(), targets).to(loss), loss)


def test_a_pipeline_calls_it():
    run_ranks(pipelines, 2)


def test_a_model_that_is_not_cut_has_it_back():
    model = model_of()
    cut = ForwardCut("Pipeline", model, torch.device("cpu"))
    cut.undo()
    assert all(block.forward == MethodType(doubled, block) for block in model.blocks)
    assert "forward" not in vars(model.first)


def refuses(rank):
    closed = model_of(bind=lambda function, block: functools.partial(function, block))
    before = copy.deepcopy(closed.state_dict())
    with pytest.raises(
        ValueError, match="Attends has a forward of its own, which may know the module with the numbers"
    ):
        weft.parallelize(closed, weft.init_mesh(tp=2), plan=HEADS)
    assert all(map(torch.equal, before.values(), closed.state_dict().values())), "it is unchanged"


def test_one_that_may_know_another_module_is_refused():
    run_ranks(refuses, 2)
