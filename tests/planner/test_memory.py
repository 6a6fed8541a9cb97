"""The planner's memory: the formulas of Korthikanti et al. 2022, what PyTorch saves, and what never takes more."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from weft.tools.planner import Hardware, Job, Layout, MemoryModel, Model
from weft.tools.planner.job import LayerShare
from weft.tools.planner.step_memory import in_flight, layer_of

A100 = Hardware.of("a100")
# Korthikanti et al. 2022, table 3.
MODEL_22B = Model(48, 6144, 4 * 6144, 64, 51200, gated_mlp=False, bias=True, dropout=True, positions=2048)
S, B, H, A = 2048, 4, 6144, 64


@pytest.mark.parametrize(
    ("tensor_parallel", "sequence_parallel", "recompute", "per_sbh"),
    [
        (1, False, "none", lambda t: 34 + 5 * A * S / H),
        (8, False, "none", lambda t: 10 + 24 / t + 5 * A * S / (H * t)),
        (8, True, "none", lambda t: 34 / t + 5 * A * S / (H * t)),
        (8, False, "selective", lambda t: 10 + 24 / t),
        (8, True, "selective", lambda t: 34 / t),
        (8, False, "full", lambda t: 2),
    ],
)
def test_activations_are_table_2_of_korthikanti_et_al(tensor_parallel, sequence_parallel, recompute, per_sbh):
    job = Job(MODEL_22B, A100, S, B, fused_attention=False, sequence_parallel=sequence_parallel)
    kept = layer_of(job, 1, tensor_parallel, B).kept(recompute)
    assert kept == pytest.approx(S * B * H * per_sbh(tensor_parallel), rel=1e-12)


def test_the_first_stage_holds_as_many_micro_batches_as_korthikanti_et_al_say():
    pp, chunks = 8, 3
    interleaved = Layout(pp=pp, schedule="interleaved", chunks=chunks)
    assert in_flight(interleaved, 0, 1000) == pytest.approx(pp * (1 + (pp - 1) / (pp * chunks)))
    assert [in_flight(Layout(pp=4), stage, 100) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(pp=4), 0, 2) == 2
    assert in_flight(Layout(pp=4, schedule="gpipe"), 3, 100) == 100


def test_experts_are_divided_by_ep_and_tp_and_their_states_by_the_ranks_with_the_same():
    model = Model(3, 64, 24, 4, 100, experts=10, experts_per_token=2, shared_intermediate=32)
    job = Job(model, Hardware.of("a100"), 128, 16)
    expert, common = 3 * 64 * 24, model.parameters - 3 * 10 * 3 * 64 * 24
    for ep, most in ((1, 10), (2, 5), (4, 3), (8, 2)):  # the rank with the most of ten
        memory = MemoryModel(job).memory(Layout(dp=8, ep=ep, zero=1))
        held = common + 3 * most * expert
        assert memory.weights == 2 * held and memory.gradients == 4 * held
        assert memory.optimizer == pytest.approx(12 * (common / 8 + 3 * most * expert * ep / 8))
    split = LayerShare.of(job, 1, 2, 1, 4)
    assert (split.experts, split.intermediate) == (2, 16)  # ten over eight ranks
    # Each rank's tokens count for two experts; the most loaded rank of ep and tp has a tenth more than the mean.
    assert LayerShare.of(job, 1, 1, 3).rows == 3 * 128 * 2 and split.rows == math.ceil(1.1 * 128 * 2 / 2)
    more = MemoryModel(replace(job, imbalance=2.0)).memory(Layout(dp=8, ep=2)).activations
    even = MemoryModel(replace(job, imbalance=1.0)).memory(Layout(dp=8, ep=2)).activations
    assert more - even == 3 * 256 * (2 * 64 + 4 * 24) * 2


def test_states_take_18_bytes_a_parameter_in_bf16_and_16_in_fp32():
    model = Model.of("gpt-3-175b")
    for precision, expected in (("bf16", 18), ("fp32", 16)):
        memory = MemoryModel(Job(model, A100, 2048, 1, precision)).memory(Layout())
        assert memory.weights + memory.gradients + memory.optimizer == expected * model.parameters
    # Rajbhandari et al. 2020: stage 1 leaves 2 + 4 + 12 / N, stage 2 leaves 2 + 16 / N, stage 3 leaves 18 / N.
    job, ranks = Job(model, A100, 2048, 64), 64
    for zero, expected in ((1, 6 + 12 / ranks), (2, 2 + 16 / ranks), (3, 18 / ranks)):
        memory = MemoryModel(job).memory(Layout(dp=ranks, zero=zero))
        assert memory.weights + memory.gradients + memory.optimizer == expected * model.parameters


class Block(nn.Module):
    """A transformer layer as one writes it in plain PyTorch."""

    def __init__(self, model):
        super().__init__()
        norm = nn.RMSNorm if model.gated_mlp else nn.LayerNorm
        h, f, self.head_dim, bias = model.hidden, model.intermediate, model.head_dim, model.bias
        self.norm1, self.norm2 = norm(h), norm(h)
        self.query, self.key, self.value, self.output = (nn.Linear(h, h, bias) for _ in range(4))
        self.up, self.down = nn.Linear(h, f, bias), nn.Linear(f, h, bias)
        self.gate = nn.Linear(h, f, bias) if model.gated_mlp else None

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("gated", [False, True])
def test_activations_are_what_pytorch_saves(gated):
    model = Model(1, 96, 250, 6, 100, gated_mlp=gated, bias=not gated)
    block, x = Block(model), torch.randn(3, 40, 96, requires_grad=True)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)  # or another would take its address
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    statistics = 4 * 3 * 40 * 2 * (1 if gated else 2)  # of two norms: a reciprocal of the deviation, and a mean
    machine = Hardware("cpu", 1e9, {"fp32": 1e9}, 1e9, 1e9, 1e9)
    small = 64  # the attention's random state
    predicted = layer_of(Job(model, machine, 40, 3, "fp32"), 1, 1, 3).kept("none")
    assert 0 <= sum(saved.values()) - statistics - predicted <= small


class LanguageModel(nn.Module):
    def __init__(self, model, recompute):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.position = nn.Embedding(model.positions, model.hidden) if model.positions else None
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = (nn.RMSNorm if model.gated_mlp else nn.LayerNorm)(model.hidden)
        self.logits = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied_embeddings:
            self.logits.weight = self.embedding.weight
        self.recompute = recompute == "full"

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.logits(self.norm(x))


@pytest.mark.slow("pytorch_ext/tools/planner")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_step_holds_at_its_peak_what_is_predicted(gated, recompute):
    """Every tensor of a process that trains: weights, gradients, AdamW's states, what is saved, the loss."""
    sequence, batch = 64, 8
    model = Model(
        4,
        128,
        350,
        4,
        1000,
        gated_mlp=gated,
        bias=not gated,
        positions=0 if gated else sequence,
        tied_embeddings=not gated,
    )
    module = LanguageModel(model, recompute)
    assert sum(parameter.numel() for parameter in module.parameters()) == model.parameters
    optimizer = torch.optim.AdamW(module.parameters())
    tokens = torch.randint(model.vocab, (batch, sequence))
    tracker = MemTracker()
    tracker.track_external(module, optimizer, tokens)
    with tracker:
        for _ in range(2):  # from the second on, states and gradients are there from the start
            F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    job = Job(model, Hardware("cpu", 1e9, {"fp32": 1e9}, 1e9, 1e9, 1e9), sequence, batch, "fp32")
    predicted = MemoryModel(job).memory(Layout(micro_batch=batch, recompute=recompute)).total
    assert predicted == pytest.approx(peak, rel=0.01)


