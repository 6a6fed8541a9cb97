"""The planner's models: parameters and operations as published, and what it reads."""

import json
from types import SimpleNamespace

import pytest

from weft.tools.planner import Hardware, Job, Model
from weft.tools.planner.model import presets

# Narayanan et al. 2021, table 1: billions of parameters, layers, hidden, heads.
NARAYANAN = [
    (1.7, 24, 2304, 24),
    (3.6, 30, 3072, 32),
    (7.5, 36, 4096, 32),
    (18.4, 40, 6144, 48),
    (39.1, 48, 8192, 64),
    (76.1, 60, 10240, 80),
    (145.6, 80, 12288, 96),
    (310.1, 96, 16384, 128),
    (529.6, 105, 20480, 128),
    (1008.0, 128, 25600, 160),
]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
}


def gpt(layers, hidden, heads, **more):
    sizes = dict(gated_mlp=False, tied_embeddings=True, bias=True, positions=2048, dropout=True)
    return Model(layers, hidden, 4 * hidden, heads, 51200, **(sizes | more))


@pytest.mark.parametrize(("billions", "layers", "hidden", "heads"), NARAYANAN)
def test_parameters_are_those_that_narayanan_et_al_publish(billions, layers, hidden, heads):
    model = gpt(layers, hidden, heads)
    assert round(model.parameters / 1e9, 1) == billions
    # Their equation 2, term by term, less the final norm that it leaves out.
    equation = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert model.parameters - 2 * hidden == pytest.approx(equation, rel=1e-12)


def test_operations_are_equation_3_of_narayanan_et_al():
    layers, hidden, sequence, vocab = 80, 12288, 2048, 51200
    equation = 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))
    model = gpt(layers, hidden, 96)
    assert model.flops_per_token(sequence, causal=False, recomputed=True) == pytest.approx(equation, rel=1e-12)
    # Without recomputation and attention: six for each parameter that a token is multiplied with.
    plain = model.flops_per_token(sequence, causal=False) - 12 * layers * hidden * sequence
    assert plain == 6 * (12 * layers * hidden**2 + vocab * hidden)
    half = model.flops_per_token(sequence, causal=False) - model.flops_per_token(sequence, causal=True)
    assert half == 6 * layers * hidden * sequence


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("qwen3-32b", 32_762_123_264),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_preset_has_the_parameters_of_the_published_checkpoint(name, parameters):
    assert presets()[name].parameters == parameters


