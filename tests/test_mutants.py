"""The list of faults fits the repository as it is. `make mutants` plants them and runs the tests named there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants.py")
assert SPEC is not None and SPEC.loader is not None
mutants = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.listed(), ids=lambda one: one.name)
def test_a_listed_fault_stands_in_one_place_and_names_tests_that_exist(mutant):
    assert not mutant.misfit()
    for test in mutant.tests:
        file, _, function = test.partition("[")[0].partition("::")
        assert re.search(rf"^def {function or 'test_'}", (ROOT / file).read_text(), re.MULTILINE), test


@pytest.mark.slow("tests")
def test_every_case_that_is_named_is_collected():
    tests = sorted({test for one in mutants.listed() for test in one.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--slow", "all", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_of_faults_differ():
    names = [one.name for one in mutants.listed()]
    assert len(set(names)) == len(names)