sizes = st.integers(1, 8)
shapes = st.builds(
    Model,
    layers=st.integers(8, 40),
    hidden=st.sampled_from([64, 96, 1000]),
    intermediate=st.integers(10, 4000),
    heads=st.sampled_from([8, 16, 24]),
    head_dim=st.sampled_from([4, 8, 64]),
    vocab=st.integers(100, 50000),
    kv_heads=st.sampled_from([0, 1, 2, 8]),
    gated_mlp=st.booleans(),
    tied_embeddings=st.booleans(),
    dropout=st.booleans(),
)
jobs = st.builds(
    Job,
    shapes,
    st.just(A100),
    st.integers(16, 5000),
    st.just(840),
    fused_attention=st.booleans(),
    sequence_parallel=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(jobs, sizes, sizes, sizes, st.sampled_from(["pp", "cp", "tp"]), st.data())
def test_twice_the_ranks_of_a_dimension_never_take_more_states_and_activations(job, pp, cp, tp, dimension, data):
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe"]))
    layout = Layout(pp, 1, cp, tp, schedule=schedule, zero=data.draw(st.sampled_from([0, 1])))
    more = replace(layout, **{dimension: 2 * getattr(layout, dimension)})
    scale = MemoryModel(job)

    def held(layout):
        memory = scale.stage(layout, 0)
        return memory.weights, memory.gradients, memory.optimizer

    assert all(after <= before for before, after in zip(held(layout), held(more), strict=True))
    if dimension != "pp":
        assert scale.stage(more, 0).activations <= scale.stage(layout, 0).activations


@settings(max_examples=100, deadline=None)
@given(jobs, sizes, sizes, sizes, sizes)
def test_a_further_zero_stage_or_recomputation_never_takes_more(job, pp, dp, cp, tp):
    layout = Layout(pp, dp, cp, tp)
    scale = MemoryModel(job)
    # Of few wide layers "full" can take more than "selective", which has attention or the MLP again, not both at a time.
    for field, order in (("zero", (0, 1, 2)), ("recompute", ("none", "selective")), ("recompute", ("none", "full"))):
        totals = [scale.memory(replace(layout, **{field: value})).total for value in order]
        assert totals == sorted(totals, reverse=True)
    scale = MemoryModel(replace(job, by_weft=False))  # buffers for all are fewer where micro-batches are
    bigger = [scale.memory(replace(layout, micro_batch=size)).total for size in (1, 2, 4)]
    assert bigger == sorted(bigger)
