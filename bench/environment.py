"""The machine and the versions that a figure was measured on."""

import importlib.metadata
import os
import platform

import torch

import weft


def environment() -> dict:
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "weft": weft.__version__,
        "instruction_set": os.environ.get("WEFT_ISA") or weft.build_info()["instruction_sets"][0],
    }


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
