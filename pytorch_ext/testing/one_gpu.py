"""Ranks as new processes that share one GPU: what has used CUDA cannot be forked."""

import os
import subprocess
import sys
import time
from pathlib import Path

SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # what torch asks for before ranks may


def run_on_one_gpu(script: str, case: str, world: int, folder: Path, timeout_s: float = 240) -> None:
    """Runs `script case rank world store` for each rank; the ranks meet over the file `store` in the folder.

    Raises:
        AssertionError: a rank's exit code is not 0; the text is what all ranks wrote. TimeoutExpired: one is not done.
    """
    outputs = [folder / f"rank_{rank}.txt" for rank in range(world)]
    ranks = []
    for rank, output in enumerate(outputs):
        command = [sys.executable, script, case, str(rank), str(world), str(folder / "store")]
        with output.open("w") as file:
            ranks.append(subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, SHARED_GPU: "1"}))
    deadline = time.monotonic() + timeout_s
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    told = "\n".join(f"rank {rank}: {output.read_text()}" for rank, output in enumerate(outputs))
    assert codes == [0] * world, told
