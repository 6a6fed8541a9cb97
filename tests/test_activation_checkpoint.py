"""recompute: backward computes again what forward did not keep, to the same bits, whatever the mesh."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.activation_checkpoint import recompute, recomputed_in
from weft.testing.models import LLAMA_PLAN, Llama
from weft.testing.ranks import run_ranks

KINDS = ("none", "full", "selective")


def model_of(**options):
    torch.manual_seed(0)
    return Llama(dropout=0.2, **options)


def batch_of():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(Llama.WORDS, (4, 8), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Saved:
    """Bytes that autograd keeps for backward; a tensor counts once, and parameters do not count."""

    def __init__(self, model):
        self.seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.kept, self.bytes = [], 0

    def pack(self, x):
        if x.untyped_storage().data_ptr() not in self.seen:
            self.seen.add(x.untyped_storage().data_ptr())
            self.kept.append(x)  # or another would have its address
            self.bytes += x.nbytes
        return x


def run(model, forward):
    """Output and gradients of two backwards, and the bytes that the first kept."""
    torch.manual_seed(7)
    saved = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
        output, loss = forward()
    loss.backward()
    forward()[1].backward()
    return output.detach(), [parameter.grad for parameter in model.parameters()], saved.bytes


def on_mesh(rank, sizes, context):
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    found = {}
    for kind in KINDS:
        plan = LLAMA_PLAN if "tp" in sizes else None
        model = weft.parallelize(model_of(), mesh, plan=plan, recompute=kind, context=context)

        def forward(model=model):
            output = model(batch_of()[0])
            return output, loss_of(output, batch_of()[1])

        found[kind] = run(model, forward)
    assert_same_bits(found)
    sizes = [found[kind][2] for kind in ("full", "selective", "none")]
    assert sizes == sorted(set(sizes)), f"each keeps less than the next: {sizes}"


def assert_same_bits(found):
    output, gradients, _ = found["none"]
    for kind in ("full", "selective"):
        assert torch.equal(found[kind][0], output), kind
        assert all(torch.equal(one, other) for one, other in zip(found[kind][1], gradients, strict=True)), kind


@pytest.mark.parametrize(
    ("sizes", "context"),
    [
        ({}, "auto"),
        ({"tp": 3}, "auto"),
        ({"cp": 2}, "auto"),
        ({"cp": 2, "tp": 2}, "ring"),
        ({"pp": 2, "tp": 2}, "auto"),
    ],
    ids=str,
)
def test_gradients_have_the_same_bits_and_less_is_kept(sizes, context):
    world = torch.tensor([*sizes.values(), 1]).prod().item()
    run_ranks(on_mesh, world, sizes, context, timeout_s=60)


def in_pipelines(rank, sizes, schedules):
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    for schedule in schedules:
        found = {}
        for kind in KINDS:
            plan = LLAMA_PLAN if "tp" in sizes else None
            model = weft.parallelize(model_of(), mesh["cp", "tp"], plan=plan, recompute=kind)
            pipe = weft.Pipeline(model, mesh, schedule=schedule, microbatches=4, loss=loss_of)
            torch.manual_seed(7)
            loss = [pipe.step(*batch_of()) for _ in range(2)][-1]
            found[kind] = loss, [parameter.grad for parameter in pipe.parameters()], None
        assert_same_bits(found)


@pytest.mark.parametrize(
    ("sizes", "schedules"),
    [
        ({"pp": 2, "tp": 2}, ("interleaved",)),
        pytest.param({"pp": 2, "tp": 2}, ("afab", "1f1b"), marks=pytest.mark.slow("pytorch_ext/pipeline")),
        ({"pp": 2, "cp": 2}, ("1f1b",)),
    ],
    ids=str,
)
def test_pipelines_recompute_to_the_same_bits(sizes, schedules):
    run_ranks(in_pipelines, 4, sizes, schedules, timeout_s=120)


def in_halves(rank):
    mesh = weft.init_mesh(pp=2, device_type="cpu")
    model = weft.parallelize(model_of(), mesh["tp"], plan=None, recompute="selective")
    for schedule in ("zero-bubble", "zbv", "dualpipev"):
        with pytest.raises(ValueError, match="takes each backward in parts.*use 'afab', '1f1b', 'interleaved', or"):
            weft.Pipeline(model, mesh, schedule=schedule, microbatches=4, loss=loss_of)


def test_schedules_that_take_a_backward_in_halves_are_refused():
    run_ranks(in_halves, 2)


class Repeating(nn.Module):
    """Blocks with an MLP without its own module and torch's attention; one block stands in two places."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return x + self.down(self.up(self.norm(x)).relu())

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])
        self.blocks.append(self.blocks[0])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_what_runs_again_are_blocks_or_their_attentions():
    model = Repeating()
    assert list(recomputed_in(model, "full")) == ["blocks.0", "blocks.1"]
    assert list(recomputed_in(model, "selective")) == ["blocks.0.attention", "blocks.1.attention"]
    assert recomputed_in(model, "none") == {}


def alone(rank):
    """Copies recompute as well; in inference nothing does; names stay."""
    torch.manual_seed(0)
    whole = Repeating()
    model = copy.deepcopy(weft.parallelize(copy.deepcopy(whole), plan=None, recompute="full"))
    runs = []
    model.blocks[0].norm.register_forward_hook(lambda *_: runs.append(1))
    assert model.state_dict().keys() == whole.state_dict().keys()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        model(x)
    assert len(runs) == 2, "it stands in two places"
    model(x).sum().backward()
    assert len(runs) == 2 + 4
    whole(x).sum().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_copies_recompute_and_inference_does_not():
    run_ranks(alone, 1)


def test_running_means_count_a_batch_once():
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    model = copy.deepcopy(whole)
    recompute({"0.1": model[0], "1.1": model[1]})
    for each in (whole, model):
        for _ in range(2):
            each(torch.arange(12.0).view(3, 4).sin()).sum().backward()
    for (name, got), expected in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(got, expected), name


def test_what_cannot_be_recomputed_is_refused_with_the_way_out():
    linears = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))) for _ in range(2))
    for model, kind, message in (
        (linears, "half", "recompute='half' is not one of 'none', 'full', 'selective'"),
        (linears, "full", 'no nn.ModuleList or nn.Sequential of blocks; use recompute="none"'),
        (blocks, "selective", "no nn.ModuleList or nn.Sequential of blocks"),
        (nn.ModuleList([nn.TransformerDecoderLayer(4, 1, 4).norm1, Cached()]), "selective", 'use "full"'),
    ):
        with pytest.raises(ValueError, match=message):
            recomputed_in(model, kind)
    model = nn.ModuleList([Cached()])
    recompute(recomputed_in(model, "full"))
    with pytest.raises(ValueError, match=r"Cached got a cache \(past_key_values\).*use_cache=False"):
        model[0](torch.ones(1, 4, requires_grad=True), past_key_values=object())


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x, past_key_values=None):
        return self.project(x)
