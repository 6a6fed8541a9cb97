"""What a machine with a GPU and without a network needs to test weft, in one folder: wheels, extension, archive.

    python tests/on_gpu/gpu_kit.py fetch build/gpu-kit       where there is a network (`make gpu-kit`, which adds the others)
    python tests/on_gpu/gpu_kit.py install build/gpu-kit     on the machine with the GPU (`make gpu` does that first)

Runs before weft is installed, so it imports the standard library only.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# To build, to test, and what these need; versions are those of requirements*.txt where one of them is named.
PACKAGES = (
    *("setuptools", "pybind11", "ninja", "safetensors", "rich", "markdown-it-py", "mdurl", "pygments"),
    *("pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "hypothesis", "sortedcontainers"),
    *("pytest-xdist", "execnet"),
)
PEERS = ("liger-kernel==0.8.5", "nvidia-cudnn-frontend==1.32.0")
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
    lines = "\n".join((ROOT / f"requirements{part}.txt").read_text() for part in ("", "-dev")).splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    wanted = [*(f"{name}=={pinned[name]}" if name in pinned else name for name in PACKAGES), *PEERS]
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
    """Put missing wheels to `site` in the folder, and the extension and the archive to the sources.

    Nothing that serves is replaced. Without an extension for this Python the sources are installed, which builds one.
    """
    shutil.rmtree(folder / "site", ignore_errors=True)
    for wheel in sorted(folder.glob("*.whl")):
        if is_missing(wheel.name.split("-")[0]):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder / "site")
            print("from the kit:", wheel.name, flush=True)
    for archive in folder.glob("*.weft"):
        shutil.copy2(archive, ROOT / "kernels" / "compiled")
    extension = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if extension.exists():
        shutil.copy2(extension, ROOT / "pytorch_ext")
        return 0
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-build-isolation", "--no-deps", "--no-index"]
    return subprocess.run([*command, "-e", str(ROOT)]).returncode


def is_missing(name: str) -> bool:
    name = name.replace("_", "-").lower()
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return int(version.split(".")[0]) < AT_LEAST.get(name, 0)


if __name__ == "__main__":
    sys.exit(main())
