"""The benches that measure on a GPU, as far as they run without one: their problems are checked before they are timed,
and tuning keeps winners only."""

import json

import pytest
import torch

from weft.bench import tune
from weft.bench.matmul import products, shards
from weft.kernels import config, launch, matmul_tiles
from weft.testing import cases

pytestmark = pytest.mark.kernel

LAYERS = [
    cases.LinearLayer("plain", 24, 20),
    cases.LinearLayer("rise", 20, 16, "gelu_tanh"),
    cases.LinearLayer("gated", 20, 16, "silu", gated=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_matmul_bench_measures_right_results(device, layer, dtype):
    for product in products(layer, 70, device, dtype):
        product.contest("label").check()
        shape = {"forward": (70, layer.n), "dgrad": (70, layer.k)}.get(product.kind)
        ours, peer = product.ours(None), product.peer()
        assert ours.shape == peer.shape == (shape or ours.shape)
        assert product.operations > 0 and product.moved_bytes > 0


def test_the_shards_are_those_of_the_published_models():
    found = {label: (layer, m) for label, layer, m in shards(["llama-3-8b"], [8], [1024])}
    layer, _ = found["llama-3-8b tp=8 qkv 1024x768x4096"]  # (32 + 2 x 8) heads of 128, over 8 ranks
    assert (layer.n, layer.k) == (768, 4096)
    rise, _ = found["llama-3-8b tp=8 rise 1024x1792x4096"]
    assert rise.gated and rise.activation == "silu"
    assert len(list(shards(None, cases.TENSOR_PARALLEL, cases.TOKENS))) == 4 * 4 * 4 * 5


def test_tuning_keeps_the_fastest_right_configuration_of_each_product(device, monkeypatch):
    measured = []

    def medians(calls):
        measured.append(calls)
        for call in calls.values():
            call()
        return {name: 10.0 - number for number, name in enumerate(calls)}

    monkeypatch.setattr(tune, "medians_us", medians)
    entries = tune.tune([("label", LAYERS[0], 33)], device, torch.float32)
    assert [entry.problem["layout"] for entry in entries] == ["nt", "nn", "tn"]
    for entry, calls in zip(entries, measured, strict=True):
        *ours, peer = calls
        assert peer == "peer" and str(entry.config) == ours[-1] and entry.ours_us == 11.0 - len(ours)
        assert entry.peer_us == 10.0 - len(ours)
    text = config.table_text(entries, {"device": "none"})
    assert [row["problem"] for row in json.loads(text)["rows"]] == [entry.problem for entry in entries]


def test_a_configuration_that_is_wrong_is_left_out(device, monkeypatch, capsys):
    monkeypatch.setattr(tune, "medians_us", lambda calls: dict.fromkeys(calls, 1.0))
    product = products(LAYERS[0], 33, device, torch.bfloat16)[0]
    bad = matmul_tiles.listed(launch.architecture_of(device), torch.bfloat16, product.problem.narrow)[0]

    def check(given):
        assert given != bad, "off by 3"

    entry = tune.winner(type(product)(**{**vars(product), "check": check}), device)
    assert entry.config != bad and "left out: MatmulConfig(" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_measured_and_that_is_said():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    from weft.cli import main

    for command in (["tune", "matmul"], ["bench", "matmul"]):
        with pytest.raises(SystemExit, match="there is no CUDA device here"):
            main(command)
