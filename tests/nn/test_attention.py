"""nn.MultiheadAttention by heads, alone and in torch's transformer layers; and random numbers where parts are split."""

import copy
import re

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
import weft.nn
from weft.testing.ranks import run_ranks

WORLDS = [1, 2, 3]


def close(found, expected, what=""):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11, msg=lambda text: f"{what}: {text}")


def check_gradients(model, whole, what):
    for name, parameter in model.named_parameters():
        shard, expected = weft.shard_of(parameter), whole.get_parameter(name).grad
        close(parameter.grad, shard.take(expected) if shard else expected, f"{what} d{name}")


def same_step(model, whole, inputs, call, what):
    """Output, gradients of inputs and of parameters."""
    found = []
    for one in (model, whole):
        one.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = [y for y in call(one, *leaves) if y is not None]
        generator = torch.Generator().manual_seed(0)
        sum((y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in outputs).backward()
        found.append([*outputs, *(x.grad for x in leaves)])
    for mine, expected in zip(*found, strict=True):
        close(mine.detach(), expected.detach(), what)
    check_gradients(model, whole, what)


def calls_of(batch, queries, keys, heads):
    """Ways to call an attention, by name."""
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, -2:] = True
    of_heads = torch.randn(batch * heads, queries, keys, dtype=torch.float64)
    return {
        "weights": {},
        "each head's weights": dict(average_attn_weights=False),
        "no weights": dict(need_weights=False),
        "causal": dict(need_weights=False, attn_mask=later, is_causal=True),
        "causal with padding": dict(need_weights=False, attn_mask=later, is_causal=True, key_padding_mask=padding),
        "padding": dict(key_padding_mask=padding),
        "a mask of each head": dict(attn_mask=of_heads),
        "a mask of each head and padding": dict(
            attn_mask=of_heads, key_padding_mask=padding.double() * -3, need_weights=False
        ),
    }


def check_attention(rank):
    heads, width = 5, 20
    for options in (
        dict(batch_first=True),
        dict(),
        dict(bias=False, batch_first=True),
        dict(kdim=7, vdim=9),
        dict(vdim=7, bias=False, batch_first=True),
    ):
        torch.manual_seed(1)
        whole = nn.MultiheadAttention(width, heads, **options).double()
        if whole.in_proj_bias is not None:
            nn.init.normal_(whole.in_proj_bias), nn.init.normal_(whole.out_proj.bias)
        holder = nn.Sequential(copy.deepcopy(whole))
        model = weft.parallelize(holder, plan={"0": "heads"})[0]
        assert {name: p.dim() for name, p in model.named_parameters()} == {
            n: p.dim() for n, p in whole.named_parameters()
        }
        batch, queries, keys = 2, 4, 6
        sizes = ((queries, width), (keys, whole.kdim), (keys, whole.vdim))
        q, k, v = (torch.randn(batch, *size, dtype=torch.float64) for size in sizes)
        if "batch_first" not in options:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        for name, arguments in calls_of(batch, queries, keys, heads).items():
            same_step(model, whole, [q, k, v], lambda m, *x, a=arguments: m(*x, **a), f"{options} {name}")
        if whole._qkv_same_embed_dim:
            for name, arguments in calls_of(batch, queries, queries, heads).items():
                same_step(model, whole, [q], lambda m, x, a=arguments: m(x, x, x, **a), f"{options} self {name}")
            same_step(model, whole, [q, k], lambda m, x, y: m(x, y, y), f"{options} cross")
        alone = [x[0] if "batch_first" in options else x[:, 0] for x in (q, k, v)]
        padding = torch.tensor([False] * 5 + [True])
        same_step(model, whole, alone, lambda m, *x, p=padding: m(*x, key_padding_mask=p), f"{options} without a batch")
        model.load_state_dict(whole.state_dict())
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            close(twin(q, k, v)[0], whole(q, k, v)[0], "a copy")
        torch.manual_seed(7)
        model.reset_parameters()
        torch.manual_seed(7)
        fresh = nn.MultiheadAttention(width, heads, **options).double()
        for name, parameter in model.named_parameters(recurse=False):
            assert parameter.shape == weft.shard_of(parameter).take(fresh.get_parameter(name)).shape


@pytest.mark.parametrize("world", WORLDS)
def test_attention_by_heads_is_the_unsplit_attention(world):
    run_ranks(check_attention, world)


ENCODER = {"**.self_attn": "heads", "**.linear1": "column", "**.linear2": "row"}


def decode(decoder, x, memory):
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return [decoder(x, memory, tgt_mask=later, tgt_is_causal=True)]


