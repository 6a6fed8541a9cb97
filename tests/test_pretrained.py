"""from_pretrained: the model of a folder; no rank reads or holds more than its part."""

import json
from functools import partial

import pytest
import torch
from read_sizes import read_sizes

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
    eos_token_id=2,
)
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)


def of_transformers(config, head="ForCausalLM", **options):
    torch.manual_seed(3)
    return getattr(transformers, f"{config}{head}")(getattr(transformers, f"{config}Config")(**options)).eval()


FAMILIES = {
    "Llama": partial(of_transformers, "Llama", **SIZES),
    "Gemma2": partial(of_transformers, "Gemma2", **SIZES, head_dim=8, query_pre_attn_scalar=8),
    "Phi3": partial(of_transformers, "Phi3", **SIZES),
    "GPT2": partial(of_transformers, "GPT2", "LMHeadModel", **GPT2),
    "Mixtral": partial(of_transformers, "Mixtral", **{**SIZES, "intermediate_size": 48}, num_local_experts=4),
    "Bert": partial(
        of_transformers,
        "Bert",
        "ForSequenceClassification",
        **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        num_attention_heads=4,
    ),
}
TOKENS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(7))


def check_family(rank, name, folder):
    model = weft.from_pretrained(folder / name)
    expected = FAMILIES[name]()
    with torch.no_grad():
        result, output = model(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits
    assert (result - output).abs().max() < 1e-5 * output.abs().max().clamp(min=1), name
    assert type(model) is type(expected) and not model.training
    if name == "Phi3":
        half = weft.from_pretrained(folder / name, dtype=torch.bfloat16)
        assert {x.dtype for x in half.parameters()} == {torch.bfloat16}


def check_families(rank, names, folder):
    for name in names:
        check_family(rank, name, folder)


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["Llama", "GPT2", "Phi3"]),
        pytest.param(2, ["Gemma2", "Mixtral", "Bert"], marks=pytest.mark.slow("pytorch_ext", "pytorch_ext/checkpoint")),
        pytest.param(3, ["GPT2", "Bert"], marks=pytest.mark.slow("pytorch_ext", "pytorch_ext/checkpoint")),
    ],
)
def test_the_model_computes_as_that_of_transformers(world, names, tmp_path):
    for number, name in enumerate(names):
        size = "20KB" if number % 2 else "1GB"
        FAMILIES[name]().save_pretrained(tmp_path / name, max_shard_size=size, save_original_format=name != "Mixtral")
    run_ranks(check_families, world, names, tmp_path, timeout_s=120)


LARGE = {**SIZES, "vocab_size": 999, "hidden_size": 256, "intermediate_size": 702, "num_hidden_layers": 4}


def check_memory(rank, folder, whole_bytes, largest):
    with read_sizes() as read:
        model = weft.from_pretrained(folder)
    held = sum(x.untyped_storage().nbytes() for x in model.parameters())
    assert sum(read) == held < 0.52 * whole_bytes
    assert max(read) <= largest / 2 + 4 * 999


def test_a_rank_reads_and_holds_its_part_alone_one_tensor_at_a_time(tmp_path):
    whole = of_transformers("Llama", **LARGE)
    whole.save_pretrained(tmp_path, max_shard_size="2MB")
    bytes_of = [x.numel() * x.element_size() for x in whole.parameters()]
    run_ranks(check_memory, 2, tmp_path, sum(bytes_of), max(bytes_of))


