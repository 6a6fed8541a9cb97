"""weft doctor: every probe stands alone, and the exit code says whether there is a fault."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import weft
from weft import cli
from weft.tools.diagnosis import PROBES, Diagnosis, Finding


def test_this_machine_is_healthy_and_every_probe_says_something():
    found = weft.doctor()
    assert [finding.name for finding in found.findings] == list(PROBES)
    assert found.healthy, str(found)
    assert all(finding.text for finding in found.findings)
    assert "two ranks: all_reduce of 1024 KiB in" in str(found)


def test_a_probe_that_fails_is_a_finding_and_stops_no_other(monkeypatch, capsys):
    def broken():
        raise OSError("no such thing")

    monkeypatch.setitem(PROBES, "cores", broken)
    monkeypatch.setitem(PROBES, "self-test", lambda: (True, "not run"))
    found = weft.doctor()
    assert not found.healthy and len(found.findings) == len(PROBES)
    assert Finding("cores", False, "OSError: no such thing") in found.findings
    assert cli.main(["doctor"]) == 1
    assert "cores                FAULT  OSError: no such thing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "torch, ok", [("2.10.1", False), ("2.11.0", True), ("2.15.3+cu132", True), ("2.16.0a0", True), ("3.0", True)]
)
def test_a_torch_that_the_tests_never_ran_with_is_named(monkeypatch, torch, ok):
    monkeypatch.setattr("weft.tools.diagnosis.version_of", lambda package: torch if package == "torch" else None)
    found, text = PROBES["versions"]()
    assert found is ok
    assert (f"ran with torch 2.11 to 2.15; this one is {torch}" in text) == (not torch.startswith(("2.11", "2.15")))


def test_a_self_test_that_fails_is_a_fault(monkeypatch):
    monkeypatch.setenv("WEFT_ISA", "none")
    ok, text = PROBES["self-test"]()
    assert ok is False and 'instruction set "none" does not run here' in text


def test_a_torch_that_ends_the_process_ends_no_probe(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    command = [sys.executable, "-c", "from weft import cli; raise SystemExit(cli.main(['doctor']))"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "import torch         FAULT  ends the process: signal 11 (Segmentation fault)" in done.stdout
    assert all(f"\n{name}" in done.stdout for name in PROBES)


def test_a_machine_without_dev_shm_is_healthy(monkeypatch):
    def statvfs(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    ok, text = PROBES["shared memory"]()
    assert ok and "/dev/shm (not used) is not there" in text


def test_a_rank_that_sees_one_gpu_alone_hears_what_it_misses(monkeypatch):
    symmetric = SimpleNamespace(has_multicast_support=lambda kind, index: True)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", symmetric)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert PROBES["multicast"]()[1] == "the switch can sum (deterministic=False)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert PROBES["multicast"]()[1].startswith("CUDA_VISIBLE_DEVICES=3 shows one GPU.")


def test_a_finding_of_several_lines_stays_in_its_column():
    text = str(Diagnosis((Finding("devices", True, "0: one\n1: two"), Finding("x", None, "y"))))
    assert text.splitlines() == [
        "devices              ok     0: one",
        "                            1: two",
        "x                    -      y",
    ]


def test_the_command_exits_with_the_verdict():
    done = subprocess.run([sys.executable, "-m", "weft", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled kernels" in done.stdout