def check_transformers(rank, path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 6, 14, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double()
    layer = nn.TransformerDecoderLayer(12, 6, 14, 0.0, activation="gelu", norm_first=True)
    decoder = nn.TransformerDecoder(layer, 2).double()
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    memory = torch.randn(4, 3, 12, dtype=torch.float64)
    for plan in (ENCODER, {"**.self_attn": "heads"}, {"**.linear1": "column", "**.linear2": "row"}):
        model = weft.parallelize(copy.deepcopy(encoder), plan=plan)
        for evaluated in (False, True):
            model.train(not evaluated), encoder.train(not evaluated)
            for options in ({}, dict(src_key_padding_mask=padding), dict(mask=later, is_causal=True)):
                same_step(model, encoder, [x], lambda m, x, o=options: [m(x, **o)], f"{plan} {options}")
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        close(model(x, **options), encoder(x, **options), f"{plan} {options} {mode}")
        every = {**plan, "**.multihead_attn": "heads"} if "**.self_attn" in plan else plan
        model = weft.parallelize(copy.deepcopy(decoder), plan=every)
        same_step(model, decoder, [x.transpose(0, 1), memory], decode, f"decoder {plan}")
    weft.save_checkpoint(model, None, path)
    other = nn.TransformerDecoder(layer, 2).double()
    weft.load_checkpoint(other, None, path)
    assert all(torch.equal(p, decoder.get_parameter(name)) for name, p in other.named_parameters())


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow("pytorch_ext/nn")), 3])
def test_torchs_transformer_layers_call_their_split_parts(world, tmp_path):
    run_ranks(check_transformers, world, tmp_path / "saved")


class Asking(nn.Module):
    """Attention whose weights are asked for, and attention over another sequence."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.MultiheadAttention(12, 6), nn.MultiheadAttention(12, 6, bias=False)

    def forward(self, x, average=True):
        y, weights = self.first(x, x, x, average_attn_weights=average)
        return self.second(y, x, x, need_weights=False)[0] + y, weights


def check_shared_sequences(rank):
    mesh = weft.init_mesh(cp=2, tp=2, device_type="cpu")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 6, 14, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    asking, heads = Asking().double(), {"first": "heads", "second": "heads"}
    padding, later = torch.zeros(3, 7, dtype=torch.bool), torch.ones(7, 7, dtype=torch.bool).triu(1)
    padding[1, 4:] = True
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    for layout in ("zigzag", "contiguous"):
        model = weft.parallelize(copy.deepcopy(encoder), mesh, plan=ENCODER, context={"layout": layout})
        model = copy.deepcopy(model)
        for options in ({}, dict(mask=later, is_causal=True), dict(src_key_padding_mask=padding), dict(mask=later)):
            same_step(model, encoder, [x], lambda m, x, o=options: [m(x, **o)], f"{layout} {list(options)}")
        model = weft.parallelize(copy.deepcopy(asking), mesh, plan=heads, context={"layout": layout, "dim": 0})
        for average in (True, False):
            same_step(
                model, asking, [x.transpose(0, 1)], lambda m, x, a=average: m(x, a), f"{layout} weights {average}"
            )
    rough = weft.parallelize(copy.deepcopy(encoder).float(), mesh, plan=ENCODER, context={"strict": True})
    found = rough(x.float(), mask=later, is_causal=True)  # strict: by weft.context_attention, nothing gathered
    torch.testing.assert_close(found.double(), encoder(x, mask=later, is_causal=True), rtol=1e-4, atol=1e-4)


def test_attention_by_heads_over_a_shared_sequence_is_the_unsplit_attention():
    run_ranks(check_shared_sequences, 4, timeout_s=120)


def every_ranks(x):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


class Places(nn.Module):
    """A dropout where all is whole, one of split features, and one in a sequence-parallel region."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 30), nn.Linear(30, 6), nn.Linear(6, 8)
        self.on_whole, self.on_features, self.on_tokens = nn.Dropout(0.5), nn.Dropout(0.3), nn.Dropout(0.4)
        self.masks = []

    def forward(self, x):
        self.masks.append({})
        self.note("whole", x := self.on_whole(x))
        self.note("features", y := self.on_features(self.up(x).sigmoid()))
        self.note("tokens", y := self.on_tokens(self.down(y)))
        y = self.head(y)
        self.note("whole again", y := self.on_whole(y))
        return y

    def note(self, name, x):
        self.masks[-1][name] = (x.detach() == 0).clone()


REGION = {"sequence_parallel": True, "sequence_dim": 1}
PLACES = {
    "up": "column",
    "on_features": "dropout",
    "down": {"style": "row", **REGION},
    "on_tokens": "sequence",
    "head": {"style": "column", "gather_output": True, **REGION},
}


