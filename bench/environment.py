"""The machine and the versions behind a figure."""

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import weft
from weft.kernels import dispatch, launch
from weft.tools.diagnosis import version_of

PEERS = ("liger-kernel", "quack-kernels", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend")


def environment() -> dict:
    return {
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        **(_on_gpu() if torch.cuda.is_available() else {}),
        "weft": weft.__version__,
        "commit": commit(),
        "instruction_set": os.environ.get("WEFT_ISA") or weft.build_info()["instruction_sets"][0],
    }


def _on_gpu() -> dict[str, str]:
    """Return who compiled the kernels that are launched, and the versions of cuDNN and of the installed peers."""
    found = dispatch.archive_of(launch.code_architecture(torch.device("cuda")))
    compiled = found if isinstance(found, str) else f"ahead of time by triton {found.triton}, {found.assembler}"
    peers = {"cudnn": str(torch.backends.cudnn.version()), **{name: version_of(name) for name in PEERS}}
    return {"kernels": compiled, "peers": ", ".join(f"{name} {version}" for name, version in peers.items() if version)}


def cores() -> int:
    return len(os.sched_getaffinity(0))


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def device(on_gpu: bool) -> str:
    """Return the name of the measured device: the first GPU for a GPU bench if there is one, else the processor."""
    if on_gpu and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor()}, {cores()} cores"


def folder_name(device: str) -> str:
    """Return the name of the device's folder among the results."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def checkout() -> Path | None:
    """Return the repository that weft is imported from; None if it was installed from a wheel."""
    package = Path(weft.__file__).resolve().parent
    return package.parent if package.name == "pytorch_ext" else None


def commit() -> str | None:
    """Return the checkout's commit, with "+" if files changed since; None without git or checkout."""
    root = checkout()
    if root is None or not (root / ".git").exists():
        return None
    name = _git(root, "rev-parse", "--short=12", "HEAD")
    return name and name + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
