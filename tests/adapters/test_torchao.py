"""Weights that torchao has quantised: cut with their scales, the tokens and the adapters' gradients of the whole model."""

import json
import shutil
import warnings

import pytest
import torch
from read_sizes import read_sizes

import weft
from weft.sharding.quantized import is_quantized, numbers_in, pick_quantized, values_of
from weft.tensor_parallel.auto import automatic_plan
from weft.testing.ranks import run_ranks

torchao = pytest.importorskip("torchao", reason="torchao is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from torchao.quantization import (  # noqa: E402
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup, PerTensor  # noqa: E402

GROUP = 16
KINDS = {
    "int8": Int8WeightOnlyConfig,
    "float8": Float8WeightOnlyConfig,
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
}
SIZES = dict(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def quantized(kind, family="Llama", dtype=torch.float32):
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # scores far apart
    quantize_(model, KINDS[kind]())
    return model


def tokens_of(seed=1):
    return torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(seed))


def check_tokens(rank, kind, family, split_layers):
    warnings.simplefilter("ignore")
    whole, split = quantized(kind, family), weft.parallelize(quantized(kind, family))
    weights = [x for x in split.parameters() if is_quantized(x)]
    assert sum(weft.shard_of(x) is not None for x in weights) == split_layers
    for name, part in split.named_parameters():
        if is_quantized(part) and (shard := weft.shard_of(part)) is not None:
            assert torch.equal(values_of(part), shard.take(values_of(whole.get_parameter(name))))
    options = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(split.generate(tokens_of(), **options), whole.generate(tokens_of(), **options))
    result, expected = split(tokens_of()).logits, whole(tokens_of()).logits
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_generate_the_tokens_of_the_whole_quantised_model(kind):
    run_ranks(check_tokens, 2, kind, "Llama", 14)


@pytest.mark.slow("pytorch_ext/tensor_parallel", "pytorch_ext/sharding", "pytorch_ext/nn")
@pytest.mark.parametrize(("world", "family", "split_layers"), [(4, "Llama", 14), (2, "Phi3", 8)])
def test_more_ranks_and_fused_layers_generate_the_same(world, family, split_layers):
    for kind in KINDS:
        run_ranks(check_tokens, world, kind, family, split_layers, timeout_s=120)


def check_uneven(rank):
    """Three ranks would cut groups of 16 of 64 columns at 22: these layers stay whole."""
    warnings.simplefilter("ignore")
    model = quantized("int4")
    found = automatic_plan(model, world=3)
    reasons = {reason for name, reason in found.whole.items() if "layers" in name}
    assert "3 ranks would cut its quantised groups of 16 columns" in reasons
    assert not any("layers" in name for name in found.plan)
    plan = {"**.up_proj": "column", "**.gate_proj": "column", "**.down_proj": "row"}
    with pytest.raises(ValueError, match="in groups of 16 cannot be cut at 43 of dimension 1"):
        weft.parallelize(model, plan=plan)
    assert all(weft.shard_of(x) is None for x in model.parameters())
    check_tokens(rank, "int4", "Llama", 0)


def test_a_layer_whose_groups_would_be_cut_stays_whole_with_the_reason():
    run_ranks(check_uneven, 3)


def trained(model):
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    for step in range(3):
        tokens = tokens_of(step)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model


def with_adapter(model, dora):
    torch.manual_seed(5)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", use_dora=dora)
    return peft.get_peft_model(model, config)


def check_adapters(rank, kind, dora, folder):
    warnings.simplefilter("ignore")
    whole = trained(with_adapter(quantized(kind), dora))
    for order in ("peft first", "split first"):
        first = order == "peft first"
        split = (
            weft.parallelize(with_adapter(quantized(kind), dora))
            if first
            else with_adapter(weft.parallelize(quantized(kind)), dora)
        )
        parts = 0
        for name, parameter in trained(split).named_parameters():
            if parameter.requires_grad:
                shard, expected = weft.shard_of(parameter), whole.get_parameter(name).grad
                expected = expected if shard is None else shard.take(expected)
                error = (parameter.grad - expected).abs().max() / expected.abs().max()
                assert error < 1e-3, f"gradient of {name}"
                parts += shard is not None
        assert parts >= 14
        with pytest.raises(ValueError, match="merging needs the whole quantised weight"):
            split.merge_adapter()
        split.save_pretrained(folder / order)
    loaded = peft.PeftModel.from_pretrained(quantized(kind), folder / "split first")
    torch.testing.assert_close(loaded(tokens_of()).logits, split(tokens_of()).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "dora"), [("int4", False)])
