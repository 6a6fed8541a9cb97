"""The enumeration of transformers' families: each is built small, planned and compared with the unsplit model."""

import importlib

import families
import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SAMPLE = ["clip", "llava", "whisper", "bloom", "qwen2_vl"]
PIPELINES = ["qwen2_vl", "whisper", "bloom"]


@pytest.fixture(scope="module", autouse=True)
def _import_models():
    for family in SAMPLE:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_has_at_most_six_tenths_of_its_parameters_on_a_rank_and_is_right(family):
    row = families.row_in_a_process(family, checked=True, timeout_s=120)
    assert "failed" not in row, row
    assert row["share"] <= 0.6 and row["error"] < 1e-9 and row["type"] == "torch.float64", row


@pytest.mark.parametrize("family", PIPELINES)
def test_a_pipeline_of_a_family_has_the_loss_and_the_gradients_of_the_plain_model(family):
    row = families.row_in_a_process(family, checked=False, timeout_s=120, pipeline=True)
    assert "failed" not in row, row
    assert row["share"] < 0.8 and row["error"] < 1e-9 and row["type"] == "torch.float64", row


def test_a_gradient_that_a_pipeline_loses_is_noticed(monkeypatch):
    monkeypatch.setattr("weft.pipeline.tied_params.Ties.sum", lambda ties: None)
    row = families.row_in_a_process("bloom", checked=False, timeout_s=120, pipeline=True)
    assert row["error"] > 1e-3 and row["of"].endswith("word_embeddings.weight"), row


def test_numbers_are_made_small_alike():
    numbers = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "layer_types": ["sliding"] * 5 + ["full"] + ["sliding"] * 26,
        "vocab_size": 128256,
        "pad_token_id": 128001,
        "attention_dropout": 0.1,
        "vision_config": {"depths": [2, 2, 6, 2], "hidden_sizes": [96, 192, 384, 768], "num_heads": [3, 6, 12, 24]},
    }
    small = families.small(numbers)
    assert small["hidden_size"] == small["num_attention_heads"] * 16 == 64
    assert small["num_key_value_heads"] == 2 and small["attention_dropout"] == 0.0
    assert small["layer_types"] == ["sliding", "full"] and small["num_hidden_layers"] == 2
    assert small["pad_token_id"] < small["vocab_size"] == 256
    assert small["vision_config"] == {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [32, 64, 128, 256],
        "num_heads": [2, 4, 8, 16],
    }


def test_a_family_that_hangs_or_dies_has_a_row(monkeypatch):
    monkeypatch.setattr(families, "row_of", lambda *_: families.time.sleep(60))
    assert "not done within 1 s" in families.row_in_a_process("llama", checked=False, timeout_s=1)["failed"]
    monkeypatch.setattr(families, "row_of", lambda *_: families.os._exit(3))
    assert "failed" in families.row_in_a_process("llama", checked=False, timeout_s=5)
