"""The port of a DDP script trains as the script does over torch's DDP."""

import json
from pathlib import Path

import pytest
import torch
from scripts import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "train_ddp.py"


def train(folder, *arguments):
    text = run_script(SCRIPT, "--images", "640", "--epochs", "2", "--out", folder, *arguments, ranks=2)
    assert "epoch 2: loss" in text
    return json.loads((folder / "figures.json").read_text()), torch.load(folder / "weights.pt")


slow = pytest.mark.slow("examples", "pytorch_ext/data_parallel")


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory):
    return train(tmp_path_factory.mktemp("torch"), "--torch", "--backend", "gloo")


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        ([], 1e-4),
        pytest.param(["--shard-optimizer"], 1e-4, marks=slow),
        pytest.param(["--wire", "bfloat16"], 0.02, marks=slow),
    ],
    ids=["plain", "sharded", "bf16"],
)
def test_the_port_trains_as_ddp_does(arguments, tolerance, by_torch, tmp_path):
    (theirs, their_weights), (ours, our_weights) = by_torch, train(tmp_path, *arguments)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=50 * tolerance)
    assert ours["losses"][-1] < ours["losses"][0]
    assert list(our_weights) == list(their_weights)
