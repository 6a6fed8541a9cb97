"""torch's own tests of process groups, which its wheel ships, pass over weft in gloo's place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# torch's own file for one backend (test/distributed/test_distributed_spawn.py) is not in the wheel; the tests are.
SUITE = """
import os, tempfile

folder = tempfile.mkdtemp()
for name in ("barrier", "test_dir", "init_dir"):
    os.makedirs(os.path.join(folder, name))
shared = f"file://{folder}/shared"
os.environ.update(BACKEND="gloo", WORLD_SIZE="3", TEMP_DIR=folder, INIT_METHOD=shared)

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class TestOverWeft(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""


@pytest.mark.slow("pytorch_ext/comm", "csrc/shm")
@pytest.mark.timeout(900)
def test_what_torch_tests_of_gloo_holds(tmp_path):
    pytest.importorskip("expecttest", reason="torch's MultiProcessTestCase needs expecttest")
    (tmp_path / "test_torch.py").write_text(SUITE)
    # DDP's own tests run models at length; that which compares the backend's name in its logs reads it in C++.
    options = ["--fork-ranks", "-q", "-k", "not ddp", "--timeout", "120", "-p", "no:cacheprovider"]
    command = [str(Path(sys.executable).with_name("pytest")), *options, "test_torch.py"]
    environment = {**os.environ, "WEFT_AS_GLOO": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
    passed = done.stdout.rpartition(" passed")[0].split()[-1:]
    assert done.returncode == 0 and int(passed[0]) > 60, done.stdout[-6000:] + done.stderr[-2000:]