def test_adapters_of_quantised_layers_train_as_the_whole_models(kind, dora, tmp_path):
    run_ranks(check_adapters, 2, kind, dora, tmp_path, timeout_s=120)


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/sharding")
@pytest.mark.parametrize(("kind", "dora"), [("int8", True), ("float8", False), ("int4", True)])
def test_other_kinds_and_dora_train_as_the_whole_models(kind, dora, tmp_path):
    run_ranks(check_adapters, 2, kind, dora, tmp_path, timeout_s=120)


def check_refused(rank, folder):
    warnings.simplefilter("ignore")
    split = weft.parallelize(quantized("int8"))
    for save in (lambda: weft.save_checkpoint(split, None, folder), lambda: weft.full_state_dict(split)):
        with pytest.raises(TypeError, match="q_proj.weight is quantised.*save its adapter"):
            save()
    with pytest.raises(ValueError, match="q_proj.weight' is quantised"):
        weft.DataParallel(quantized("int8"))


def test_checkpoints_and_replicas_of_quantised_weights_are_refused(tmp_path):
    run_ranks(check_refused, 2, tmp_path)


def test_one_scale_for_the_whole_weight_stays_one_in_a_cut_of_several_parts():
    linear = torch.nn.Linear(64, 24)
    quantize_(linear, Int8WeightOnlyConfig(granularity=PerTensor()))
    weight, stretches = linear.weight.detach(), [(3, 9), (17, 24)]
    expected = torch.cat([values_of(weight)[start:stop] for start, stop in stretches])
    assert torch.equal(values_of(pick_quantized(weight, 0, stretches)), expected)


def check_quantised_inputs(rank):
    warnings.simplefilter("ignore")
    KINDS["dynamic int8"] = Int8DynamicActivationInt8WeightConfig
    found = automatic_plan(quantized("dynamic int8"), world=2)
    assert "torchao also quantises its input" in found.whole.values()
    with pytest.raises(ValueError, match="torchao also quantises its input: leave the layer out of the plan"):
        weft.parallelize(quantized("dynamic int8"), plan={"**.up_proj": "column", "**.down_proj": "row"})
    check_tokens(rank, "dynamic int8", "Llama", 0)


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/tensor_parallel")
def test_layers_whose_inputs_are_quantised_too_stay_whole():
    run_ranks(check_quantised_inputs, 2)


