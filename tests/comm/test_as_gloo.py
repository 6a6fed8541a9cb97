"""WEFT_AS_GLOO: programs that ask for gloo and import nothing of weft get weft's groups, which say that they are gloo's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("pytorch_ext/comm")

PROGRAM = """
import datetime, os, sys, tempfile, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, store, backend):
    asked = {"backend": backend} if backend else {}
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2, **asked)
    found = dist.get_backend(), dist.group.WORLD.name()
    x = torch.full((5,), float(rank + 1))
    dist.all_reduce(x)
    assert (x == 3).all()
    parts = [None, None]
    dist.all_gather_object(parts, {"rank": rank})
    assert [part["rank"] for part in parts] == [0, 1]
    inner = dist.new_group([0, 1], backend="gloo")
    dist.broadcast(x, 0, group=inner)
    alone = dist.new_group([1], backend="gloo")
    if rank == 1:
        dist.all_reduce(x, group=alone)
    if found[0] == "gloo":
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1), process_group=inner)
    model(torch.full((2, 3), float(rank))).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.ones(1, 3))
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.all_reduce(x, group=mesh.get_group())
    kinds = type(dist.group.WORLD).__name__, type(inner).__name__, type(mesh.get_group()).__name__
    if rank == 0:
        print(*found, dist.get_backend(inner), *kinds)
    dist.destroy_process_group()
    time.sleep(0.3)  # gloo's threads drop the last tensors under the interpreter's lock; else the process may abort

if __name__ == "__main__":
    store = os.path.join(tempfile.mkdtemp(), "store")
    mp.start_processes(main, (store, sys.argv[1] if len(sys.argv) > 1 else None), nprocs=2, start_method="spawn")
    assert "weft" not in open(__file__).read().split("assert")[0]
"""


def run(program, *arguments, **variables):
    environment = {**os.environ, **variables}
    command = [sys.executable, "-W", "ignore", str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("as_gloo") / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["gloo"], "gloo gloo gloo"),
        (["cpu:gloo"], "cpu:gloo gloo gloo"),
        (["cpu:gloo,cuda:nccl"], "cpu:gloo,cuda:nccl gloo gloo"),
        ([], "undefined gloo gloo"),
    ],
)
def test_a_program_that_asks_for_gloo_gets_weft_by_that_name(program, asked, found):
    done = run(program, *asked, WEFT_AS_GLOO="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*found.split(), *["WeftProcessGroup"] * 3]


@pytest.mark.parametrize("variables", [{"WEFT_AS_GLOO": "0"}, {}])
def test_without_the_variable_gloo_is_gloo(program, variables):
    done = run(program, "gloo", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gloo", "gloo", "gloo", *["ProcessGroup"] * 3]


def test_another_value_is_named(program):
    done = run(program, "gloo", WEFT_AS_GLOO="yes")
    assert done.returncode != 0 and "WEFT_AS_GLOO=yes must be 1" in done.stderr


def test_a_script_can_be_run_so(program):
    command = [str(Path(sys.executable).with_name("weft")), "run", "--as-gloo", str(program), "gloo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "WeftProcessGroup"


def test_the_backend_is_there_without_an_import(tmp_path):
    script = "import torch.distributed as dist; print('weft' in dist.Backend.backend_list)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.stdout.split() == ["True"], done.stderr