def test_a_hugging_face_configuration_is_the_preset(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for source in (path, str(path), tmp_path, LLAMA, SimpleNamespace(config=SimpleNamespace(to_dict=lambda: LLAMA))):
        model = Model.of(source)
        assert model == Model(**{**vars(presets()["llama-3-8b"]), "name": model.name})
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert Model.of({**gpt2, "n_inner": None, "resid_pdrop": 0.1}) == Model(
        **{**vars(presets()["gpt2"]), "name": "gpt2"}
    )


def family(kind, layers, hidden, heads, vocab, **more):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    return {"model_type": kind, **sizes, **more}


@pytest.mark.parametrize(
    ("config", "billions"),
    [  # What the models' names or cards say.
        (family("falcon", 32, 4544, 71, 65024, multi_query=True), 6.92),
        (family("falcon", 60, 8192, 128, 65024, num_kv_heads=8, new_decoder_architecture=True), 41.3),
        ({"model_type": "gpt_neo", "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257,
          "max_position_embeddings": 2048}, 1.32),
        (family("gemma3_text", 26, 1152, 4, 262144, intermediate_size=6912, num_key_value_heads=1, head_dim=256), 1.0),
        (family("opt", 24, 2048, 32, 50272, ffn_dim=8192, max_position_embeddings=2048, word_embed_proj_dim=2048), 1.32),
        (family("phi3", 32, 3072, 32, 32064, intermediate_size=8192), 3.82),
        (family("qwen2", 24, 896, 14, 151936, intermediate_size=4864, num_key_value_heads=2, tie_word_embeddings=True),
         0.494),
        ({"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}, 176.2),
        # What these leave out is not hidden / heads, nor as many key-value heads as heads, nor an output layer.
        (family("cohere", 40, 8192, 64, 256000, intermediate_size=22528, num_key_value_heads=64), 34.98),
        (family("mistral", 32, 4096, 32, 32000, intermediate_size=14336), 7.24),
        (family("gemma2", 26, 2304, 8, 256000, intermediate_size=9216), 2.614),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
          "intermediate_size": 10240, "num_hidden_layers": 34}}, 3.88),
        (family("starcoder2", 30, 3072, 24, 49152, intermediate_size=12288), 3.03),
        (family("granite", 40, 4096, 32, 49155, intermediate_size=12800, num_key_value_heads=8,
                tie_word_embeddings=True), 8.17),
    ],
)  # fmt: skip
def test_families_have_the_parameters_that_they_are_known_for(config, billions):
    assert Model.of(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [  # as the models' cards say
        (family("mixtral", 32, 4096, 32, 32000, intermediate_size=14336), 46.7, 12.9),
        (family("mixtral", 56, 6144, 48, 32768, intermediate_size=16384), 141, 39),
        (family("qwen3_moe", 94, 4096, 64, 151936, head_dim=128, moe_intermediate_size=1536, intermediate_size=12288,
                mlp_only_layers=[], decoder_sparse_step=1), 235, 22.2),
        (family("qwen2_moe", 24, 2048, 16, 151936, num_key_value_heads=16, moe_intermediate_size=1408,
                shared_expert_intermediate_size=5632, num_experts=60, intermediate_size=5632), 14.3, 2.7),
        (family("olmoe", 16, 2048, 16, 50304, intermediate_size=1024, num_experts=64), 6.92, 1.28),
        (family("unheard-of", 16, 2048, 16, 50304, num_experts=64, num_experts_per_tok=8, intermediate_size=9999,
                moe_intermediate_size=1024, gated_mlp=True), 6.92, 1.28),
    ],
)  # fmt: skip
def test_mixtures_have_the_parameters_that_they_are_known_for(config, billions, active):
    model = Model.of(config)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    embedding = model.vocab * model.hidden
    vectors = model.layers * model.vectors_per_layer(model.qkv_width, model.mlp_width) + model.final_norm
    products = model.active_parameters - embedding - vectors
    attention = 6 * model.layers * model.heads * model.head_dim * 4096
    assert model.flops_per_token(4096, causal=True) == 6 * products + attention


def test_missing_fields_are_named():
    lacking = {key: value for key, value in LLAMA.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(
        ValueError, match=r"lacks hidden \(hidden_size or n_embd or n_embed or d_model\), vocab \(vocab_size\)"
    ):
        Model.of(lacking)
    with pytest.raises(
        ValueError, match=r"lacks gated_mlp \(whether the MLP has a gate, true or false: model_type 'unheard-of' is not"
    ):
        Model.of({**LLAMA, "model_type": "unheard-of"})
    assert Model.of({**LLAMA, "model_type": "unheard-of", "gated_mlp": True}).gated_mlp


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("llama-9", ValueError, "'llama-9' is neither a file nor one of gpt2, .*llama-3-8b"),
        ({**LLAMA, "num_local_experts": 8}, ValueError, r"lacks experts_per_token \(num_experts_per_tok\)"),
        ({**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 9}, ValueError, "experts_per_token=9 must be from 1"),
        (
            {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
            ValueError,
            r"first_k_dense_replace=1 \(experts in some layers only\): the planner computes",
        ),
        ({**LLAMA, "num_key_value_heads": 7}, ValueError, "kv_heads=7 does not divide heads=32"),
        ({**LLAMA, "hidden_size": 0}, ValueError, "hidden=0 must be a whole number of at least 1"),
        ({**LLAMA, "hidden_size": True}, ValueError, "hidden=True must be a whole number"),
        ({**LLAMA, "hidden_size": "4096"}, ValueError, "hidden='4096' must be a whole number"),
        (
            {**LLAMA, "hidden_size": 4100},
            ValueError,
            "hidden=4100 is not a multiple of heads=32; say how wide a head is",
        ),
        ({**LLAMA, "num_key_value_heads": -4}, ValueError, "kv_heads=-4 must be a whole number of at least 0"),
        ({**LLAMA, "num_key_value_heads": "8"}, ValueError, "kv_heads='8' must be a whole number"),
        ({**LLAMA, "num_experts": "eight", "num_experts_per_tok": 2}, ValueError, "experts='eight' must be a whole"),
        ({**LLAMA, "kv_lora_rank": 512}, ValueError, r"kv_lora_rank=512 \(latent attention\): the planner computes"),
        (
            {**LLAMA, "is_encoder_decoder": True},
            ValueError,
            "is_encoder_decoder: the planner computes decoder-only transformers",
        ),
        ({**LLAMA, "model_type": "bert"}, ValueError, "bert is an encoder, whose attention is not causal"),
        ({**LLAMA, "model_type": "vit"}, ValueError, "vit is of images"),
        ({**LLAMA, "word_embed_proj_dim": 512}, ValueError, "word_embed_proj_dim=512 is not hidden_size=4096"),
        ({**LLAMA, "tie_word_embeddings": "false"}, ValueError, "tie_word_embeddings='false' must be true or false"),
        ({**LLAMA, "add_cross_attention": True}, ValueError, "add_cross_attention: the planner computes"),
        ({**family("gpt2", 12, {}, 12, 50257), "n_positions": 1024}, ValueError, r"lacks intermediate \("),
        (
            family("opt", 24, 2048, 32, 50272, ffn_dim=8192),
            ValueError,
            r"lacks positions \(n_positions or max_position",
        ),
        (3, TypeError, "and not a int"),
    ],
)
def test_a_model_that_cannot_be_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        Model.of(source)


