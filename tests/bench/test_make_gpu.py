"""`make gpu`: its steps within their time, the first launches, and the kit that it takes along."""

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from dataclasses import replace

import first_launches
import gpu_kit
import guarded
import on_gpu
import pytest
import torch
from interpreter import compiling

from weft.bench.measure import Quantiles
from weft.bench.table import Row
from weft.kernels import launch

pytestmark = pytest.mark.kernel

STEP = """
import sys, time
print("begun", flush=True)
time.sleep(float(sys.argv[1]))
print("done", flush=True)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("sleep", "code", "outcome"), [(0, 0, 0), (0, 3, 3), (60, 0, None)])
def test_a_step_writes_as_it_goes_and_ends_at_its_time(tmp_path, capsys, sleep, code, outcome):
    command = [sys.executable, "-c", STEP, str(sleep), str(code)]
    assert on_gpu._streamed(command, tmp_path / "log.txt", "step", 20 if sleep == 0 else 2) == outcome
    lines = ["step: begun\n"] + ["step: done\n"] * (outcome is not None)
    assert (tmp_path / "log.txt").read_text() == capsys.readouterr().out == "".join(lines)


def test_the_steps_of_collectives_have_a_name_together(tmp_path, monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(on_gpu, "_run_all", lambda chosen, folder, options, ends: ran.extend(chosen) or 0)
    assert on_gpu.main([str(tmp_path), "doctor", "collectives", "--rehearse"]) == 0
    assert ran == ["doctor", "rank_order_sum", "several_gpus", "tests_of_several", "tune_collectives"]


@pytest.mark.parametrize("command", on_gpu.COMMANDS)
def test_a_command_ends_each_step_at_its_second_and_leaves_time_to_the_next(command, tmp_path, monkeypatch):
    given: dict[str, float] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Device")
    monkeypatch.setattr(on_gpu, "environment", dict)
    monkeypatch.setattr(
        on_gpu, "_streamed", lambda made, log, name, seconds, pack: given.setdefault(name, seconds) and 0
    )
    monkeypatch.setenv("WEFT_NO_JIT", "")
    assert on_gpu.main([str(tmp_path), command, "--seconds", "600"]) == 0
    ends = on_gpu.COMMANDS[command]
    assert list(given) == list(ends) and max(ends.values()) <= 570
    assert all(ends[name] - 30 < seconds <= ends[name] for name, seconds in given.items()), "no step has used its time"
    assert (os.environ["WEFT_NO_JIT"] == "1") == (command == "first")


def test_all_steps_run_nothing_twice_and_only_the_first_command_forbids_to_compile(tmp_path, monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(on_gpu, "_run_all", lambda chosen, folder, options, ends: ran.extend(chosen) or 0)
    monkeypatch.delenv("WEFT_NO_JIT", raising=False)
    assert on_gpu.main([str(tmp_path), "--rehearse"]) == 0
    assert set(ran) == set(on_gpu.steps()) - set(on_gpu.parts()) and len(ran) == len(set(ran))
    assert on_gpu.main([str(tmp_path), "launches", "across", "--rehearse"]) == 0
    assert "WEFT_NO_JIT" not in os.environ
    monkeypatch.setenv("WEFT_NO_JIT", "")  # so that it is taken back
    assert on_gpu.main([str(tmp_path), "first", "--rehearse"]) == 0
    assert os.environ["WEFT_NO_JIT"] == "1"


def test_no_step_starts_without_time_and_all_output_comes_in_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "LEAST_SECONDS", 0)
    monkeypatch.setattr(on_gpu, "_streamed", lambda *arguments: 0)
    chosen = {"doctor": on_gpu.steps()["doctor"], "launches": on_gpu.steps()["launches"]}
    options = argparse.Namespace(out=tmp_path, seconds=100, archive=tmp_path / "all.tar.gz", rehearse=True)
    folder = tmp_path / "device"
    folder.mkdir()
    assert on_gpu._run_all(chosen, folder, options, {}) == 0
    with tarfile.open(options.archive) as archive:
        assert "device/steps.json" in archive.getnames()
    options.seconds = -1
    assert on_gpu._run_all(chosen, folder, options, {}) == 0
    assert capsys.readouterr().out.endswith("doctor: not started: no time left, launches: not started: no time left\n")


def test_the_table_has_every_fault_and_fits_a_screen(tmp_path):
    right = Row(
        {"op": "matmul forward", "shape": "1x2x3"}, {"ours": Quantiles(2, 2, 2), "lib": Quantiles(4, 4, 4)}, "lib"
    )
    wrong = [Row({"op": "bucket", "shape": str(number)}, remark="FAULT: off") for number in range(3)]
    for name, rows in (("matmul", [right] * 100), ("launches", [*wrong, Row({"op": "bucket", "shape": "x"})])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [row.as_dict() for row in rows]}))
    (tmp_path / "steps.json").write_text("{}")
    lines = on_gpu._table(tmp_path)
    assert lines[:4] == ["3 faults", *(f"bucket  {number}  FAULT: off" for number in range(3))]
    assert any(
        line.split() == ["matmul", "matmul", "forward", "100", "of", "100", "right", "2.00x", "(2.00", "to", "2.00)"]
        for line in lines
    )
    assert any(line.split() == ["launches", "bucket", "1", "of", "4", "right"] for line in lines)
    assert len(lines) == on_gpu.MOST_LINES


def test_the_first_launches_are_right_and_a_wrong_kernel_is_found(device):
    """A check of each group; on a GPU `make gpu` runs all."""
    for name, group in first_launches.groups().items():
        checks = list(itertools.islice(group(device), 40))
        for check in checks[len(checks) // 2 :][:1] if name != "attention" else checks[:1]:
            row = first_launches.row_of(check, 1)
            assert not row.remark and row.facts["error_in_tolerances"] <= 1, row
    check = next(first_launches.groups()["permute"](device))
    calls = itertools.count()
    wrong = replace(check, ours=lambda ours=check.ours: [1.5 * t for t in ours()])
    unsteady = replace(check, ours=lambda ours=check.ours: [t + 1e-5 * (next(calls) > 0) for t in ours()])
    raising = replace(check, ours=lambda: [][0])
    assert "off by" in first_launches.row_of(wrong, 1).remark
    assert first_launches.row_of(raising, 1).remark == "FAULT: IndexError: list index out of range"
    assert "other bits in 3 of 3 calls" in first_launches.row_of(unsteady, 3).remark


SERVED_BY_HAND = """
import torch, sys
import first_launches
from weft.bench import grouped_matmul, matmul
from weft.kernels import launch, signal, variants
architecture, device = sys.argv[1], torch.device("meta")
listed = {variants.variant_of(made) for op in variants.OPS for made in variants.record(op, architecture)}
first_launches.run_as_ranks = lambda function, world, bytes, device, **_: [function(signal.unlaunched(0, world))] * world
first_launches._gathered = lambda *arguments: ()  # its product is one of `variants`
first_launches._ACROSS["all_gather_matmul"] = first_launches._gathered
first_launches.reference.reduce = lambda parts: parts[0]

