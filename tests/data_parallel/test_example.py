"""The port of a DDP script trains as the script does over torch's DDP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gloo_exit import succeeded

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train(folder, *arguments):
    command = [*TORCHRUN, ROOT / "examples" / "train_ddp.py", "--images", "640", "--epochs", "2", "--out", folder]
    done = subprocess.run([*map(str, command), *arguments], capture_output=True, text=True, timeout=240)
    assert succeeded(done, over_gloo="gloo" in arguments), f"{done.stdout}\n{done.stderr}"
    assert "epoch 2: loss" in done.stdout
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
