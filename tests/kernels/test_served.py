"""What is compiled ahead of time serves the calls of known models, whatever their number of tokens and ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.kernels import launch

CALLS = Path(__file__).parent / "served_calls.py"


def serve(architecture):
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, CALLS, architecture], capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow("kernels", "pytorch_ext/ops")
@pytest.mark.parametrize("architecture", launch.ARCHITECTURES)
def test_no_call_of_a_known_model_is_left_to_the_compiler(architecture):
    said = serve(architecture).splitlines()
    made, missed = (int(word) for word in said[-1].split() if word.isdigit())
    assert made > 10_000
    assert missed == 0, "\n".join(said[:20])