def check_sharded(rank, name, sizes, folder):
    mesh = weft.init_mesh(**sizes, device_type="cpu")
    with read_sizes() as read:
        model = weft.from_pretrained(folder, mesh, zero=3)
    world = sizes["dp"] * sizes.get("tp", 1)
    whole = sum(x.nbytes for x in FAMILIES[name]().parameters())
    assert sum(read) == sum(x.to_local().nbytes for x in model.parameters())
    assert name != "Llama" or sum(read) < 1.1 * whole / world
    expected = FAMILIES[name]()  # without dropout
    tokens = TOKENS[mesh["dp"].get_local_rank() :][:1]
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected(input_ids=TOKENS, labels=TOKENS).loss.backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, expected)]
    assert torch.allclose(*(norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms), 1e-4)
    model.save_pretrained(folder / "again")
    if rank == 0:
        state = type(expected).from_pretrained(folder / "again").state_dict()
        assert all(torch.equal(x, state[key]) for key, x in FAMILIES[name]().state_dict().items())


@pytest.mark.parametrize(
    ("name", "sizes"), [("Llama", {"dp": 2, "tp": 2}), ("GPT2", {"dp": 2})], ids=["a part of a part", "tied weights"]
)
def test_with_zero_a_rank_reads_and_holds_its_part_of_its_part(name, sizes, tmp_path):
    FAMILIES[name]().save_pretrained(tmp_path)
    run_ranks(check_sharded, sizes["dp"] * sizes.get("tp", 1), name, sizes, tmp_path)


def refused(kind, message, *args, **options):
    with pytest.raises(kind, match=message):
        weft.from_pretrained(*args, **options)


def check_mistakes(rank, folder):
    refused(weft.CheckpointError, "there is no such folder", folder / "nothing")
    refused(weft.CheckpointError, "model-0000.*safetensors is missing", folder / "missing")
    refused(weft.CheckpointError, "is torn or was altered", folder / "torn")
    refused(weft.CheckpointError, "the folder has none of these", folder / "empty")
    refused(weft.CheckpointError, "config.json cannot be read", folder / "half")
    refused(weft.CheckpointError, "q_proj.weight is F32 .*64. in the model, F32 .32, 32. stored", folder / "other")
    refused(
        weft.CheckpointError, "experts.down_proj is not stored(.|\n)*save_original_format=False", folder / "renamed"
    )
    refused(ValueError, "are quantised .bitsandbytes.", folder / "quantised")
    refused(
        ValueError,
        "the mesh has dp=2; it takes tp and cp, and dp with zero=3",
        folder / "whole",
        weft.init_mesh(dp=2, device_type="cpu"),
    )


def test_folders_that_cannot_be_read_are_refused_on_every_rank(tmp_path):
    model = FAMILIES["Llama"]()
    FAMILIES["Mixtral"]().save_pretrained(tmp_path / "renamed")
    for name in ("whole", "missing", "torn", "empty", "half", "other", "quantised"):
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
    (tmp_path / "missing" / sorted(x.name for x in (tmp_path / "missing").glob("model-*"))[1]).unlink()
    torn = sorted((tmp_path / "torn").glob("model-*"))[1]
    torn.write_bytes(torn.read_bytes()[:-40])
    for file in (tmp_path / "empty").glob("*.safetensors*"):
        file.unlink()
    half = tmp_path / "half" / "config.json"
    half.write_text(half.read_text()[:50])
    for name, changes in (
        ("other", {"hidden_size": 64}),
        ("quantised", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
    ):
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    run_ranks(check_mistakes, 2, tmp_path)


def from_the_hub(rank, cache, folder):
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_CACHE = str(cache)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    model = weft.from_pretrained("somebody/tiny", weft.init_mesh(tp=2, device_type="cpu"))
    expected = weft.from_pretrained(folder, weft.init_mesh(tp=2, device_type="cpu"))
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    refused(weft.CheckpointError, "huggingface_hub.snapshot_download.'somebody/other'. fetches", "somebody/other")


def test_a_name_of_the_hub_is_found_where_huggingface_hub_keeps_it(tmp_path):
    kept = tmp_path / "hub" / "models--somebody--tiny"
    folder = kept / "snapshots" / "0123"
    FAMILIES["Llama"]().save_pretrained(folder)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    run_ranks(from_the_hub, 2, tmp_path / "hub", folder)
