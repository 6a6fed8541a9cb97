"""sequence_parallel=True of an automatic plan: ranks share the sequence between split layers, and nothing else changes."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.context_parallel.notes import notes
from weft.context_parallel.shared_sequence import SharedSequence
from weft.tensor_parallel.auto import automatic_plan
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Block(nn.Module):
    """Attention and an MLP with norms before them; `mix` works along the sequence."""

    def __init__(self, width, heads, mix=None, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 33), nn.GELU(), nn.Linear(33, width))
        self.mix, self.dropout = mix, nn.Dropout(dropout)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, -1, x.shape[-1] // self.heads).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        if self.mix is not None:
            x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Model(nn.Module):
    def __init__(self, width=20, mix=False, dropout=0.0, layers=2):
        super().__init__()
        self.embedding, self.position = nn.Embedding(61, width), nn.Embedding(16, width)
        mixes = [nn.Conv1d(width, width, 3, padding=1) if mix else None, *[None] * (layers - 1)]
        self.blocks = nn.ModuleList(Block(width, 5, mix, dropout) for mix in mixes)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 61, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), x, x[:, 0]


SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=46, num_hidden_layers=2, num_attention_heads=4)
LLAMA = dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
DRY = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MODELS = {
    "plain": Model,
    "a convolution along the sequence": partial(Model, mix=True),
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **LLAMA)),
    "GPT2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, **DRY)
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _import_models():
    for make in MODELS.values():
        make()


def result_of(model, tokens):
    if isinstance(model, Model):
        outputs = model(tokens)
        loss = F.cross_entropy(outputs[0].flatten(0, 1), tokens.flatten()) + outputs[1].pow(3).mean()
        return outputs, loss + outputs[2].sum()
    output = model(input_ids=tokens, labels=tokens, output_hidden_states=True, use_cache=False)
    return (output.logits, *output.hidden_states), output.loss + output.hidden_states[-1].pow(3).mean()


def assert_close(result, expected, message):
    """Norms and rotary positions of transformers are computed in fp32, whatever the model's type."""
    assert not isinstance(result, SharedSequence) and result.shape == expected.shape, message
    error = (result.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-3)
    assert error < 1e-5, f"{message}: {error:.2e}"


def parts_into(model, kind):
    """Record the local shape of each input of the modules of a kind; None for a whole input."""
    seen = []

    def see(module, args):
        seen.append(tuple(args[0].local.shape) if isinstance(args[0], SharedSequence) else None)

    for module in model.modules():
        if type(module).__name__.endswith(kind):
            module.register_forward_pre_hook(see)
    return seen


def check_models(rank, names):
    world = dist.get_world_size()
    for name in names:
        torch.manual_seed(3)
        whole = MODELS[name]().double().train()
        model = weft.parallelize(copy.deepcopy(whole), plan="auto", sequence_parallel=True)
        seen = parts_into(model, "Norm")
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (whole, model)]
        for step, length in enumerate((7, 8)):
            tokens = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(step))
            (expected, loss), (results, own_loss) = result_of(whole, tokens), result_of(model, tokens)
            for result, wanted in zip((*results, own_loss), (*expected, loss), strict=True):
                assert_close(result, wanted, f"{name}, step {step}")
            loss.backward(), own_loss.backward()
            for key, parameter in model.named_parameters():
                gradient, shard = whole.get_parameter(key).grad, weft.shard_of(parameter)
                assert_close(parameter.grad, gradient if shard is None else shard.take(gradient), f"{name}: {key}")
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
            mine = weft.split_sizes(length, world)[rank]
            parts = [shape[1] for shape in seen if shape is not None and len(shape) == 3]
            assert set(parts) == {mine} and len(parts) >= 3, (name, seen)
            seen.clear()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("pytorch_ext/context_parallel"))])
def test_outputs_gradients_and_steps_are_the_whole_models(world):
    run_ranks(check_models, world, list(MODELS), timeout_s=150)


def check_dropout(rank):
    """Ranks drop elements of their own parts by their own numbers, and draw alike again afterwards."""
    torch.manual_seed(5)
    model = weft.parallelize(Model(dropout=0.4).double(), plan="auto", sequence_parallel=True)
    logits, hidden, _ = model(torch.arange(14).view(2, 7))
    logits.square().sum().backward()
    dist.all_gather(others := [torch.empty_like(hidden) for _ in range(2)], hidden.detach())
    assert torch.equal(*others)
    norms = [model.blocks[1].norms[1].weight.grad, model.norm.weight.grad]
    for gradient in norms:
        dist.all_gather(others := [torch.empty_like(gradient) for _ in range(2)], gradient)
        assert torch.equal(*others)
    return torch.rand(3).tolist()


def test_ranks_drop_their_own_positions_and_draw_alike_afterwards():
    first, second = run_ranks(check_dropout, 2)
    assert first == second


def saved_bytes(model, tokens):
    """Bytes that one forward keeps for backward, without parameters."""
    kept, own = {}, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(tokens)
    assert result[0].requires_grad
    return sum(size for size, _ in kept.values())


def check_memory(rank):
    torch.manual_seed(0)
    found = []
    for options in ({}, {"sequence_parallel": True}):
        models = [weft.parallelize(Model(40, layers=layers), plan="auto", **options) for layers in (2, 3)]
        few, more = (saved_bytes(model, torch.randint(0, 61, (2, 16))) for model in models)
        found.append(more - few)
    return found


def test_a_layer_keeps_a_part_of_its_norms_as_the_formula_says():
    """Korthikanti et al. 2022, section 4.2.2: the region divides two norms' inputs, outputs and statistics by W."""
    of_norms = 2 * 16 * (4 * 40 * 4 + 2 * 8)
    for plain, shared in run_ranks(check_memory, 2):
        assert plain - shared == of_norms / 2


def check_edges(rank):
    tokens = torch.arange(8).view(2, 4)
    torch.manual_seed(1)
    whole = Model(mix=True).double()
    model = weft.parallelize(copy.deepcopy(whole), plan="auto", sequence_parallel=True)
    short = tokens[:, :2]  # fewer positions than ranks: nothing is shared
    assert_close(model(short)[0], whole(short)[0], "short")
    model(tokens)
    assert any(kind.startswith("gathered") for _, kind, _ in notes(model))
    found = automatic_plan(whole, 3, sequence_parallel=True)
    assert found.sequence_parallel and found.plan == automatic_plan(whole, 3).plan
    with pytest.raises(ValueError, match='sequence_parallel=True of plan="auto" is not supported with invariant'):
        weft.parallelize(Model(), sequence_parallel=True, invariant=3)


def test_short_sequences_gathers_and_refusals():
    run_ranks(check_edges, 3)


def check_meshes(rank):
    for dimension in ("cp", "pp"):
        mesh = weft.init_mesh(**{dimension: 2, "tp": 2}, device_type="cpu")
        with pytest.raises(ValueError, match=f"is not supported with a mesh with {dimension}"):
            weft.parallelize(Model(), mesh, sequence_parallel=True)


def test_meshes_that_share_the_sequence_or_the_layers_otherwise_are_refused():
    run_ranks(check_meshes, 4)
