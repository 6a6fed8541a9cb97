"""What a machine with a GPU and without a network needs to install and test weft: wheels, in one folder.

    python bench/gpu_kit.py fetch build/gpu-kit       where there is a network (`make gpu-kit`)
    python bench/gpu_kit.py install build/gpu-kit     on the machine with the GPU (`make gpu` does that first)

Runs before weft is installed, so it imports the standard library only.
"""

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# To build, to test, and what these need; versions are those of requirements.txt where it names one.
PACKAGES = (
    *("setuptools", "pybind11", "ninja", "safetensors", "rich", "markdown-it-py", "mdurl", "pygments"),
    *("pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "hypothesis", "sortedcontainers"),
)
AT_LEAST = {"setuptools": 77, "pybind11": 3}  # major versions; any other version that is installed will do
PYTHON = "3.12"
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("act", choices=("fetch", "install"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=PYTHON, help="version of the other machine's Python")
    options = parser.parse_args(arguments)
    return fetch(options.folder, options.python) if options.act == "fetch" else install(options.folder)


def fetch(folder: Path, python: str) -> int:
    pinned = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split() if "==" in line)
    wanted = [f"{name}=={pinned[name]}" if name in pinned else name for name in PACKAGES]
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    platforms = [option for platform in _PLATFORMS for option in ("--platform", platform)]
    target = ["--python-version", python, "--implementation", "cp", *platforms, "--only-binary", ":all:", "--no-deps"]
    done = subprocess.run([sys.executable, "-m", "pip", "download", "-qq", *target, "-d", str(folder), *wanted])
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20
    print(f"{len(list(folder.glob('*.whl')))} wheels for Python {python}, {size:.1f} MiB: {folder}")
    return done.returncode


def install(folder: Path) -> int:
    """Install the wheels of packages that are not there, or too old. Nothing that serves is replaced."""
    missing = [wheel for wheel in sorted(folder.glob("*.whl")) if is_missing(wheel.name.split("-")[0])]
    if not missing:
        return 0
    print("installing", ", ".join(wheel.name for wheel in missing), flush=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--upgrade"]
    return subprocess.run([*command, *map(str, missing)]).returncode


def is_missing(name: str) -> bool:
    name = name.replace("_", "-").lower()
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return int(version.split(".")[0]) < AT_LEAST.get(name, 0)


if __name__ == "__main__":
    sys.exit(main())