class Linear4bit(torch.nn.Linear):
    """Stand-in for another quantiser's layer, bitsandbytes' say: its weight is packed bytes without [out, in]."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        scaled = (layer.weight.detach() / layer.weight.abs().max() * 7).round().add(8).to(torch.uint8)
        low, high = scaled.flatten()[::2], scaled.flatten()[1::2]
        self.scale = layer.weight.detach().abs().max() / 7
        self.weight = torch.nn.Parameter((low + 16 * high)[:, None], requires_grad=False)

    def forward(self, x):
        bytes = self.weight.flatten()
        numbers = torch.stack([bytes % 16, bytes // 16], 1).view(self.out_features, self.in_features)
        return torch.nn.functional.linear(x, (numbers.to(x.dtype) - 8) * self.scale)


def check_other_quantiser(rank):
    warnings.simplefilter("ignore")

    def packed():
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
        for name, layer in list(model.named_modules()):
            if type(layer) is torch.nn.Linear and name != "lm_head":
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, Linear4bit(layer))
        return model

    model, whole = packed(), packed()
    assert "there is no style for Linear4bit" in automatic_plan(model, world=2).whole.values()
    with pytest.raises(TypeError, match="up_proj is Linear4bit; style 'column' takes nn.Linear itself"):
        weft.parallelize(model, plan={"**.up_proj": "column", "**.down_proj": "row"})
    assert all(weft.shard_of(x) is None for x in model.parameters())
    split = weft.parallelize(model)
    assert weft.shard_of(split.model.embed_tokens.weight) is not None
    options = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(split.generate(tokens_of(), **options), whole.generate(tokens_of(), **options))


@pytest.mark.slow("pytorch_ext/adapters", "pytorch_ext/tensor_parallel")
def test_layers_of_another_quantiser_stay_whole_with_the_reason():
    run_ranks(check_other_quantiser, 2)


def save_quantised(kind, folder):
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    options = {"quantization_config": transformers.TorchAoConfig(KINDS[kind]())}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="40KB")


def check_folder(rank, kind, folder, trains):
    warnings.simplefilter("ignore")
    with read_sizes() as read:
        model = weft.from_pretrained(folder)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = (part for x in model.parameters() for part in (numbers_in(x) if is_quantized(x) else [("", x)]))
    assert sum(read) == sum(part.numel() * part.element_size() for _, part in plain)
    for name, part in model.named_parameters():
        shard, expected = weft.shard_of(part), whole.get_parameter(name)
        assert is_quantized(part) == is_quantized(expected)
        expected = values_of(expected)
        assert torch.equal(values_of(part), expected if shard is None else shard.take(expected)), name
    options = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(tokens_of(), **options), whole.generate(tokens_of(), **options))
    if trains:
        split, whole = trained(with_adapter(model, False)), trained(with_adapter(whole, False))
        torch.testing.assert_close(split(tokens_of()).logits, whole(tokens_of()).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_folder_has_the_tokens_of_the_whole_model_on_any_ranks(kind, tmp_path):
    save_quantised(kind, tmp_path)
    run_ranks(check_folder, 2, kind, tmp_path, True, timeout_s=120)


@pytest.mark.slow("pytorch_ext/pretrained.py", "pytorch_ext/sharding", "pytorch_ext/checkpoint")
@pytest.mark.parametrize("world", [1, 4])
def test_other_numbers_of_ranks_load_a_quantised_folder(world, tmp_path):
    for kind in KINDS:
        save_quantised(kind, tmp_path / kind)
        run_ranks(check_folder, world, kind, tmp_path / kind, False, timeout_s=120)


def check_folders_refused(rank, folder):
    warnings.simplefilter("ignore")
    for name, kind, message in (
        ("without a scale", ValueError, "q_proj.weight is quantised, and .*q_proj._weight_scale is not stored"),
        ("plain", weft.CheckpointError, "names torchao, and the files have no metadata of torchao"),
        ("of another size", weft.CheckpointError, "down_proj.weight is .32, 128. in the model, .64, 128. stored"),
        ("unknown", ValueError, "Unsupported tensor type: Int3Tensor"),
    ):
        with pytest.raises(kind, match=message):
            weft.from_pretrained(folder / name)
    with pytest.raises(ValueError, match="stands for torch.float32, so dtype=torch.bfloat16 would mix types"):
        weft.from_pretrained(folder / "unchanged", dtype=torch.bfloat16)
    with pytest.raises(weft.CheckpointError, match="model.embed_tokens.weight is not stored"):
        weft.load_safetensors(weft.from_pretrained(folder / "unchanged"), folder / "without the embedding")


def test_quantised_folders_that_do_not_fit_are_refused_on_every_rank(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    save_quantised("int8", tmp_path / "unchanged")
    with_index = json.loads((tmp_path / "unchanged" / "model.safetensors.index.json").read_text())["weight_map"]
    stored, metadata = {}, {}
    for file in set(with_index.values()):
        with safe_open(tmp_path / "unchanged" / file, "pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata |= opened.metadata()
    first = "model.layers.0.self_attn.q_proj"
    lacking = {name: x for name, x in stored.items() if name != f"{first}._weight_scale"}
    headless = {name: x for name, x in stored.items() if "embed" not in name}
    unknown = metadata | {f"{first}.weight": metadata[f"{first}.weight"].replace("Int8Tensor", "Int3Tensor")}
    config = json.loads((tmp_path / "unchanged" / "config.json").read_text())
    for name, tensors, heads, changes in (
        ("without a scale", lacking, metadata, {}),
        ("without the embedding", headless, metadata, {}),
        ("plain", stored, None, {}),
        ("unknown", stored, unknown, {}),
        ("of another size", stored, metadata, {"hidden_size": 32}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", heads)
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **changes}))
    run_ranks(check_folders_refused, 2, tmp_path)


def test_a_cut_of_rows_and_groups_has_the_values_of_the_whole():
    linear = torch.nn.Linear(64, 24)
    quantize_(linear, KINDS["int4"]())
    weight = linear.weight.detach()
    for dim, stretches in ((0, [(3, 9), (17, 24)]), (1, [(16, 48)]), (1, [(48, 64)])):
        whole = values_of(weight)
        expected = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in stretches], dim)
        assert torch.equal(values_of(pick_quantized(weight, dim, stretches)), expected)
    with pytest.raises(ValueError, match="in groups of 16 cannot be cut at 8 of dimension 1"):
        pick_quantized(weight, 1, [(8, 16)])
