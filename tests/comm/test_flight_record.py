"""torch's analyzer of flight records names the rank and the call at fault, from the files that weft writes."""

import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components.fr_logger import FlightRecorderLogger

import weft
from weft.comm.flight_record import FILE_VARIABLES
from weft.testing.ranks import run_ranks, try_ranks

WORLD = 3


def usual_calls(pair):
    x = torch.ones(6)
    dist.all_reduce(x)
    dist.all_gather([torch.empty(6) for _ in range(WORLD)], x)
    dist.reduce_scatter(torch.empty(2), list(torch.ones(6).split(2)))
    dist.all_to_all([torch.empty(2) for _ in range(WORLD)], list(torch.ones(6).split(2)))
    dist.broadcast(x, 1)
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=pair)
    dist.barrier()


def healthy(rank):
    usual_calls(dist.new_group([0, 1], group_desc="pair"))


def another_call(rank):
    usual_calls(dist.new_group([0, 1]))
    with pytest.raises(weft.CollectiveMismatchError):
        dist.broadcast(torch.ones(4), 0) if rank == 1 else dist.all_reduce(torch.ones(4))


def another_size(rank):
    usual_calls(dist.new_group([0, 1]))
    with pytest.raises(weft.CollectiveMismatchError):
        dist.all_reduce(torch.ones(5 if rank == 2 else 4))


def missing_call(rank):
    pair = dist.new_group([0, 1], group_desc="pair")
    usual_calls(pair)
    if rank == 0:
        pair.set_timeout(timedelta(seconds=1))
        with pytest.raises(weft.CollectiveTimeoutError):
            dist.all_reduce(torch.ones(4), group=pair)
    dist.barrier()


def many_calls(rank):
    for _ in range(300):
        dist.all_reduce(torch.ones(1))


def without_a_folder(rank):
    dist.barrier()
    with pytest.warns(UserWarning, match="the record of collectives was not written: .*No such file"):
        dist.destroy_process_group()


def analyzed(monkeypatch, folder) -> str:
    lines = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(FlightRecorderLogger, level, lambda self, text, *values: lines.append(text % values))
    fr_trace.main([str(folder), "--prefix", "rank_"])
    return "\n".join(lines)


@pytest.fixture(params=FILE_VARIABLES)
def folder(request, tmp_path, monkeypatch):
    monkeypatch.setenv(request.param, f"{tmp_path}/rank_")
    return tmp_path


def test_a_healthy_run_has_no_finding(folder, monkeypatch):
    run_ranks(healthy, WORLD)
    found = analyzed(monkeypatch, folder)
    assert "has errors" not in found and "Not all ranks" not in found and "cannot decide" not in found
    entries = pickle.loads((folder / "rank_1").read_bytes())["entries"]
    assert len(entries) == 7 and all(entry["state"] == "completed" for entry in entries)


@pytest.mark.parametrize(
    "run, kind, calls",
    [
        (another_call, "COLLECTIVE_TYPE_MISMATCH", ["'all_reduce'", "'broadcast'"]),
        (another_size, "SIZE_OR_SYNTAX_MISMATCH", ["'[[4]]'", "'[[5]]'"]),
    ],
)
def test_ranks_with_different_calls_are_named(run, kind, calls, folder, monkeypatch):
    run_ranks(run, WORLD)
    found = analyzed(monkeypatch, folder)  # which rank is right it does not know: it compares with the first file's
    assert "Collective sequence number: 7 has errors" in found
    assert f"Error type: {kind}, Expected" in found and all(call in found for call in calls)


def test_a_rank_that_did_not_come_is_named(folder, monkeypatch):
    run_ranks(missing_call, WORLD)
    found = analyzed(monkeypatch, folder)
    assert "Not all ranks joining collective, sequence number: 2" in found
    assert ":pair" in found and "missing ranks: {1}" in found


def test_the_last_256_calls_are_kept(folder, monkeypatch):
    run_ranks(many_calls, 2)
    assert "has errors" not in analyzed(monkeypatch, folder)
    entries = pickle.loads((folder / "rank_0").read_bytes())["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == list(range(45, 301))


def test_a_folder_that_is_not_there_ends_no_program(tmp_path, monkeypatch):
    monkeypatch.setenv(FILE_VARIABLES[0], f"{tmp_path}/none/rank_")
    run_ranks(without_a_folder, 2)


def test_nothing_is_written_unasked(tmp_path, monkeypatch):
    for name in FILE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    try_ranks(another_size, WORLD)
    assert not list(tmp_path.iterdir())
