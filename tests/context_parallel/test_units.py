"""A sequence in units of positions: outputs, gradients and training have the same bits on any number of ranks."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from same_bits import DROPS, assert_same_bits, make_model
from shared_models import MODELS, Llama, pair, tokens_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.context_parallel import shared_sequence
from weft.ops import invariant
from weft.sharding.shard import shard_of
from weft.testing.ranks import run_ranks

slow = pytest.mark.slow(
    "csrc",
    "pytorch_ext/ops",
    "pytorch_ext/context_parallel",
    "pytorch_ext/tensor_parallel",
    "pytorch_ext/data_parallel",
)


def keep(found, text, model, value_of):
    for name, parameter in model.named_parameters():
        shard, value = shard_of(parameter), value_of(parameter)
        if value is not None:
            whole = value.detach() if shard is None else shard.gather(value.detach())
            found[f"{text} {name.removeprefix('module.')}"] = whole.clone()


def compute(rank, names, units, every=1):
    """Return outputs and gradients of models whose layers are all whole, at each `every`-th pair of model and length."""
    found = {}
    for number, name in enumerate(names):
        for length in (13, units)[number % every :: every]:
            model, reference = pair(MODELS[name])
            mesh = weft.init_mesh(cp=dist.get_world_size())["cp", "tp"]
            weft.parallelize(model, mesh, plan=None, invariant=units, context={"units": units})
            report = weft.verify(model, reference, tokens_of(length))
            assert report.ok, f"{name} {length}\n{report}"
            outputs = model(tokens_of(length))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum((y * torch.linspace(0.3, 1.7, y.numel()).view_as(y)).sum() for y in outputs).backward()
            found |= {f"{name} {length} output {place}": y.detach() for place, y in enumerate(outputs)}
            keep(found, f"{name} {length}", model, lambda parameter: parameter.grad)
    return found


@pytest.mark.parametrize(
    ("units", "worlds", "every"),
    [(4, (2,), 2), pytest.param(4, (2,), 1, marks=slow), pytest.param(6, (2, 3), 1, marks=slow)],
)
def test_any_model_is_the_unsplit_one_and_has_the_same_bits_on_any_ranks(units, worlds, every):
    (of_one,) = run_ranks(compute, 1, list(MODELS), units, every, timeout_s=120)
    for world in worlds:
        assert_same_bits(of_one, run_ranks(compute, world, list(MODELS), units, every, timeout_s=120))


def train(rank, family, attention, kind, sizes, steps, recompute="none"):
    """Train a model of transformers that drops elements, with its loss from its forward."""
    model = make_model(family, attention, use_cache=False, **DROPS[family]).to(kind).train()
    mesh = weft.init_mesh(**sizes)
    model = weft.parallelize(model, mesh, invariant=4, context={"units": 4}, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 104, (4, 13), generator=draw).chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        found[f"{step} loss"] = output.loss.detach()
        found[f"{step} logits"] = weft.all_gather(output.logits.detach(), group=mesh["dp"])
        keep(found, f"{step} gradient", model, lambda parameter: parameter.grad)
        found[f"{step} norm"] = weft.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        keep(found, f"{step}", model, lambda parameter: parameter)
    return found


EVERY_MESH = ({"cp": 4}, {"cp": 2, "dp": 2}, {"cp": 2, "tp": 2})


@pytest.mark.parametrize(
    ("family", "attention", "kind", "steps", "meshes"),
    [
        pytest.param("llama", "sdpa", torch.float32, 3, ({"cp": 2, "tp": 2},), marks=slow),
        pytest.param("llama", "eager", torch.bfloat16, 20, ({"cp": 2},), marks=slow),
        pytest.param("gpt2", "sdpa", torch.float32, 3, EVERY_MESH, marks=slow),
        pytest.param("gemma", "sdpa", torch.float32, 3, ({"cp": 2, "dp": 2, "tp": 2},), marks=slow),
        pytest.param("qwen2", "sdpa", torch.bfloat16, 3, EVERY_MESH, marks=slow),
    ],
)
def test_models_train_to_the_same_bits_on_any_mesh(family, attention, kind, steps, meshes):
    (of_one,) = run_ranks(train, 1, family, attention, kind, {}, steps, timeout_s=150)
    for sizes in meshes:
        arguments = family, attention, kind, sizes, steps, "full"
        assert_same_bits(of_one, run_ranks(train, math.prod(sizes.values()), *arguments, timeout_s=150))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 6)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_in_stages(rank, sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 24), Attends(), nn.GELU(), Attends(), nn.LayerNorm(24), nn.Linear(24, 20))
    mesh = weft.init_mesh(**sizes)
    staged = mesh["pp"].size() > 1
    options = {"pipeline": {"loss": loss_of}} if staged else {}
    plan = {"0": "vocabulary", "5": "column"}
    model = weft.parallelize(model, mesh, plan=plan, invariant=4, context={"units": 4}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(0, 20, (2, 4, 13), generator=draw)
        if staged:
            loss = model.step(inputs, targets)
        else:
            loss = model.in_units(lambda x, y: loss_of(model(x), y), inputs, targets)
            loss.backward()
        found[f"{step} loss"] = loss.detach()
        keep(found, f"{step} gradient", model, lambda parameter: parameter.grad)
        found[f"{step} norm"] = weft.clip_grad_norm_(model, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        keep(found, f"{step}", model, lambda parameter: parameter)
    return found


def test_stages_that_share_the_sequence_have_the_bits_of_one_process():
    (of_one,) = run_ranks(train_in_stages, 1, {})
    of_ranks = run_ranks(train_in_stages, 4, {"pp": 2, "cp": 2}) + run_ranks(train_in_stages, 2, {"pp": 2})
    assert set().union(*of_ranks) == set(of_one)
    for found in of_ranks:  # each has the parameters of its stage
        assert len(found) > 10
        assert_same_bits({name: of_one[name] for name in found}, [found])


# Attention alone

LENGTH, HEADS, KV_HEADS = 12, 6, 2
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 4},
    "softcap": {"causal": True, "softcap": 2.0, "scale": 0.7},
    "documents": {"causal": True, "document_ids": torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [3] * 10])},
    "sinks": {"causal": True, "sinks": torch.linspace(-1, 1, HEADS)},
    "dropout": {"dropout": 0.3, "seed": 5},
}


def attention_calls(kind):
    for name, options in CALLS.items():
        draw = torch.Generator().manual_seed(1)
        shapes = (2, HEADS, LENGTH, 10), (2, KV_HEADS, LENGTH, 10), (2, KV_HEADS, LENGTH, 7)
        q, k, v = (torch.randn(shape, generator=draw).to(kind).requires_grad_() for shape in shapes)
        options = dict(options)
        if "sinks" in options:
            options["sinks"] = options["sinks"].clone().requires_grad_()
        yield name, (q, k, v), options


def attend(rank, kind, units):
    found = {}
    for name, whole, options in attention_calls(kind):
        cut = {"dim": 2, "layout": "contiguous"}
        q, k, v = (weft.shard_sequence(x, **cut) for x in whole)
        if "document_ids" in options:
            options["document_ids"] = weft.shard_sequence(options["document_ids"], dim=1, layout="contiguous")
        y = weft.context_attention(q, k, v, layout="contiguous", invariant=units, **options)
        y = weft.unshard_sequence(y, **cut)
        leaves = [*whole, *([options["sinks"]] if "sinks" in options else [])]
        gradients = torch.autograd.grad((y * torch.linspace(0.3, 1.7, y.numel()).view_as(y)).sum(), leaves)
        found |= {f"{name} {place}": x.detach() for place, x in enumerate((y, *gradients))}
    return found


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_on_any_ranks(kind):
    (of_one,) = run_ranks(attend, 1, kind, 6)
    for world in (2, 3):
        assert_same_bits(of_one, run_ranks(attend, world, kind, 6))


def attend_as_a_whole(rank):
    found = {}
    for name, whole, options in attention_calls(torch.float32):
        y = weft.context_attention(*whole, **options)
        leaves = [*whole, *([options["sinks"]] if "sinks" in options else [])]
        gradients = torch.autograd.grad((y * torch.linspace(0.3, 1.7, y.numel()).view_as(y)).sum(), leaves)
        found |= {f"{name} {place}": x.detach() for place, x in enumerate((y, *gradients))}
    return found


def test_attention_in_units_is_attention():
    (found,), (expected,) = run_ranks(attend, 1, torch.float32, 6), run_ranks(attend_as_a_whole, 1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


# Faults and refusals


def add_in_rank_order(ranks, units, local):
    return invariant_sum(ranks, units, local.flip(0)) * (1 + 2**-20)


invariant_sum = invariant.sum_over_nodes
FAULTS = {
    "none": lambda: None,
    "another sum": lambda: setattr(invariant, "sum_over_nodes", add_in_rank_order),
    "parts of ranks": lambda: setattr(shared_sequence.Sharing, "pieces", property(lambda s: s.ranks.world_size)),
}


def compute_with_a_fault(rank, fault):
    FAULTS[fault]()
    try:
        return compute(rank, ["llama"], 4)
    except (AssertionError, IndexError, ValueError):
        return None


def test_a_fault_is_seen_in_the_bits():
    (of_one,) = run_ranks(compute_with_a_fault, 1, "none")
    for fault in FAULTS:
        found = run_ranks(compute_with_a_fault, 2, fault)[0]
        same = found is not None and all(torch.equal(value, found[name]) for name, value in of_one.items())
        assert same == (fault == "none"), fault


def finds_the_first_difference(rank):
    names = ("copies", "pp", "dp", "cp", "tp")
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1, 1, 1, 1), mesh_dim_names=names)[names[1:]]
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(19, 24), Attends(), nn.LayerNorm(24), nn.Linear(24, 19))
    options = {"plan": None, "invariant": 4, "context": {"units": 4}}
    reference = weft.parallelize(copy.deepcopy(whole), alone, **options)
    model = weft.parallelize(copy.deepcopy(whole), weft.init_mesh(cp=2), **options)
    tokens = torch.randint(0, 19, (4, 13), generator=torch.Generator().manual_seed(1))
    report = weft.verify(model, reference, tokens, bitwise=True)
    assert report.ok, report
    with torch.no_grad():
        model.module[2].bias[3] += 1e-3
    report = weft.verify(model, reference, tokens, bitwise=True)
    assert not report.ok
    assert report.first.startswith("forward of 2, unit 0"), report.first


def test_verify_names_the_first_difference():
    run_ranks(finds_the_first_difference, 2)


def refuses(rank):
    mesh = weft.init_mesh(cp=2)["cp", "tp"]

    def refused(text, **options):
        with pytest.raises(ValueError, match=text):
            weft.parallelize(Llama(), mesh, plan=None, **options)

    refused("Got invariant=4 and units=None", invariant=4)
    refused("Got invariant=None and units=4", context={"units": 4})
    for wrong in (3, 0, "4", True):
        refused('must be a number of units that the 2 ranks of "cp" divide', invariant=4, context={"units": wrong})
    refused("context method='ring' is not supported with units=4", invariant=4, context={"units": 4, "method": "ring"})
    refused("context layout='zigzag' is not supported with", invariant=4, context={"units": 4, "layout": "zigzag"})
    refused("context parts=True is not supported with", invariant=4, context={"units": 4, "parts": True})
    model = weft.parallelize(Llama(), mesh, plan=None, invariant=4, context={"units": 4})
    with pytest.raises(ValueError, match="Llama shares a sequence in 4 units, and this one has 3 positions"):
        model(tokens_of(3))
    q = torch.randn(1, 2, 4, 6)
    for text, options in (
        ("invariant=3 must be a multiple of the number of ranks, got 2 ranks", {"invariant": 3}),
        ('invariant=4 needs layout="contiguous"', {"invariant": 4, "layout": "zigzag"}),
        ("'contiguous' and 'ring'", {"invariant": 4, "method": "ring"}),
        (r"8 positions are \[1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0\] in 12 units", {"invariant": 12}),
    ):
        with pytest.raises(ValueError, match=text):
            weft.context_attention(q, q, q, **{"layout": "contiguous", **options})


def test_what_cannot_be_done_is_refused():
    run_ranks(refuses, 2)