MACHINE = {
    "weft_hardware": 2,
    "name": "laptop",
    "memory_gib": 16,
    "peak_tflops": {"fp32": 0.1},
    "memory_gb_s": 20,
    "node_gb_s": 5,
    "network_gb_s": 0.1,
    "full_speed_ranks": 2,
}


def test_a_measured_machine_is_taken_as_measured(tmp_path):
    path = tmp_path / "hw.json"
    path.write_text(json.dumps(MACHINE))
    hardware = Hardware.of(path)
    assert (hardware.name, hardware.memory_bytes, hardware.full_speed_ranks) == ("laptop", 16 * 2**30, 2)
    assert (hardware.memory_bytes_s, hardware.node_bytes_s) == (20e9, 5e9)
    assert dict(hardware.peak_flops) == {"fp32": 1e11}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weft_hardware": 1}, "weft_hardware is 1, and this weft reads version 2: measure again"),
        ({"weft_hardware": None}, "weft_hardware is None"),
        ({"memory_gb_s": 0}, "memory_gb_s=0 must be a positive number"),
        ({"node_gb_s": "fast"}, "node_gb_s='fast' must be a positive number"),
        ({"peak_tflops": 3}, "peak_tflops=None must be a positive number"),
        ({"devices_per_node": 0}, "devices_per_node=0 must be a positive number"),
        ({"full_speed_ranks": 1.5}, "full_speed_ranks=1.5 must be a whole number"),
        ({"launch_us": float("nan")}, "launch_us=nan must be a number"),
        ({"memory_gib": 10**400}, "memory_gib=1000.* must be a positive number"),
        ({"memory_gbs": 3}, "memory_gbs: no such field; there are memory_gib, memory_gb_s"),
    ],
)
def test_another_hardware_file_is_refused_by_what_is_wrong_with_it(tmp_path, change, message):
    path = tmp_path / "hw.json"
    path.write_text(json.dumps(MACHINE | change))
    with pytest.raises(ValueError, match=message):
        Hardware.of(path)


def test_a_hardware_file_that_lacks_fields_names_them(tmp_path):
    path = tmp_path / "hw.json"
    path.write_text('{"weft_hardware": 2, "memory_gib": 3, "memory_gb_s": 3}')
    with pytest.raises(ValueError, match="lacks node_gb_s, network_gb_s, peak_tflops"):
        Hardware.of(path)
    for text in ("not json", "[" * 100_000):
        path.write_text(text)
        for read in (Hardware.of, Model.of):
            with pytest.raises(ValueError, match="is not JSON"):
                read(path)


def test_a_job_names_what_it_does_not_know():
    model, hardware = Model.of("gpt2"), Hardware.of("v100")
    with pytest.raises(ValueError, match="v100-32gb has no rate for bf16; it has fp32, fp16"):
        Job(model, hardware, 1024, 8)
    with pytest.raises(ValueError, match="optimizer='adagrad' is not one of adamw, adam"):
        Job(model, hardware, 1024, 8, "fp16", "adagrad")
    with pytest.raises(ValueError, match="global_batch=0 must be at least 1"):
        Job(model, hardware, 1024, 0, "fp16")