def missing(launches):
    return [f"{made.kernel.__name__} {made}" for made in launches if variants.variant_of(made) not in listed]

shards = list(matmul.shards(["llama-3-8b"], (1, 8), [8192]))
with launch.recording(architecture) as launches:
    for _, layer, tokens in shards:
        for kind, problem in matmul.products(layer, tokens, torch.bfloat16).items():
            matmul.contest(kind, problem, "label", device).ours()
    torch.Tensor.tolist = lambda x: [0] * len(x)
    for contest in grouped_matmul.contests(device):
        contest.ours()
assert len(launches) > len(shards) and not missing(launches), missing(launches)
for group in ("bucket", "invariant", "communicating"):
    with launch.recording(architecture) as launches:
        for check in first_launches.groups()[group](device):
            try:
                check.ours()
            except (RuntimeError, NotImplementedError) as error:  # of the comparison of what has no data
                assert launches, error
    assert launches and not missing(launches), (group, missing(launches))
"""


@pytest.mark.slow("bench", "kernels")
@pytest.mark.parametrize("architecture", launch.ARCHITECTURES[1:2])
def test_what_is_listed_by_hand_is_compiled_ahead_of_time_too(architecture):
    command = [sys.executable, "-c", SERVED_BY_HAND, architecture]
    done = subprocess.run(command, capture_output=True, text=True, env=compiling())
    assert done.returncode == 0, done.stderr


SERVED_BY_CHECKS = """
import sys
import first_launches
from weft.kernels import variants
architecture = sys.argv[1]
for op in first_launches.REFERENCES:
    listed = {variants.variant_of(made): first_launches.variant_text(made) for made in variants.record(op, architecture)}
    found = [text for _, _, texts in first_launches._calls(op, architecture, False) for text in texts.split("; ")]
    assert sorted(found) == sorted(listed.values()), (op, set(listed.values()) ^ set(found))
    print(op, len(found))