def check_masks(rank):
    torch.manual_seed(0)
    model = copy.deepcopy(weft.parallelize(Places(), plan=PLACES))
    x = torch.randn(16, 16, 6, requires_grad=True)  # of 480 elements or more, 0.15 are six deviations from the mean
    torch.manual_seed(5)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    first, again = model.masks
    kept, world = (lambda mask: 1 - mask.float().mean().item()), dist.get_world_size()
    assert list(again) == ["whole", "features", "tokens"]  # the last is not needed for backward
    assert all(torch.equal(mask, first[name]) for name, mask in again.items()), "recomputed with the same numbers"
    for name, mask in first.items():
        assert abs(kept(mask) - {"whole": 0.5, "features": 0.7, "tokens": 0.6, "whole again": 0.5}[name]) < 0.15
        masks = every_ranks(mask)
        least = min(mask.size(1) for mask in masks), min(mask.size(2) for mask in masks)
        shared = [mask[:, : least[0], : least[1]] for mask in masks]
        alike = all(torch.equal(other, shared[0]) for other in shared)
        assert alike == (name.startswith("whole") or world == 1), name
    model(x)
    assert not torch.equal(model.masks[2]["features"], first["features"]), "another call draws others"
    assert len(set(every_ranks(torch.rand(1).item()))) == 1, "and the ranks draw alike afterwards"
    model.eval()
    state = torch.get_rng_state()
    model(x)
    assert torch.equal(torch.get_rng_state(), state), "in eval mode nothing is drawn"
    with pytest.raises(ValueError, match="last dimension must be"):
        model.train()(torch.ones(2, 16, 5))
    assert len(set(every_ranks(torch.rand(1).item()))) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_masks_are_the_same_where_all_is_whole_and_others_where_it_is_split(world):
    run_ranks(check_masks, world)


def check_dropped_probabilities(rank):
    """Values are one-hot, so the output of a head is its probabilities."""
    for weights in (False, True):
        torch.manual_seed(0)
        whole = nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True, bias=False)
        with torch.no_grad():
            whole.in_proj_weight[64:] = torch.eye(32)
            whole.out_proj.weight.copy_(torch.eye(32))
        model = weft.nn.ParallelMultiheadAttention.from_attention(whole)
        x = torch.zeros(1, 8, 32)
        x[0] = torch.eye(8).repeat(1, 4)
        torch.manual_seed(3)
        dropped = []
        for _ in range(2):
            y, found = model(x, x, x, need_weights=weights, average_attn_weights=False)
            probabilities = y.unflatten(-1, (4, 8))[0]  # [queries, heads, keys]
            dropped.append(probabilities == 0)
            if weights:
                close(found[0].transpose(0, 1), probabilities, "the weights are those that were used")
        flat = [dropped[0][:, head] for head in range(4)]
        assert not any(torch.equal(flat[a], flat[b]) for a in range(4) for b in range(a)), "each head's mask is its own"
        assert not torch.equal(*dropped) and 0.3 < dropped[0].float().mean() < 0.7
        assert all(torch.equal(dropped[0], other) for other in every_ranks(dropped[0])), (
            "what every rank gets is the same"
        )
        assert len(set(every_ranks(torch.rand(1).item()))) == 1
        close(model.eval()(x, x, x)[0], whole.eval()(x, x, x)[0])


def test_each_rank_drops_probabilities_of_its_own_heads():
    run_ranks(check_dropped_probabilities, 3)


def check_refusals(rank):
    torch.manual_seed(0)
    make = weft.nn.ParallelMultiheadAttention.from_attention
    model = make(nn.MultiheadAttention(12, 4, batch_first=True))
    x = torch.ones(2, 5, 12)
    nested = torch.nested.nested_tensor([torch.ones(2, 12), torch.ones(3, 12)])
    calls = dist.group.WORLD.engine.group.calls
    for error, message, call in (
        (ValueError, "num_heads=2: 2 elements cannot be split over 3 ranks", lambda: make(nn.MultiheadAttention(8, 2))),
        (
            ValueError,
            "does not take add_bias_kv=True; keep this",
            lambda: make(nn.MultiheadAttention(12, 4, add_bias_kv=True)),
        ),
        (
            ValueError,
            "does not take add_zero_attn=True; keep this",
            lambda: make(nn.MultiheadAttention(12, 4, add_zero_attn=True)),
        ),
        (TypeError, "takes an nn.MultiheadAttention, got Linear", lambda: make(nn.Linear(4, 4))),
        (
            ValueError,
            r"attn_mask has shape \(4, 5\); it must be \(5, 5\) or \(8, 5, 5\)",
            lambda: model(x, x, x, attn_mask=torch.ones(4, 5)),
        ),
        (
            TypeError,
            "attn_mask is torch.int64; it must be torch.bool",
            lambda: model(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.int64)),
        ),
        (
            ValueError,
            r"key_padding_mask has shape \(2, 4\); it must be \(2, 5\)",
            lambda: model(x, x, x, torch.ones(2, 4, dtype=torch.bool)),
        ),
        (ValueError, "pass that mask too", lambda: model(x, x, x, is_causal=True)),
        (ValueError, r"2 or 3 dimensions, got \(2, 5, 12\), \(5, 12\)", lambda: model(x, x[0], x[0])),
        (ValueError, "enable_nested_tensor=False", lambda: model(nested, nested, nested)),
        (ValueError, "last dimension must be 12", lambda: model(x[..., :8], x[..., :8], x[..., :8])),
    ):
        with pytest.raises(error, match=re.compile(message, re.DOTALL)):
            call()
    assert dist.group.WORLD.engine.group.calls == calls, "nothing was communicated"


def test_bad_input_is_refused_before_anything_is_communicated():
    run_ranks(check_refusals, 3)
