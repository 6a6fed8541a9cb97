"""plan="auto": what is split can be shown to be right, and the model computes what it computed."""

import copy
from collections import namedtuple
from enum import IntEnum
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.metadata import metadata
from weft.tensor_parallel.auto import automatic_plan
from weft.tensor_parallel.auto.trace import tensors_in
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=46,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ENCODER = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
ENCODER |= dict(num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
FALCON = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
FALCON |= dict(ffn_hidden_size=46, hidden_dropout=0.0, attention_dropout=0.0)
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
DRY = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def of_transformers(config, head="ForCausalLM", **options):
    return getattr(transformers, f"{config}{head}")(getattr(transformers, f"{config}Config")(**options))


class Attention(nn.Module):
    """Written as people write it: heads counted in the code, one projection viewed as three."""

    def __init__(self, width, heads, kv_heads=None):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, width // heads
        self.project = nn.Linear(width, (heads + 2 * self.kv_heads) * self.size)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.project(x).split([n * self.size for n in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        y = (q @ k.transpose(-1, -2) / self.size**0.5).softmax(-1) @ v
        return self.output(y.transpose(1, 2).reshape(batch, length, self.heads * self.size))


class Viewed(nn.Module):
    """Queries, keys and values along a dimension of their own."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class HeadNorm(nn.Module):
    """Counts the heads itself; its weight is every head's, and so its gradient a sum over the ranks."""

    def __init__(self, heads, size):
        super().__init__()
        self.heads, self.size, self.weight = heads, size, nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x):
        x = x.reshape(*x.shape[:2], self.heads, self.size)
        return F.rms_norm(x, (self.size,), self.weight).transpose(1, 2)


class Weighed(nn.Module):
    """Returns its weights too."""

    def __init__(self, width, heads):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.size = HeadNorm(heads, width // heads), width // heads

    def forward(self, x):
        value = self.value(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        weights = (self.norm(self.query(x)) @ self.norm(self.key(x)).mT).softmax(-1)
        return self.output((weights @ value).transpose(1, 2).flatten(2)), weights


class Measuring(nn.Module):
    """As in nanoGPT: the width of its input, divided by its heads, is the size of a head."""

    def __init__(self, width, heads, fused):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_embd, self.n_head, self.fused, self.dropout = width, heads, fused, nn.Dropout(0.0)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for part in (q, k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self.dropout((q @ k.transpose(-2, -1) * k.size(-1) ** -0.5).softmax(-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Reshaping(nn.Module):
    """As in timm; the width is read by a method, of an argument that may be named."""

    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def heads(self, x):
        batch, length, _ = x.shape
        return self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)

    def merged(self, y, x):
        return y.transpose(1, 2).reshape(x.size(0), x.size(1), x.size(dim=-1))

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.proj(self.merged((q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1) @ v, x))


class Turning(nn.Module):
    """As in Meta's Llama: positions are turns of complex numbers."""

    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = heads, kv_heads, heads // kv_heads, width // heads
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.head_dim, bias=False) for _ in range(2))

    def turned(self, x, turns):
        x = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turns = turns.view(*[d if i == 1 or i == x.ndim - 1 else 1 for i, d in enumerate(x.shape)])
        return torch.view_as_real(x * turns).flatten(3)

    def repeated(self, x):
        batch, length, heads, size = x.shape
        if self.n_rep == 1:
            return x
        x = x[:, :, :, None, :].expand(batch, length, heads, self.n_rep, size)
        return x.reshape(batch, length, heads * self.n_rep, size)

    def forward(self, x):
        batch, length, _ = x.shape
        angles = torch.outer(torch.arange(length).float(), 1.0 / 100 ** torch.linspace(0, 1, self.head_dim // 2))
        turns = torch.polar(torch.ones_like(angles), angles)
        q = self.turned(self.wq(x).view(batch, length, self.n_heads, self.head_dim), turns).type_as(x)
        k = self.turned(self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim), turns).type_as(x)
        k, v = self.repeated(k), self.repeated(self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = torch.matmul((torch.matmul(q, k.transpose(2, 3)) / self.head_dim**0.5).softmax(-1), v)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))


class First(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


class Block(nn.Module):
    def __init__(self, attention, width):
        super().__init__()
        self.attention, self.norms = attention, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 45), nn.GELU(), nn.Linear(45, width))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Plain(nn.Module):
    def __init__(self, *attentions, width=20):
        super().__init__()
        self.embedding, self.position = nn.Embedding(61, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(attention, width) for attention in attentions)
        self.head = nn.Linear(width, 61, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Bottleneck(nn.Module):
    """As in torchvision: 1x1, 3x3, 1x1, each with its norm, around a shortcut."""

    def __init__(self, channels, inner, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.downsample(x)
        return self.relu(y)


class BasicBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8), Bottleneck(8, 7, 16, 1))
        self.layer2 = nn.Sequential(Bottleneck(16, 9, 20, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(20, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


MODELS = {
    "Llama": partial(of_transformers, "Llama", **SIZES, tie_word_embeddings=True),
    "Llama, two KV heads of eight": partial(
        of_transformers, "Llama", **{**SIZES, "num_attention_heads": 8, "head_dim": 4}
    ),
    "Llama, five groups": partial(
        of_transformers,
        "Llama",
        **{**SIZES, "hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 4},
    ),
    "Qwen3": partial(of_transformers, "Qwen3", **SIZES),
    "GPT2": partial(of_transformers, "GPT2", "LMHeadModel", **GPT2, **DRY),
    "Bert": partial(of_transformers, "Bert", "ForMaskedLM", **ENCODER),
    "Phi3": partial(of_transformers, "Phi3", **SIZES),
    "GPTNeoX": partial(of_transformers, "GPTNeoX", **SIZES),
    "Falcon, groups": partial(of_transformers, "Falcon", **FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "Falcon, one KV head": partial(of_transformers, "Falcon", **FALCON, multi_query=True),
    "OPT": partial(
        of_transformers,
        "OPT",
        **{**ENCODER, "ffn_dim": 46, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "Gemma2": partial(of_transformers, "Gemma2", **SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "Mixtral": partial(
        of_transformers, "Mixtral", **SIZES, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    ),
    "Albert": partial(of_transformers, "Albert", "ForMaskedLM", **ENCODER, embedding_size=16),
    "T5": partial(
        of_transformers,
        "T5",
        "ForConditionalGeneration",
        **dict(vocab_size=61, d_model=32, d_kv=8, d_ff=46, num_layers=2, num_heads=4, dropout_rate=0.0),
        decoder_start_token_id=0,
    ),
    "Bart": partial(
        of_transformers,
        "Bart",
        "ForConditionalGeneration",
        **dict(vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=46, decoder_ffn_dim=46),
        **dict(encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, dropout=0.0),
    ),
    "ViT": partial(
        of_transformers,
        "ViT",
        "ForImageClassification",
        **{key: value for key, value in ENCODER.items() if key != "vocab_size"},
        image_size=32,
        patch_size=8,
    ),
    "plain": lambda: Plain(Attention(20, 4), Attention(20, 4, 2), Viewed(20, 5)),
    "MQA": lambda: Plain(Attention(20, 4, 1)),
    "heads that a norm counts": lambda: Plain(First(Weighed(20, 5))),
    "widths of an input": lambda: Plain(Measuring(20, 5, True), Measuring(20, 5, False), Reshaping(20, 5)),
    "complex positions": lambda: Plain(Turning(24, 6, 3), Turning(24, 6, 6), width=24),
    "ResNet": ResNet,
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(20, 5, 33, dropout=0.0, batch_first=True), 2
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _import_models():
    """Import the code of every model here, once, and not in every rank."""
    for make in MODELS.values():
        make()


def batch_of(name, model):
    generator = torch.Generator().manual_seed(7)
    if name == "ResNet" or name == "ViT":
        return {"x" if name == "ResNet" else "pixel_values": torch.randn(2, 3, 32, 32, generator=generator).double()}
    tokens = torch.randint(3, 60, (2, 7), generator=generator)
    if isinstance(model, transformers.PreTrainedModel):
        return {"input_ids": tokens, "labels": tokens}
    return (
        {"tokens": tokens} if isinstance(model, Plain) else {"src": torch.randn(2, 7, 20, generator=generator).double()}
    )


def result_of(model, batch):
    output = model(**batch)
    if isinstance(output, torch.Tensor):
        return output, output.square().sum()
    loss = getattr(output, "loss", None)
    return output.logits, output.logits.square().sum() if loss is None else loss


def assert_close(result, expected, message):
    """Norms and rotary positions of transformers are computed in fp32, whatever the model's type."""
    error = (result.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-3)
    assert error < 1e-5, f"{message}: {error:.2e}"


def whole_model(name):
    torch.manual_seed(3)
    return MODELS[name]().double().train()


def check_model(name, plan):
    whole = whole_model(name)
    model = weft.parallelize(copy.deepcopy(whole), plan=plan or "auto")
    if plan is None:
        plan = metadata(model, "plan").plan
        own = weft.parallelize(copy.deepcopy(whole), plan=dict(plan))
        assert [p.shape for p in own.parameters()] == [p.shape for p in model.parameters()], name
    batch = batch_of(name, whole)
    (expected, loss), (result, own_loss) = result_of(whole, batch), result_of(model, batch)
    assert_close(result, expected, f"{name}: output")
    assert_close(own_loss, loss, f"{name}: loss")
    loss.backward()
    own_loss.backward()
    for key, parameter in model.named_parameters():
        gradient, shard = whole.get_parameter(key).grad, weft.shard_of(parameter)
        assert (gradient is None) == (parameter.grad is None), f"{name}: {key}"
        if gradient is not None:
            assert_close(parameter.grad, gradient if shard is None else shard.take(gradient), f"{name}: {key}")
    for module, entry in plan.items():
        style = entry if isinstance(entry, str) else entry["style"]
        if style in ("column", "row", "vocabulary", "channels"):
            mine, all_of_it = (one.get_submodule(module).weight.numel() for one in (model, whole))
            assert mine < all_of_it, f"{name}: {module}"


def check_models(rank, plans):
    for name, plan in plans.items():
        check_model(name, plan)


@pytest.mark.parametrize(
    "part", [0, 2, *(pytest.param(x, marks=pytest.mark.slow("pytorch_ext/tensor_parallel")) for x in (1, 3))]
)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow("pytorch_ext/tensor_parallel")), 3])
def test_outputs_loss_and_gradients_are_the_whole_models(world, part):
    """Over 2 ranks each finds the plan; over 3 it is found once, and given to them as one of one's own."""
    names = list(MODELS)[part::4]
    plans = {name: None if world == 2 else dict(automatic_plan(whole_model(name), world).plan) for name in names}
    run_ranks(check_models, world, plans, timeout_s=150)


# What is found


def paired(found):
    """The plan without layers that are split alone and gathered."""
    return {name: entry for name, entry in found.plan.items() if name not in found.gathered}


def why(found, name):
    """Why the features of a layer do not stay split."""
    return found.whole.get(name) or found.gathered[name]


def split_of(name, world=2):
    return automatic_plan(MODELS[name](), world)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3", "GPTNeoX", "Gemma2"])
def test_what_the_plan_of_transformers_splits_is_split(name):
    """Its plan says which layers, and nothing of heads; here the same layers are found from what the model computes."""
    model = MODELS[name]()
    found = automatic_plan(model, 2)
    for pattern, style in model.base_model.config.base_model_tp_plan.items():
        if style in ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "colwise_gather_output"):
            for layer in range(2):
                assert f"{model.base_model_prefix}.{pattern}".replace("*", str(layer)) in found.plan


def test_queries_are_cut_where_their_kv_head_is():
    """Three ranks, two KV heads: both are on some rank with the query heads that use them, none is cut."""
    found = split_of("Llama", 3).plan
    heads = {"unit": 8, "heads": (4, 2)}
    assert found["model.layers.1.self_attn.q_proj"] == found["model.layers.1.self_attn.k_proj"]
    assert found["model.layers.1.self_attn.k_proj"] == {"style": "column", **heads}
    assert found["model.layers.1.self_attn.o_proj"] == {"style": "row", **heads}
    of_attention = {"num_key_value_groups": (2, 1, 1), "results": {1: (1, 2, 1, 1)}}
    assert found["model.layers.1.self_attn"] == {"style": "attributes", **of_attention}
    assert split_of("Llama", 2).plan["model.layers.1.self_attn.q_proj"] == {"style": "column", "unit": 16}


def test_fused_projections_are_cut_piece_by_piece():
    found = split_of("GPT2").plan
    assert found["transformer.h.0.attn.c_attn"] == {"style": "column", "parts": (32, 32, 32), "unit": 8}
    assert found["transformer.h.0.attn"] == {"style": "attributes", "split_size": (16, 16), "results": {1: (1, 2, 2)}}
    assert found["transformer.wte"] == "vocabulary"
    assert found["lm_head"] == {"style": "column", "gather_output": True}
    viewed = split_of("plain").plan["blocks.2.attention.qkv"]
    assert viewed == {"style": "column", "parts": (20, 20, 20), "unit": 4}


def test_the_width_of_an_input_is_this_ranks_where_its_own_code_reads_it():
    found = split_of("widths of an input", 3).plan
    numbers = {"n_head": (2, 2, 1), "x.shape[-1]": (8, 8, 4)}
    for block in range(2):
        assert found[f"blocks.{block}.attention"] == {"style": "attributes", "n_embd": (8, 8, 4), **numbers}
    assert found["blocks.2.attention"]["x.shape[-1]"] == (8, 8, 4)
    assert all(f"blocks.{block}.attention" in split_of("complex positions", 3).plan for block in range(2))


class Varied(Measuring):
    """Does something with the width that is not a size of its features."""

    def __init__(self, way):
        super().__init__(20, 5, True)
        self.way = way

    def forward(self, x):
        x, scale = self.way(x)
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(
            F.scaled_dot_product_attention(q * scale, k, v).transpose(1, 2).reshape(batch, length, x.shape[-1])
        )


VARIED = {
    "a size of it": (lambda x: (x, 2.0), None),
    "a number that it computes with": (lambda x: (x, x.shape[-1] ** -0.5), "write -1 instead of 20"),
    "a tensor of it": (lambda x: (x, torch.tensor(x.shape[-1] ** -0.5)), "write -1 instead of 20"),
    "of another tensor": (lambda x: (x * 1, 1.0), "write -1 instead of 20 in its view as (3, 5, 20)"),
}


@pytest.mark.parametrize("what", VARIED)
def test_a_width_with_which_something_else_is_computed_stays_whole_with_a_way_out(what):
    way, message = VARIED[what]
    found = automatic_plan(Plain(Varied(way)), 2)
    assert ("blocks.0.attention.c_attn" in paired(found)) == (message is None), found
    assert message is None or message in why(found, "blocks.0.attention.c_attn")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_any_type_is_found_to_be_the_same(dtype):
    """Whose first layers, 1-D convolutions, run as they are."""
    sizes = dict(vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, max_source_positions=20)
    sizes |= dict(encoder_ffn_dim=46, decoder_ffn_dim=46, encoder_attention_heads=4, decoder_attention_heads=4)
    sizes |= dict(num_mel_bins=8, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = of_transformers("Whisper", "ForConditionalGeneration", **sizes, decoder_start_token_id=1)
    found = automatic_plan(model, 2).plan
    assert "model.encoder.layers.0.self_attn.q_proj" in found
    assert automatic_plan(model.to(dtype), 2).plan == found


def test_convolutions_are_split_through_shortcuts():
    """Where both branches are split alike, their sum is, and the layers that take it are split by input channels."""
    model = MODELS["ResNet"]()
    found = automatic_plan(model, 2)
    styles = {name: found.plan.get(name) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert set(styles.values()) == {"column", "row"}
    assert styles["layer1.1.conv3"] == styles["layer1.1.downsample.0"]
    norms = {name for name, entry in found.plan.items() if entry == "channels"}
    assert norms and norms <= {name for name, one in model.named_modules() if isinstance(one, nn.BatchNorm2d)}


def test_what_the_model_returns_is_gathered_where_there_is_much_of_it():
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
    assert automatic_plan(model, 2).plan == {"0": {"style": "column", "gather_output": True}}
    assert automatic_plan(model, 2, loss_parallel=True).plan == {"0": "column"}
    few = automatic_plan(nn.Sequential(nn.Linear(10, 6)), 2)
    assert few.plan == {} and few.whole["0"] == "the model returns its features, and there are few of them"


def test_what_has_fewer_units_than_ranks_stays_whole_and_is_reported():
    found = split_of("Llama", 5)
    assert "4 units (model.layers.0.self_attn.k_proj" in why(found, "model.layers.0.self_attn.q_proj")
    assert "are fewer than 5 ranks" in why(found, "model.layers.0.self_attn.q_proj")
    assert found.plan["model.layers.0.mlp.up_proj"] == "column"


class Pair(nn.Module):
    """A layer into another, and what stands between them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm, self.scale = nn.LayerNorm(10), nn.Parameter(torch.ones(10))
        self.gate, self.other = nn.Linear(6, 1), nn.Parameter(torch.ones(1))
        self.between = between

    def forward(self, x):
        return self.between(self, self.up(x), x)


def hooked(pair):
    pair.up.register_forward_hook(lambda *_: None)


def _filled(x):
    gate = torch.ones(*x.shape[:-1], 1, dtype=x.dtype)
    gate[:, 0] = x[:, 0, :1]
    return gate


class NormedGradient(torch.autograd.Function):
    """The identity, whose backward needs all features."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, dx):
        return dx / dx.norm(dim=-1, keepdim=True)


def with_hook(h):
    if h.requires_grad:
        h.register_hook(lambda dh: dh / dh.norm(dim=-1, keepdim=True))
    return h


BETWEEN = {
    "a function with a backward of its own": (
        lambda p, h, x: p.down(NormedGradient.apply(h).relu()),
        "no rule for autograd function NormedGradient",
    ),
    "a tensor's hook": (lambda p, h, x: p.down(with_hook(h.relu())), "no rule for register_hook"),
    "an activation, and numbers": (lambda p, h, x: p.down(F.silu(h * 2.0) + 1), None),
    "a parameter of size 1": (lambda p, h, x: p.down(h * p.other), "p.other|has other parameters too"),
    "a norm over the features": (lambda p, h, x: p.down(p.norm(h)), "goes over all of its features"),
    "a softmax over the features": (lambda p, h, x: p.down(h.softmax(-1)), "goes over all of its features"),
    "a whole parameter": (lambda p, h, x: p.down(h * p.scale), "joins them with a tensor that is whole"),
    "a constant that a whole activation is written to": (lambda p, h, x: p.down(h * _filled(x)), "an activation that"),
    "a whole activation": (lambda p, h, x: p.down(h * x.norm()), "an activation that is whole, and its gradient"),
    "another layer's features": (lambda p, h, x: p.down(h * p.gate(x)), "split in different ways"),
    "a sum": (lambda p, h, x: p.down(h - h.mean(-1, keepdim=True)), "goes over all of its features"),
    "a cut": (lambda p, h, x: p.down(F.pad(h[..., :4], (0, 6))), "joins|takes some|no rule"),
    "a count of the features": (lambda p, h, x: p.down(h * h.shape[-1]), "its code counts all of the features"),
    "a tensor of their count": (lambda p, h, x: p.down(h * torch.tensor(h.shape[-1])), "takes another constant"),
    "another order": (lambda p, h, x: p.down(h.flip(-1)), "goes over all of its features"),
    "another view": (lambda p, h, x: p.down(h.view(-1, 2, 5).mT.reshape(h.shape)), "cuts through|something else"),
    "its weight": (lambda p, h, x: p.down(h) + p.up.weight.sum(), "its weight is also used by sum"),
    "random numbers of its shape": (
        lambda p, h, x: p.down(h + torch.randn_like(h)),
        "the planner has no rule for randn_like",
    ),
    "a product with itself": (lambda p, h, x: p.down(h @ (h.mT @ h)), "sums over|multiplies them"),
    "a softmax in evaluation": (
        lambda p, h, x: p.down(h.relu() if p.training else h.softmax(-1)),
        "all of its features",
    ),
    "called twice": (lambda p, h, x: p.down(h) + p.down(torch.ones(*x.shape[:-1], 10)), "whole features|whole"),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_only_what_works_on_each_feature_alone_may_stand_between(what):
    between, message = BETWEEN[what]
    found = automatic_plan(Pair(between), 2)
    if message is None:
        assert found.plan == {"up": "column", "down": "row"}
        return
    assert paired(found) == {}
    assert any(part in why(found, "up") for part in message.split("|")), why(found, "up")


def test_a_module_whose_gradient_a_hook_may_change_may_not_stand_between():
    pair = Pair(lambda p, h, x: p.down(p.act(h)))
    pair.act = nn.ReLU()
    assert automatic_plan(pair, 2).plan == {"up": "column", "down": "row"}
    pair.act.register_full_backward_hook(lambda module, dx, dy: (dx[0] / dx[0].norm(dim=-1, keepdim=True),))
    found = automatic_plan(pair, 2)
    assert paired(found) == {} and "no rule for backward hook in act" in why(found, "up")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 8), nn.Linear(8, 6), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(self.up(x) * self.scale)


def test_the_model_s_own_parameter_is_not_summed_with_all_others():
    found = automatic_plan(Scaled(), 2)
    assert paired(found) == {} and "has other parameters too" in why(found, "up")
    assert paired(automatic_plan(nn.Sequential(Scaled()), 2)) == {}


class Convolutions(nn.Module):
    """Gated by half of their channels."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(6, 16, 1), nn.Conv2d(8, 6, 1)

    def forward(self, x):
        gate, y = self.up(x).chunk(2, 1)
        return self.down(gate.sigmoid() * y)


def test_channels_in_pieces_stay_whole():
    found = automatic_plan(Convolutions(), 2)
    assert paired(found) == {} and why(found, "up") == "pieces of its channels are used apart"


class Held:
    def __init__(self, hidden, output):
        self.hidden, self.output = hidden, output


def test_what_an_object_holds_that_the_model_returns_is_whole():
    found = automatic_plan(Pair(lambda p, h, x: Held({"h": [h[..., None]]}, p.down(h))), 2)
    assert found.plan in ({}, {"up": {"style": "column", "gather_output": True}})


def test_what_cannot_be_replaced_stays_whole():
    def plain(p, h, x):
        return p.down(h)

    pair = Pair(plain)
    hooked(pair)
    assert "it has hooks" in automatic_plan(pair, 2).whole["up"]
    pair = Pair(plain)
    pair.down.forward = pair.down.forward
    assert "it has a forward of its own" in automatic_plan(pair, 2).whole["down"]
    pair = Pair(plain)
    pair.up.bias.register_hook(lambda gradient: 2 * gradient)
    assert "it has hooks of its parameters" in automatic_plan(pair, 2).whole["up"]

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    pair = Pair(plain)
    pair.up = Doubled(6, 10)
    found = automatic_plan(pair, 2)
    assert paired(found) == {} and why(found, "up") == "there is no style for " + Doubled.__qualname__
    pair = Pair(plain)
    pair.gate.weight = nn.Parameter(torch.ones(10, 6))
    pair.up.weight = pair.gate.weight
    assert paired(automatic_plan(pair, 2)) == {}, "weights of layers that are not split alike"


PAIR = {"0": "column", "2": "row"}


class Asking(nn.Module):
    """Called with what nobody can guess; its parts are called, and one is reached into."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        self.used = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))

    def forward(self, batch):
        return self.mlp(batch["features"]) + self.used(batch["features"]) * self.used[0].weight.sum()


def test_parts_of_a_model_that_cannot_be_called_are_looked_at_alone():
    found = automatic_plan(Asking(), 2)
    assert found.plan == {f"{part}.{layer}": style for part in ("mlp", "used") for layer, style in PAIR.items()}

    found = automatic_plan(Asking(), 2, example=({"features": torch.ones(2, 6)},))
    assert paired(found) == {"mlp.0": "column", "mlp.2": "row"}
    assert "its weight is also used by sum" in why(found, "used.0")


class Tied(nn.Module):
    """Called with what nobody can guess; its scores are tied to a table that stays whole."""

    def __init__(self):
        super().__init__()
        self.table, self.scores = nn.Embedding(40, 6, max_norm=1.0), nn.Linear(6, 40, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, batch):
        return self.scores(self.table(batch["tokens"]))


def test_parts_with_one_weight_are_split_alike_or_not_at_all():
    found = automatic_plan(Tied(), 2)
    assert found.parts == ("table", "scores") and found.plan == {}
    assert why(found, "scores") == "its weight is also that of table, which stays whole"


class Deciding(nn.Module):
    """Decides by values how it goes on, so that it cannot be called without; `also` is what else it does."""

    def __init__(self, also):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        self.also = also

    def forward(self, x):
        y = self.mlp(x)
        return (y / 2 if y.abs().max() > 1e9 else y) + self.also(self, x)


HARMLESS = {
    "nothing else": lambda model, x: 0,
    "the device of a weight": lambda model, x: x.to(next(model.parameters()).device).sum() * 0,
    "another call of the part": lambda model, x: model.mlp(x),
    "the bias that is whole": lambda model, x: model.mlp[2].bias,
}
ELSEWHERE = {
    "all parameters": lambda model, x: sum(parameter.square().sum() for parameter in model.parameters()),
    "a weight by its name": lambda model, x: getattr(model, "mlp")[0].weight.sum(),  # noqa: B009
    "a weight in a product": lambda model, x: x @ model.mlp[0].weight.detach().t().sum(1, keepdim=True),
    "the size of a weight": lambda model, x: model.mlp[0].weight.shape[0],
    "a layer of the part": lambda model, x: model.mlp[2](model.mlp[0](x)),
}


def check_uses_elsewhere(rank):
    x = torch.randn(3, 6)
    for name, also in HARMLESS.items():
        whole = Deciding(also)
        model = weft.parallelize(copy.deepcopy(whole))
        assert model.mlp[0].weight.shape == (5, 6)
        for _ in range(2):
            assert_close(model(x), whole(x), name)
    for also in ELSEWHERE.values():
        model = copy.deepcopy(weft.parallelize(Deciding(also)))
        with pytest.raises(ValueError, match=r"mlp\.\d.* is used by .* outside of Sequential"):
            model(x)


def test_of_parts_that_were_followed_alone_what_is_split_is_used_inside_of_them():
    for also in (*HARMLESS.values(), *ELSEWHERE.values()):
        assert automatic_plan(Deciding(also), 2).plan == {f"mlp.{layer}": style for layer, style in PAIR.items()}
    run_ranks(check_uses_elsewhere, 2)


class Beside(nn.Module):
    """Has a layer that only some calls use, one whose weight is used without a call, and one that asks for values."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        self.image, self.direct, self.deciding = (
            copy.deepcopy(self.mlp),
            nn.Linear(6, 6),
            Deciding(HARMLESS["nothing else"]),
        )

    def forward(self, x, image=None):
        x = self.mlp(x) + self.deciding(x) + F.linear(x, self.direct.weight)
        return x if image is None else x + self.image(image)


def check_modules_that_the_run_leaves_out(rank):
    torch.manual_seed(0)
    whole, x, image = Beside(), torch.randn(3, 6), torch.randn(3, 6)
    model = weft.parallelize(copy.deepcopy(whole))
    for call in ((x,), (x, image)):
        (model(*call).square().sum()).backward()
        (whole(*call).square().sum()).backward()
        assert_close(model(*call), whole(*call), "output")
    for key, parameter in model.named_parameters():
        gradient, shard = whole.get_parameter(key).grad, weft.shard_of(parameter)
        if gradient is not None:
            assert_close(parameter.grad, gradient if shard is None else shard.take(gradient), key)


def test_modules_that_the_run_leaves_out_are_followed_alone():
    found = automatic_plan(Beside(), 2)
    assert found.parts == ("", "image", "deciding.mlp")
    assert paired(found) == {
        f"{part}.{layer}": style for part in ("mlp", "image", "deciding.mlp") for layer, style in PAIR.items()
    }
    run_ranks(check_modules_that_the_run_leaves_out, 2)


def test_the_model_is_not_touched():
    model = MODELS["GPT2"]()
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    seed = torch.random.get_rng_state()
    automatic_plan(model, 3)
    assert torch.equal(seed, torch.random.get_rng_state())
    for name, module in model.named_modules():
        kind, attributes = before[name]
        assert type(module) is kind and {**vars(module)} == attributes


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="world=0"):
        automatic_plan(Pair(None), world=0)


# What a split model does


class Returning(nn.Module):
    """What its attention returns, as `way` has it."""

    def __init__(self, way):
        super().__init__()
        self.attention, self.way = Weighed(20, 5), way

    def forward(self, x):
        return self.way(*self.attention(x))


Pairs = namedtuple("Pairs", "output weights")
ASIDE = {
    "no weights": lambda y, w: y,
    "a tuple": lambda y, w: (y, w),
    "a dict": lambda y, w: {"y": y, "list": [w]},
    "an object": lambda y, w: Held(w, y),
}
RETURNED = {**ASIDE, "in another order": lambda y, w: (y, w.transpose(0, 1)), "a mean": lambda y, w: (y, w.mean(1))}


def weights_of(model, batch, **options):
    output = model(**batch, **options)
    return [x for name in output if name.endswith("attentions") for x in output[name]]


def check_weights(rank, names):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 7, 20, generator=generator).double()
    own = automatic_plan(Returning(ASIDE["no weights"]), 3).plan
    assert own["attention"]["results"] == {1: (1, 2, 2, 1)}
    for name, plan in [*((name, "auto") for name in RETURNED), *((name, own) for name in ASIDE)]:
        torch.manual_seed(0)
        whole = Returning(RETURNED[name]).double()
        model = copy.deepcopy(weft.parallelize(copy.deepcopy(whole), plan=plan))
        found, expected = (list(tensors_in(one(x), 1)) for one in (model, whole))
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine, other, f"returned as {name}")
        for outputs in (found, expected):
            sum((y * y.detach().cos()).sum() for y in outputs).backward()
        for key, parameter in model.named_parameters():
            gradient, shard = whole.get_parameter(key).grad, weft.shard_of(parameter)
            assert_close(parameter.grad, gradient if shard is None else shard.take(gradient), f"{name}: {key}")
    named = weft.parallelize(Returning(Pairs).double(), plan=own)
    with pytest.raises(ValueError, match="Pairs with attention weights of this rank's heads alone .*tp=1"):
        named(x)
    for name in names:
        torch.manual_seed(1)
        whole = MODELS[name]().double().eval()
        whole.set_attn_implementation("eager")
        model = weft.parallelize(copy.deepcopy(whole), plan="auto")
        batch = batch_of(name, whole)
        expected = weights_of(whole, batch, output_attentions=True)
        assert len(expected) > 1 and expected[0].shape[1] == 4
        outer = weft.DataParallel(copy.deepcopy(model), group=weft.init_mesh(dp=1, tp=3, device_type="cpu")["dp"])
        asked = [weights_of(one, batch, output_attentions=True) for one in (model, outer)]
        if name in ("Llama", "GPT2", "Bert"):  # the others give their encoders and decoders configurations of their own
            asked.append(weights_of(model.base_model, {"input_ids": batch["input_ids"]}, output_attentions=True))
            model.config.output_attentions = True
            asked.append(weights_of(model, batch))
        for found in asked:
            for mine, other in zip(found, expected, strict=True):
                assert_close(mine, other, f"{name}: attention weights")
        assert not weights_of(model, batch, output_attentions=False), "nothing that is not asked for"


@pytest.mark.parametrize(
    "names",
    [
        ("Llama", "Bert", "T5"),
        pytest.param(("GPT2", "Bart", "OPT"), marks=pytest.mark.slow("pytorch_ext/tensor_parallel")),
    ],
    ids=" ".join,
)
def test_attention_weights_are_those_of_all_heads(names):
    run_ranks(check_weights, 3, names, timeout_s=150)


def check_shared_weights(rank):
    torch.manual_seed(0)
    x = torch.randn(2, 7, 20).double()
    whole, own = Returning(ASIDE["a tuple"]).double(), automatic_plan(Returning(ASIDE["no weights"]), 2).plan
    model = weft.parallelize(copy.deepcopy(whole), weft.init_mesh(cp=2, tp=2, device_type="cpu"), plan=own)
    for mine, other in zip(model(x), whole(x), strict=True):
        assert_close(mine, other, "over a shared sequence")
    sum((y * y.detach().cos()).sum() for y in model(x)).backward()
    sum((y * y.detach().cos()).sum() for y in whole(x)).backward()
    for key, parameter in model.named_parameters():
        gradient, shard = whole.get_parameter(key).grad, weft.shard_of(parameter)
        assert_close(parameter.grad, gradient if shard is None else shard.take(gradient), key)


def test_so_they_are_over_a_shared_sequence():
    run_ranks(check_shared_weights, 4)


class Tripled(nn.Embedding):
    def forward(self, tokens):
        return 3 * super().forward(tokens)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


SHARED = {
    "lookup": lambda: nn.Sequential(Tripled(9, 6), nn.Linear(6, 4)),
    "column": lambda: nn.Sequential(nn.Conv2d(7, 8, 1), nn.ReLU(), nn.Conv2d(8, 7, 1)),  # the channels are shared
    "heads": lambda: nn.Sequential(*[Attending()] * 3),
}


def check_shared(rank):
    mesh = weft.init_mesh(cp=2, tp=2, device_type="cpu")
    for style, made in SHARED.items():
        torch.manual_seed(0)
        whole = made().double()
        found = automatic_plan(whole, 2)
        assert style in str(found.plan.values())
        inputs = {"lookup": torch.arange(14).view(2, 7) % 9, "column": torch.randn(2, 7, 3, 3).double()}
        x = inputs.get(style, torch.randn(2, 7, 6).double())
        model = weft.parallelize(copy.deepcopy(whole), mesh, plan=found)
        assert_close(model(x), whole(x), style)
        for each in (model, whole):
            each(x).square().sum().backward()
        for key, parameter in model.named_parameters():
            gradient, shard = whole.get_parameter(key).grad, weft.shard_of(parameter)
            assert_close(parameter.grad, gradient if shard is None else shard.take(gradient), key)


def test_split_layers_of_every_kind_take_a_shared_sequence():
    run_ranks(check_shared, 4)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x, gate=None):
        y = self.up(x).softmax(dim=1)
        return self.down(y if gate is None else y * gate)


def check_calls(rank):
    torch.manual_seed(0)
    whole, x = Gated().double(), torch.randn(3, 5, 6).double()
    gate = torch.rand(3, 5, 1).double()
    model = weft.parallelize(copy.deepcopy(whole))
    assert_close(model(x), whole(x), "as it was found")
    assert_close(model(x, gate=gate), whole(x, gate=gate), "with a gate that gets no gradient")
    with pytest.raises(ValueError, match="Gated: its automatic plan .* another call than this, in which up: _softmax"):
        model(x[0])
    gate.requires_grad_()
    with pytest.raises(ValueError, match="an activation that is whole.*plan=automatic_plan"):
        model(x, gate=gate)
    model = weft.parallelize(copy.deepcopy(whole), plan=automatic_plan(whole, 2, example={"x": x, "gate": gate}))
    model(x, gate=gate).sum().backward()
    found, gate.grad = gate.grad, None
    whole(x, gate=gate).sum().backward()
    assert_close(found, gate.grad, "by a plan of such a call")


def test_a_call_in_which_the_plan_is_wrong_is_refused():
    run_ranks(check_calls, 2)


def check_use(rank):
    world = dist.get_world_size()
    for name in ("GPT2", "Llama"):
        torch.manual_seed(2)
        whole = MODELS[name]().eval()
        model = weft.parallelize(copy.deepcopy(whole), plan="auto").eval()
        tokens = torch.randint(3, 60, (2, 7))
        padded = torch.ones_like(tokens)
        padded[0, :3] = 0
        beams = {"num_beams": 2, "attention_mask": padded}
        for options in [beams] if name == "GPT2" else [{}, beams]:
            options = {"max_new_tokens": 4, "do_sample": False, **options}
            assert torch.equal(model.generate(tokens, **options), whole.generate(tokens, **options)), name
        for of_model, of_whole in zip(
            *(one(tokens, output_hidden_states=True).hidden_states for one in (model, whole)), strict=True
        ):
            torch.testing.assert_close(of_model, of_whole, rtol=1e-4, atol=1e-4)
    whole = MODELS["Llama"]().double()
    found = automatic_plan(whole, world, loss_parallel=True)
    assert found.plan["lm_head"] == "column" and found.plan["model.embed_tokens"] == "vocabulary"
    model = weft.parallelize(copy.deepcopy(whole), plan=found.plan)
    logits = model(tokens).logits
    assert logits.shape[-1] == weft.split_sizes(61, world)[rank]
    loss = weft.parallel_cross_entropy(logits, tokens)
    expected = F.cross_entropy(whole(tokens).logits.flatten(0, 1), tokens.flatten())
    assert_close(loss, expected, "loss_parallel")
    loss.backward()
    expected.backward()
    mine = weft.shard_of(model.lm_head.weight).take(whole.lm_head.weight.grad)
    assert_close(model.lm_head.weight.grad, mine, "loss_parallel: gradient")


def test_generation_hidden_states_and_split_logits():
    run_ranks(check_use, 3, timeout_s=120)


class Dropping(nn.Module):
    """Drops of what is split, by a module and by a function, and of what is whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop, self.last = nn.Linear(6, 11), nn.Linear(11, 6), nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.down(self.drop(self.up(x).relu())))


def check_dropping(rank):
    models = {
        "GPT2": of_transformers("GPT2", "LMHeadModel", **GPT2),
        "Bert": of_transformers("Bert", "ForMaskedLM", **{**ENCODER, "attention_probs_dropout_prob": 0.5}),
        "module": Dropping(),
    }
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                dist.broadcast(parameter, 0)
        model = weft.parallelize(model, plan="auto").train()
        torch.manual_seed(11)
        batch = batch_of("Bert", models["Bert"])["input_ids"] if name != "module" else torch.ones(4, 6)
        first, second = (model(batch) for _ in range(2))
        first, second = (one if name == "module" else one.logits for one in (first, second))
        assert not torch.equal(first, second), "it drops"
        ranks = [torch.empty_like(second) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, second.detach().contiguous())
        assert all(torch.equal(one, ranks[0]) for one in ranks), f"{name}: what is whole is dropped alike"
        if name == "module":
            kept = model.drop(torch.ones(64))
            dist.all_gather(others := [torch.empty(64) for _ in ranks], kept)
            assert not torch.equal(others[0], others[1]), "what is split is dropped by each rank in its own way"


def test_what_is_split_is_dropped_by_itself_and_what_is_whole_alike():
    """Three ranks with uneven parts, which draw other counts of random numbers."""
    run_ranks(check_dropping, 3)


class Norm(IntEnum):
    NONE, SOFTMAX = 0, 1


class Flagged(nn.Module):
    """Normalises over the features where an argument, a flag or a configuration says so."""

    def __init__(self):
        super().__init__()
        self.use_norm, self.calls = False, 0
        self.options = SimpleNamespace(norm="none")
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x, normalize=False, power=1):
        h = self.up(x)
        if normalize or self.use_norm or power == 7 or self.options.norm != "none":
            h = h.softmax(-1)
        return self.down(h)


def check_flags(rank):
    for plan in ("auto", {"0.up": "column", "0.down": "row"}):
        torch.manual_seed(0)
        whole = nn.Sequential(Flagged()).double()
        model = weft.parallelize(copy.deepcopy(whole), plan=plan)
        flagged, x = model[0], torch.randn(2, 6, dtype=torch.float64)
        assert_close(model(x), whole(x), "as it was found")
        for holder, name, value, before in (
            (flagged, "use_norm", True, False),
            (flagged.options, "norm", "softmax", "none"),
        ):
            setattr(holder, name, value)
            with pytest.raises(ValueError, match="softmax"):
                model(x)
            with pytest.raises(ValueError, match="softmax"):
                model(x)
            setattr(holder, name, before)
            assert_close(model(x), whole(x), "as it was")
        copied = copy.deepcopy(model)
        for one, other in ((copied, model), (model, copied)):
            one[0].options.norm = "softmax"
            with pytest.raises(ValueError, match="softmax"):
                one(x)
            assert_close(other(x), whole(x), "the copy is another model")
            one[0].options.norm = "none"
    flagged = weft.parallelize(Flagged(), plan="auto")
    x = torch.randn(2, 6)
    for power in range(5):
        assert flagged(x, power=power).shape == x.shape
    assert flagged(x, normalize=Norm.NONE).shape == x.shape
    for options in ({"normalize": True}, {"normalize": Norm.SOFTMAX}, {"power": 7}):
        for _ in range(12):
            with pytest.raises(ValueError, match="softmax"):
                flagged(x, **options)
    check, followed = next(hook for hook in flagged._forward_pre_hooks.values() if hasattr(hook, "settings")), []
    conflict = check.conflict
    check.conflict = lambda *call: followed.append(0) or conflict(*call)
    for number in range(20):
        flagged.calls = number
        assert flagged(x).shape == x.shape
    assert 5 < len(followed) < 12, "it counts, and is looked at no longer"
    flagged.use_norm = 1
    with pytest.raises(ValueError, match="softmax"):
        flagged(x)


class AskingFirst(nn.Module):
    """Cannot be followed as a whole; its block can, and was called with a sequence when the plan was found."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 9), OverTheSecond(), nn.Linear(9, 6))

    def forward(self, x):
        return self.block(x) if x.abs().max() < 1e9 else x


class OverTheSecond(nn.Module):
    def forward(self, x):
        return x - x.amax(dim=1, keepdim=True)


def check_parts(rank):
    torch.manual_seed(0)
    whole = AskingFirst().double()
    model = weft.parallelize(copy.deepcopy(whole), plan="auto")
    assert weft.shard_of(model.block[0].weight) is not None
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert_close(model(x), whole(x), "a sequence")
    with pytest.raises(ValueError, match="Sequential: its automatic plan was found by another call.*amax"):
        model(x[:, 0])


def test_the_call_of_a_part_that_was_followed_by_itself_is_followed_too():
    run_ranks(check_parts, 2)


def test_flags_and_numbers_that_decide_what_is_computed_are_followed():
    run_ranks(check_flags, 2)
