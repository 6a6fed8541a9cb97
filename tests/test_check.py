"""What `make check` and `.ci/run` choose for a change."""

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from imports import modules

ROOT = Path(__file__).parent.parent


def loaded(path):
    """The script as a module."""
    loader = SourceFileLoader(path.stem + "_script", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    before = sys.path[:]
    loader.exec_module(module)
    sys.path[:] = before
    return module


check, ci = loaded(ROOT / "tests" / "check.py"), loaded(ROOT / ".ci" / "phases.py")


def test_ci_starts_from_any_shell():
    assert subprocess.run(["sh", "-n", ROOT / ".ci" / "run"]).returncode == 0


def test_every_module_has_tests_that_concern_it():
    paths = [str(path.relative_to(ROOT)) for _, path in modules()]
    alone = [path for path in paths if not check.tests_of([path]) and not path.endswith("__init__.py")]
    assert alone == []


@pytest.mark.parametrize(
    ("changed", "nearest"),
    [
        ("pytorch_ext/clip_grad.py", "tests/test_clip_grad.py"),
        ("kernels/bucket.py", "tests/kernels/test_bucket.py"),
        ("csrc/launch/kind.cpp", "tests/csrc/test_launch.py"),
        ("docs/kernels.md", "tests/test_docs.py"),
        ("tests/nn/test_linear.py", "tests/nn/test_linear.py"),
        ("tests/helpers/scripts.py", "tests/data_parallel/test_example.py"),
    ],
)
def test_the_nearest_tests_come_first(changed, nearest):
    assert check.tests_of([changed])[0] == nearest


@pytest.mark.parametrize(
    ("changed", "operations"),
    [
        ("kernels/bucket.py", ["bucket"]),
        ("kernels/all_reduce.py", ["all_reduce"]),
        ("kernels/matmul.py", ["matmul", "all_gather_matmul", "matmul_reduce_scatter", "all_reduce", "grouped_matmul"]),
        ("tests/gate/sass.py", check.operations_of(["tests/gate/gate.py"])),
        ("pytorch_ext/ops/matmul.py", []),
    ],
)
def test_the_gate_has_the_kernels_that_a_change_reaches(changed, operations):
    assert check.operations_of([changed]) == operations


def test_a_phase_is_left_out_where_a_change_does_not_concern_it():
    assert ci.phases(["docs/kernels.md"]) == ["make .venv/built", "make lint", "make test SLOW='docs'"]
    phases = ci.phases(["csrc/shm/group.cpp", "kernels/bucket.py"])
    assert phases[2:3] + phases[4:] == ["make sanitize", "make gate OPS='bucket'"]
