"""What static tools see: every import of weft resolves without the package being installed, and types are checked."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def mypy(tmp_path):
    def said_of(code):
        """What the type checker of `make lint` says of some code."""
        (path := tmp_path / "code.py").write_text(code)
        return subprocess.run([sys.executable, "-m", "mypy", path], cwd=ROOT, capture_output=True, text=True).stdout

    return said_of


@pytest.mark.slow("pytorch_ext", "kernels", "bench", "pyproject.toml")
@pytest.mark.timeout(900)
def test_mypy_finds_an_import_that_does_not_exist_and_an_argument_of_a_wrong_type(mypy):
    assert "Success" in mypy("from weft.sharding.sizes import split_sizes; split_sizes(5, 2)")
    assert 'has no attribute "nonsense"' in mypy("from weft.sharding.sizes import nonsense")
    assert 'Cannot find implementation or library stub for module named "weft.nonsense"' in mypy("import weft.nonsense")
    assert 'incompatible type "str"; expected "int"' in mypy("import weft; weft.split_sizes('5', 2)")
    assert 'incompatible type "str"; expected "int"' in mypy("import weft; weft.ParallelLinear('5', 2, style='row')")
    assert "has no attribute" in mypy("from weft.kernels import launch; launch.nonsense()")


def test_the_links_that_static_tools_follow_stand_where_packages_are():
    for link, folder in (
        ("src/weft", "pytorch_ext"),
        ("pytorch_ext/kernels", "kernels"),
        ("pytorch_ext/bench", "bench"),
    ):
        assert (ROOT / link).is_symlink() and (ROOT / link).resolve() == ROOT / folder
