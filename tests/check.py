"""`make check`: within 90 seconds, lint of what changed and the tests that concern it, the nearest first.

    make check                  what differs from the last commit or, where nothing does, what the last commit changed
    make check SINCE=main       what differs from another commit

A test is as near as the chain of imports from it to a changed file is short. Tests that have not begun when the time is
over are counted as skipped; `make test` runs all.
"""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from imports import files_imported  # noqa: E402

SECONDS, LAST_TEST_SECONDS = 90, 20  # in all, and what a test may take that begins last
MOST_FILES = 20  # of tests: to import more of them takes too long
# Tests of files that no file imports by name.
TESTS_OF = {
    "csrc/launch": ["tests/csrc/test_launch.py"],
    "csrc/cuda": ["tests/csrc"],
    "csrc/shm": ["tests/csrc/test_reduce.py", "tests/comm"],
    "csrc/matmul": ["tests/ops/test_invariant.py"],
    "examples": ["tests/test_examples.py"],
    "docs": ["tests/test_docs.py", "tests/test_site.py"],
    "README.md": ["tests/test_docs.py", "tests/test_examples.py"],
    "CHANGELOG.md": ["tests/test_docs.py"],
    "CONTRIBUTING.md": ["tests/test_docs.py"],
    "bench/README.md": ["tests/test_docs.py"],
    "bench/": ["tests/bench"],
    "pytorch_ext/__main__.py": ["tests/test_diagnosis.py"],
    "pytorch_ext/__init__.pyi": ["tests/test_types.py"],
}


def main() -> int:
    began = time.monotonic()
    changed = changed_files(*sys.argv[1:])
    print(f"{len(changed)} changed files")
    python = [name for name in changed if name.endswith(".py")]
    bin = Path(sys.executable).parent
    lints = [[bin / "codespell", "-D-", "-D", "docs/site/words.txt", *changed], [bin / "mypy"]]
    if python:
        lints += [[bin / "ruff", "check", *python], [bin / "ruff", "format", "--check", *python]]
    failed = [command for command in lints if subprocess.run(command, cwd=ROOT).returncode]
    tests = tests_of(changed)
    print(f"lint: {time.monotonic() - began:.0f} s; {len(tests)} files of tests concern it, the nearest first")
    if tests:
        left = max(20, SECONDS - LAST_TEST_SECONDS - int(time.monotonic() - began))
        options = ["-m", "not gpu", "-q", "--within", str(left), "--numprocesses", "auto", "--dist", "loadfile"]
        command = [bin / "pytest", *options, "--no-loadscope-reorder", *tests[:MOST_FILES]]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(["pytest"])
    print(f"{time.monotonic() - began:.0f} s")
    return bool(failed)


def changed_files(since: str = "") -> list[str]:
    def names(*command: str) -> list[str]:
        return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()

    found = names("diff", "--name-only", since or "HEAD") + names("ls-files", "--others", "--exclude-standard")
    found = found or names("diff", "--name-only", "HEAD~1")
    return [name for name in found if (ROOT / name).is_file()]


def tests_of(changed: list[str]) -> list[str]:
    """Return the files of tests that a change concerns, the nearest first."""
    importers: dict[Path, set[Path]] = {}
    for path, imported in files_imported().items():
        for other in imported:
            importers.setdefault(other, set()).add(path)
    found = [test for name in changed for begin, tests in TESTS_OF.items() if name.startswith(begin) for test in tests]
    for name in changed:
        found += [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob(f"test_{Path(name).stem}.py")]
    seen = {ROOT / name for name in changed}
    layer = sorted(seen)
    while layer:
        found += [str(path.relative_to(ROOT)) for path in layer if path.name.startswith("test_")]
        layer = sorted({path for near in layer for path in importers.get(near, ())} - seen)
        seen.update(layer)
    return [test for test in dict.fromkeys(found) if (ROOT / test).exists()]


def folders_of(changed: list[str]) -> list[str]:
    """Return the folders of the upper two levels that a change touches: names of slow tests (conftest.py)."""
    parents = [Path(name).parent.parts for name in changed]
    return sorted({"/".join(parts[:depth]) for parts in parents for depth in (1, 2) if len(parts) >= depth})


def operations_of(changed: list[str]) -> list[str]:
    """Return the operations of kernels/variants.py whose machine code a change concerns."""
    kernels, imported = ROOT / "kernels", files_imported()
    (listed,) = re.findall(r"^OPS = (\(.*?\))$", (kernels / "variants.py").read_text(), re.MULTILINE | re.DOTALL)
    touched = {ROOT / name for name in changed}

    def is_concerned(path: Path) -> bool:
        found, left = set(), [path]
        while left:
            found.add(path := left.pop())
            left += imported[path] - found
        return bool(found & touched)

    if is_concerned(ROOT / "tests" / "gate" / "gate.py") or {"requirements.txt", "requirements-dev.txt"} & set(changed):
        return [*ast.literal_eval(listed), "memory_orders"]
    return [name for name in ast.literal_eval(listed) if is_concerned(kernels / f"{name}.py")]


if __name__ == "__main__":
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.exit(main())
