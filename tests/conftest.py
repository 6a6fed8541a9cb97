"""What every test has in common: where kernels run, and why a test that needs a GPU is skipped.

Tests marked `kernel` run in Triton's interpreter where there is no GPU (or TRITON_INTERPRET=1 is set), and on the GPU
otherwise: there they are marked gpu as well.
"""

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # before triton is imported
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each stream of the virtual ranks on one GPU
INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if "kernel" in item.keywords and not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture
def device() -> torch.device:
    """Where a kernel's test puts its tensors."""
    return torch.device("cpu" if INTERPRETED else "cuda")
