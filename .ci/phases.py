"""Build once, run `make test` and, of lint, sanitizers, gate and slow tests, what the last hours' commits concern.

Each phase prints its time and what is left, so a run that is cut off has said what it had not reached.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOURS = 6  # of commits before the newest one: two pieces of work
SLOW_MINUTES = 4  # slow tests that have not begun by then are left to `make test-all`
os.chdir(ROOT)
sys.path.insert(0, str(ROOT / "tests"))
from check import folders_of, operations_of  # noqa: E402


def main() -> int:
    began = time.monotonic()
    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    print(f"{os.cpu_count()} cores: {', '.join(sorted(set(models)))}", flush=True)
    if not shutil.which("chromium"):  # a test looks at the benches' page in a browser where there is one
        install = "apt-get update && apt-get install --yes chromium"
        if subprocess.run(install, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            print("no chromium: its test is skipped")
    os.environ["WEFT_SLOW_MINUTES"] = str(SLOW_MINUTES)
    left = phases(changed_files())
    while left:
        print(f"== left: {'; '.join(left)}", flush=True)
        phase, start = left.pop(0), time.monotonic()
        code = subprocess.run(phase, shell=True).returncode
        print(f"== {phase}: {time.monotonic() - start:.0f} s{', failed' if code else ''}", flush=True)
        if code:
            print(f"== not reached: {'; '.join(left) or 'nothing'}")
            return code
    print(f"== all: {time.monotonic() - began:.0f} s")
    return 0


def phases(changed: list[str]) -> list[str]:
    found = ["make .venv/built", "make lint"]
    if any(name.startswith(("csrc/shm", "csrc/matmul", "tests/engine")) for name in changed):
        found.append("make sanitize")
    found.append(f"make test SLOW='{' '.join(folders_of(changed))}'")
    if operations := operations_of(changed):
        found.append(f"make gate OPS='{' '.join(operations)}'")
    return found


def changed_files() -> list[str]:
    """Return the files that the last hours' commits touch; all files of a repository that is younger."""

    def git(*command: str) -> list[str]:
        return subprocess.run(["git", *command], check=True, capture_output=True, text=True).stdout.split()

    newest = int(git("log", "-1", "--format=%ct")[0])
    base = git("rev-list", "-1", f"--before={newest - HOURS * 3600}", "HEAD")
    return git("diff", "--name-only", base[0], "HEAD") if base else git("ls-files")


if __name__ == "__main__":
    sys.exit(main())
