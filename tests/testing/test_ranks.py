"""Ranks as new processes: what has used CUDA cannot be forked."""

import importlib
import sys
import time

import pytest

from weft.testing.ranks import RanksFailedError, run_ranks

RANKS = """
import os, time
import torch.distributed as dist

def says(rank, what):
    return f"{what} from {rank} of {dist.get_world_size()}, {os.environ['WEFT_TEST_WORD']}"

def fails_on_one(rank):
    if rank == 1:
        raise ValueError("rank 1 does not like it")

def dies_on_one(rank):
    if rank == 1:
        os._exit(7)

def never_returns(rank):
    time.sleep(60)
"""


@pytest.fixture
def ranks_module(tmp_path, monkeypatch):
    """What new processes can import, unlike this file."""
    (tmp_path / "weft_test_ranks.py").write_text(RANKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("weft_test_ranks")
    sys.modules.pop("weft_test_ranks")


def test_new_processes_run_as_ranks(ranks_module):
    environment = {"WEFT_TEST_WORD": "word"}
    values = run_ranks(ranks_module.says, 2, "hello", environment=environment, start="spawn")
    assert values == ["hello from 0 of 2, word", "hello from 1 of 2, word"]


@pytest.mark.parametrize(
    ("function", "timeout_s", "text"),
    [
        ("fails_on_one", 60, r"rank 1 of 2: exit code 1, ValueError\('rank 1 does not like it'\)"),
        ("dies_on_one", 60, "rank 1 of 2: exit code 7"),
        ("never_returns", 3, r"rank 0 of 2: exit code -?\d+, None"),
    ],
)
def test_a_rank_that_fails_dies_or_hangs_is_reported(ranks_module, function, timeout_s, text):
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=text):
        run_ranks(getattr(ranks_module, function), 2, timeout_s=timeout_s, start="spawn")
    assert time.monotonic() - start < 30
