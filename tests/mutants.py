"""Plant each fault of tests/mutants.toml in a copy of the repository, and check that the tests listed with it fail.

    make mutants                                        every fault; a table, and an error where fewer than 95% are noticed
    python tests/mutants.py messenger --file csrc/      the faults whose name has that word, in files of that folder

A fault is noticed if a test fails by an assertion or an error, and not if it is late or a rank ends by a signal. The
copy and its build are kept in build/mutants, so that a later run compiles only the files that have changed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
PYTHON = WORK / "venv" / "bin" / "python"
IN_TREE = {"cwd": TREE, "env": {**os.environ, "PYTHONSAFEPATH": "1"}}
NOTICED_AT_LEAST = 0.95
RUN_LIMIT_S = 600  # of the tests of one fault; pyproject.toml limits each
BUILT = re.compile(r"^build/|__pycache__|\.egg-info/|\.so$")  # in the copy, though git does not track it
SIGNALLED = re.compile(r"exit code -\d")
LATE = re.compile(r"Failed: Timeout|killed: not done within|exit code 1, None|TimeoutExpired|CollectiveTimeoutError")


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `new` stands where `old` stood, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def misfit(self) -> str:
        """Return why the fault cannot be planted in the source as it is, or an empty string."""
        path = ROOT / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        return "" if count == 1 else f"{self.name!r}: `old` must stand once in {self.file}, and stands {count} times"


def listed() -> list[Mutant]:
    """Return every fault of the list, in its order."""
    return [Mutant(**entry) for entry in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]]


def copy_tree() -> None:
    """Make the copy equal to the tracked files. An unchanged file keeps its time, so ninja does not compile it again."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = {name for name in tracked.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, TREE / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for path in filter(Path.is_file, TREE.rglob("*.*")):
        if (name := str(path.relative_to(TREE))) not in names and not BUILT.search(name):
            path.unlink()


def install() -> None:
    """Install the copy, editable, in an environment of its own that sees this interpreter's packages."""
    if not PYTHON.exists():
        venv.create(PYTHON.parents[1], with_pip=False, symlinks=True)
        packages = next(PYTHON.parents[1].glob("lib/python*/site-packages"))
        (packages / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    command = [PYTHON, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."]
    subprocess.run(command, check=True, **IN_TREE)


def run_tests(tests: list[str], limit_s: float) -> tuple[str, str]:
    """Run the tests in the copy up to the first failure; return the outcome and the test that failed."""
    (report := WORK / "report.xml").unlink(missing_ok=True)
    options = ["--slow", "all", "-x", "-q", f"--junitxml={report}"]
    with open(WORK / "output.txt", "w") as output:
        command = [PYTHON, "-m", "pytest", *options, *tests]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **IN_TREE)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "timeout", "all of them"
        finally:
            with suppress(ProcessLookupError):  # ranks that a test left
                os.killpg(process.pid, signal.SIGKILL)
    if code <= 0:
        return ("crash", f"pytest ended by signal {-code}") if code else ("SURVIVED", "")
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        for failure in (*case.iter("failure"), *case.iter("error")):
            text = failure.get("message", "")
            outcome = "crash" if SIGNALLED.search(text) else "timeout" if LATE.search(text) else "noticed"
            return outcome, case.get("name", "") or "collection"
    return "broken", f"pytest ended with {code}, see {WORK / 'output.txt'}"


def outcome_of(mutant: Mutant) -> tuple[str, str]:
    """Plant the fault, compile what it changes, run its tests, take the fault out again."""
    path = TREE / mutant.file
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        if mutant.file.startswith("csrc/"):
            command = [PYTHON, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **IN_TREE)
        return run_tests(mutant.tests, RUN_LIMIT_S)
    finally:
        path.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the repository and run their tests.")
    parser.add_argument("word", nargs="?", default="", help="part of the faults' names; all by default")
    parser.add_argument("--file", default="", help="the beginning of the faults' files")
    options = parser.parse_args()
    mutants = [one for one in listed() if options.word in one.name and one.file.startswith(options.file)]
    mutants.sort(key=lambda one: one.file.startswith("csrc/"))  # last: the build of a fault stays until the next build
    misfits = [text for text in map(Mutant.misfit, mutants) if text]
    if misfits or not mutants:
        sys.exit("\n".join(misfits) or "no fault has such a name and file")
    copy_tree()
    install()
    outcome, test = run_tests(sorted({test for one in mutants for test in one.tests}), RUN_LIMIT_S * len(mutants))
    if outcome != "SURVIVED":
        sys.exit(f"without any fault: {outcome} in {test}\n{(WORK / 'output.txt').read_text()}")
    print("without any fault all tests pass", flush=True)
    outcomes = Counter()
    for one in mutants:
        began = time.monotonic()
        outcome, test = outcome_of(one)
        outcomes[outcome] += 1
        print(f"{one.name:78} {outcome:8} {test:70} {time.monotonic() - began:4.0f} s", flush=True)
    print(f"{len(mutants)} faults: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    if outcomes["noticed"] < NOTICED_AT_LEAST * len(mutants):
        sys.exit(f"fewer than {NOTICED_AT_LEAST:.0%} are noticed")


if __name__ == "__main__":
    main()
