"""`weft bench paradigms`: its rows take the steps of one process, and what is counted is what the formula says.

Three of its paradigms; tests/test_hybrid.py has every mesh.
"""

import argparse

import pytest

from weft.bench import paradigms
from weft.bench.suites import RefusedError
from weft.testing.models import Llama


@pytest.fixture
def small(monkeypatch):
    for name in ("HEAD", "KV_HEADS", "HIDDEN", "WORDS"):
        monkeypatch.setattr(paradigms.SmallModel, name, 2 * Llama.HEAD if name == "HEAD" else getattr(Llama, name) + 1)
    monkeypatch.setattr(paradigms, "SEQUENCE", 16)
    chosen = {2: ("data", "pipeline, 1f1b"), 4: ("data x tensor",)}
    kept = {world: [one for one in ones if one.name in chosen[world]] for world, ones in paradigms.PARADIGMS.items()}
    monkeypatch.setattr(paradigms, "PARADIGMS", kept)


@pytest.mark.slow("bench")
def test_paradigms_take_the_steps_of_one_process(small):
    """`run` raises where a loss is off. Two ranks that share gradients alone send each of them once there and back."""
    rows = list(paradigms.run(argparse.Namespace(world=2, rounds=1, only=None)))
    assert [(row.of["world"], row.of["paradigm"]) for row in rows] == [
        (world, one.name) for world, ones in paradigms.PARADIGMS.items() for one in ones
    ]
    by_name = {(row.of["world"], row.of["paradigm"]): row for row in rows}
    parameters = sum(parameter.numel() for parameter in paradigms.SmallModel(paradigms.BLOCKS).parameters())
    sent = by_name[2, "data"].facts["sent_bytes"]
    assert 4 * parameters <= sent < 4.1 * parameters
    for row in rows:
        assert row.facts["error"] < 1e-4 and row.facts["sent_bytes"] > 0 and row.facts["peak_mb"] > 0
        assert (row.facts["bubble"] is not None) == row.of["paradigm"].startswith("pipeline")


def test_other_numbers_of_ranks_are_refused():
    with pytest.raises(RefusedError, match="two and on four ranks"):
        next(paradigms.run(argparse.Namespace(world=3, rounds=1, only=None)))