"""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(one, marks=() if one == "sm_90" else pytest.mark.slow("bench", "kernels"))
        for one in launch.ARCHITECTURES
    ],
)
def test_every_listed_variant_is_launched_once(architecture):
    command = [sys.executable, "-c", SERVED_BY_CHECKS, architecture]
    done = subprocess.run(command, capture_output=True, text=True, env=compiling())
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(first_launches.REFERENCES)


@pytest.mark.slow("bench")
@pytest.mark.skipif(torch.cuda.is_available(), reason="faults are planted in the interpreter")
def test_a_bad_address_a_hang_and_a_wrong_value_cost_their_own_rows(monkeypatch):
    monkeypatch.setenv("WEFT_PLANT", "permute:2:address, permute:5:hang, permute:9:wrong")
    rows: list[dict] = []
    guarded.rows("permute", time.monotonic() + 250, rows.append, check_s=25)
    assert [row["number"] for row in rows] == list(range(16))
    faults = {row["number"]: row["remark"] for row in rows if row["remark"]}
    assert set(faults) == {2, 5, 9}
    assert "IndexError" in faults[2] and "no end within 25 s" in faults[5] and "off by" in faults[9]


def test_a_group_ends_with_its_time_and_says_so():
    rows: list[dict] = []
    guarded.rows("permute", time.monotonic() + 0.2, rows.append)
    assert [row["remark"] for row in rows] == ["FAULT: no time left"]


def test_the_kit_replaces_only_what_is_missing_or_too_old(monkeypatch):
    real = gpu_kit.metadata.version
    monkeypatch.setattr(gpu_kit.metadata, "version", lambda name: {"setuptools": "70.1", "rich": "9.0"}[name])
    assert gpu_kit.is_missing("setuptools") and not gpu_kit.is_missing("rich")
    monkeypatch.setattr(gpu_kit.metadata, "version", real)
    assert gpu_kit.is_missing("no-such-package") and not gpu_kit.is_missing("torch")


def test_the_kit_puts_everything_in_its_place_and_builds_nothing(tmp_path, monkeypatch):
    kit, root = tmp_path / "kit", tmp_path / "root"
    for folder in (kit, root / "pytorch_ext", root / "kernels" / "compiled"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(gpu_kit, "ROOT", root)
    monkeypatch.setattr(gpu_kit.subprocess, "run", lambda command: pytest.fail(f"runs {command}"))
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    for file in (name, "_C.cpython-27.so", "sm_90.weft"):
        (kit / file).write_text(file)
    for package in ("missing_one", "torch"):
        with zipfile.ZipFile(kit / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}.py", "")
    assert gpu_kit.main(["install", str(kit)]) == 0
    assert [path.name for path in (kit / "site").iterdir()] == ["missing_one.py"]
    assert [path.name for path in (root / "pytorch_ext").iterdir()] == [name]
    assert [path.name for path in (root / "kernels" / "compiled").iterdir()] == ["sm_90.weft"]


def test_make_gpu_takes_the_communicating_benches():
    for name in on_gpu.SUITES:
        assert callable(importlib.import_module(f"weft.bench.{name}").run)
    assert {"communicating", "several_gpus"} <= set(on_gpu.SUITES)
