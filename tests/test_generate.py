"""`generate` of a split model gives the plain model's tokens on every rank, in every way of transformers."""

import copy
from functools import partial

import pytest
import torch
import torch._dynamo  # once, and not in every rank

import weft
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=46,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=None)


def of_transformers(config, head="ForCausalLM", **options):
    torch.manual_seed(3)
    model = getattr(transformers, f"{config}{head}")(getattr(transformers, f"{config}Config")(**options))
    for parameter in model.parameters():  # so that tokens differ
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model.double().eval()


FAMILIES = {
    "Llama": partial(of_transformers, "Llama", **SIZES),
    "GPT2": partial(of_transformers, "GPT2", "LMHeadModel", **GPT2, pad_token_id=0),
    "Gemma2": partial(of_transformers, "Gemma2", **SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=5),
    "Mistral": partial(of_transformers, "Mistral", **SIZES, head_dim=8, sliding_window=6),
}
TOKENS = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(7))
PADDED = torch.ones_like(TOKENS)
PADDED[1, :3] = PADDED[2, :5] = 0
WAYS = {
    "greedy": {},
    "greedy, padded": {"attention_mask": PADDED},
    "without a cache": {"use_cache": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 30, "top_p": 0.95},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static", "attention_mask": PADDED},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


class Collected(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def generated(model, tokens=TOKENS, **options):
    torch.manual_seed(11)
    return model.generate(tokens, max_new_tokens=9, **options)


def check_family(rank, name):
    plain = FAMILIES[name]()
    split = weft.parallelize(copy.deepcopy(plain))
    seen = set()
    for way, options in WAYS.items():
        result, expected = generated(split, **options), generated(plain, **options)
        assert torch.equal(result, expected), f"{name}, {way}: {result.tolist()} {expected.tolist()}"
        seen.add(str(expected.tolist()))
    assert len(seen) > 4, "the ways give different tokens"
    streamer = Collected()
    output = generated(split, TOKENS[:1], streamer=streamer)
    assert streamer.ended and streamer.tokens == output[0].tolist()
    helper = FAMILIES[name]()
    assert torch.equal(generated(split, TOKENS[:1], assistant_model=helper), generated(plain, TOKENS[:1]))
    scores = generated(split, output_scores=True, output_logits=True, return_dict_in_generate=True)
    whole = generated(plain, output_logits=True, return_dict_in_generate=True)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(scores.logits, whole.logits, strict=True))


@pytest.mark.parametrize(
    "name", ["Llama", *(pytest.param(n, marks=pytest.mark.slow("pytorch_ext")) for n in [*FAMILIES][1:])]
)
def test_every_way_of_generating_gives_the_plain_models_tokens(name):
    run_ranks(check_family, 2, name, timeout_s=120)


def check_compiled(rank):
    plain = FAMILIES["Llama"]()
    split = weft.parallelize(copy.deepcopy(plain))
    how = transformers.CompileConfig(backend="aot_eager", fullgraph=False, mode=None)
    how._compile_all_devices = True  # transformers compiles on GPUs otherwise
    torch._dynamo.utils.counters.clear()
    options = {"cache_implementation": "static", "attention_mask": PADDED}
    result = generated(split, compile_config=how, **options)
    assert torch.equal(result, generated(plain, disable_compile=True, **options))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 5


@pytest.mark.slow("pytorch_ext", "pytorch_ext/tensor_parallel")
def test_compiled_decoding_gives_the_plain_models_tokens():
    run_ranks(check_compiled, 2, timeout_s=180)


def check_stages(rank, sizes):
    plain = FAMILIES["Llama"]()
    split = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(**sizes, device_type="cpu"))
    for way, options in WAYS.items():
        if way != "static cache":
            assert torch.equal(generated(split, **options), generated(plain, **options)), way
    streamer = Collected()
    assert generated(split, TOKENS[:1], streamer=streamer)[0].tolist() == streamer.tokens
    for options in ({"use_cache": True}, {"cache_implementation": "static", "use_cache": True}):
        with pytest.raises(ValueError, match="call the model with use_cache=False"):
            generated(split, **options)
    tokens = torch.ones(1, 2, dtype=torch.long)
    assert torch.equal(split(tokens, use_cache=False).logits, plain(tokens).logits) or "tp" in sizes
    with pytest.raises(TypeError, match="the model has no generate"):
        weft.LayerSplit(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), ["cpu"]).generate(tokens)
    assert torch.equal(generated(weft.LayerSplit(FAMILIES["Llama"](), ["cpu", "cpu"])), generated(plain))


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, {"pp": 2}), pytest.param(4, {"pp": 2, "tp": 2}, marks=pytest.mark.slow("pytorch_ext/pipeline"))],
)
def test_layers_on_several_ranks_generate_the_plain_models_tokens(world, sizes):
    run_ranks(check_stages, world, sizes, timeout_s=120)


def check_stages_of_a_pair(rank):
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    torch.manual_seed(0)
    plain = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    split = weft.LayerSplit(copy.deepcopy(plain), weft.init_mesh(pp=2, device_type="cpu"))
    tokens = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(generated(split, tokens), generated(plain, tokens))


def test_an_encoder_and_its_decoder_on_several_ranks_generate_the_plain_models_tokens():
    run_ranks(check_stages_of_a_pair, 2, timeout_s=120)


def check_with_adapter(rank):
    peft = pytest.importorskip("peft")
    plain = FAMILIES["Llama"]()
    split = copy.deepcopy(plain)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    models = []
    for model in (plain, weft.parallelize(split)):
        torch.manual_seed(5)
        models.append(peft.get_peft_model(model, config).double().eval())
    result, expected = (generated(model, num_beams=2) for model in reversed(models))
    assert torch.equal(result, expected)
    with models[0].disable_adapter():
        assert not torch.equal(expected, generated(models[0], num_beams=2))


def test_a_model_with_an_adapter_generates_too():
    run_ranks(check_with_adapter, 2)
