"""`weft bench generate` and `weft bench lora` at small sizes: the rows, and that wrong results are not measured."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

from weft.bench import generate, lora
from weft.bench.suites import RefusedError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

SIZES = dict(world=2, rounds=2, layers=2, hidden=128)


def rows_of(bench, folder, **sizes):
    """Run a bench in a new process: ranks with several threads cannot be forked from one that has used its own."""
    file = folder / "rows.json"
    options = [text for name, value in {**SIZES, **sizes}.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "weft", "bench", bench, *options, "--json", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return json.loads(file.read_text())["rows"]


@pytest.mark.slow("bench")
def test_generation_is_timed_by_token_beside_every_peer(tmp_path):
    first, further = rows_of("generate", tmp_path, prompt=5, tokens=4)
    assert set(first["times"]) == set(further["times"]) == {"weft", "gloo", "transformers over gloo", "one process"}
    assert all(time["p50_us"] > 0 for row in (first, further) for time in row["times"].values())
    for name, rate in further["tokens_per_second"].items():
        assert rate == pytest.approx(1e6 / further["times"][name]["p50_us"])


@pytest.mark.slow("bench")
def test_the_step_of_lora_is_that_of_one_process_and_a_rank_loads_less(tmp_path, monkeypatch):
    step, memory = rows_of("lora", tmp_path, hidden=512, batch=1, sequence=8)
    assert set(step["times"]) == {"weft", "one process", "one process, 2 threads"} and step["share_of_time"] > 0
    assert 0.3 < memory["share_of_memory"] < 0.8
    # Half of the weights of two layers and two tables, in MB.
    assert memory["peak_mb"] > (2 * (4 * 512**2 + 3 * 512 * 1365) + 2 * 8192 * 512) / 2 * 4 / 2**20
    monkeypatch.setattr(lora, "_TOLERANCE", 0.0)
    with pytest.raises(AssertionError, match="the loss of weft is"):
        list(lora.run(argparse.Namespace(**SIZES, batch=1, sequence=8)))


def test_a_generation_keeps_the_times_of_its_first_and_its_further_tokens():
    class Model:
        def generate(self, prompt, streamer, max_new_tokens, **_):
            for _ in range(1 + max_new_tokens):
                streamer.put(prompt)
            return prompt

    call = generate.Generation(Model(), torch.zeros(1, 2), 3)
    call()
    call()
    assert len(call.first_us) == len(call.token_us) == 2 and min(*call.first_us, *call.token_us) > 0


def test_one_token_is_refused():
    with pytest.raises(RefusedError, match="--tokens 1"):
        next(generate.run(argparse.Namespace(**SIZES, prompt=5, tokens=1)))
