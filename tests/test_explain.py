"""weft.explain names what runs in each layer, and why."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import weft
from weft.kernels import config, dispatch, launch
from weft.kernels.config import Entry
from weft.kernels.matmul_tiles import Problem, listed
from weft.ops import choice
from weft.testing.ranks import run_ranks


def explains(rank):
    model = nn.Sequential(weft.ColumnParallelLinear(8, 10, activation="gelu"), nn.ReLU(), weft.RowParallelLinear(10, 6))
    found = weft.explain(model, tokens=64)
    assert [layer.name for layer in found.layers] == ["0", "2"]
    column, row = found.layers
    assert column.shard == "(5, 8) of (10, 8)" and row.shard == "(6, 5) of (6, 10)"
    assert column.layer == "ColumnParallelLinear column"
    why = "ATen: the kernels run on CUDA devices, the tensors are on the CPU"
    assert column.products == row.products == {"forward": why, "dgrad": why, "wgrad": why}
    assert str(found).startswith(
        "at 64 tokens:\n0: ColumnParallelLinear column, weight (5, 8) of (10, 8), over shared memory\n    forward  ATen"
    )
    with choice.prefer("kernel"):
        assert weft.explain(model).layers[0].products["forward"] == "weft kernel: preferred by the caller"
    with pytest.raises(ValueError, match="tokens=0"):
        weft.explain(model, tokens=0)


def test_every_parallel_layer_is_named_with_what_runs_and_why():
    run_ranks(explains, 2)


def test_where_a_kernels_machine_code_comes_from_is_told(tmp_path):
    """In a process that does not interpret, with no archive: by triton, and why."""
    code = (
        "import torch; from weft.ops.choice import origin; from weft.kernels import dispatch, launch; "
        "from weft.kernels.matmul_tiles import Problem; from weft import _C; from pathlib import Path; "
        f"dispatch.use(_C.launch, Path({str(tmp_path)!r})); "
        "print(origin(Problem(512, 256, 128, 'nt', True, torch.bfloat16), 'sm_90'))"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "WEFT_NO_JIT")}
    for extra, start in (({}, "jit: "), ({"WEFT_NO_JIT": "1"}, "nowhere: ")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **extra})
        assert done.stdout.startswith(f"{start}this installation has no compiled kernels for sm_90"), done


@pytest.mark.kernel
def test_without_triton_a_gpu_takes_what_was_compiled_ahead_of_time(monkeypatch, tmp_path):
    device = torch.device("cuda")
    monkeypatch.setattr(choice, "_HAS_TRITON", False)
    for found, taken in (("there is no archive", False), (object(), True)):
        monkeypatch.setattr(dispatch, "archive_of", lambda architecture, found=found: found)
        choice._why_no_archive.cache_clear()
        with launch.recording("sm_90"):
            assert choice.on_kernel(device) == choice.can_run(device) == taken
            if not taken:
                assert choice.excluded(device).reason.endswith("(pip install weft[gpu]), and there is no archive")
    choice._why_no_archive.cache_clear()


@pytest.mark.kernel
def test_the_table_decides_between_kernel_and_library_and_is_quoted(monkeypatch):
    fast = Problem(4096, 1024, 8192, "nt", True, torch.bfloat16)
    slow = Problem(512, 1024, 8192, "nt", True, torch.bfloat16)
    tile = listed("sm_90", torch.bfloat16)[0]
    rows = (Entry(fast.key(), tile, 10.0, 12.5), Entry(slow.key(), tile, 10.0, 8.0))
    monkeypatch.setattr(config, "table", lambda *_: rows)
    choice._measured.cache_clear()
    device = torch.device("cuda")
    with launch.recording("sm_90"):
        assert (
            str(choice._measured(fast, device))
            == "weft kernel: the kernel has 1.25 times ATen's speed at 4096x1024x8192 on sm_90"
        )
        assert str(choice._measured(slow, device)).startswith("ATen: the kernel has 0.80 times ATen's speed")
        unmeasured = Problem(64, 64, 64, "nt", True, torch.bfloat16)
        assert (
            str(choice._measured(unmeasured, device))
            == "ATen: not measured at this size on sm_90; `weft tune matmul` measures it"
        )
        double = Problem(64, 64, 64, "nt", True, torch.float64)
        assert "does not take torch.float64" in str(choice._measured(double, device))
    choice._measured.cache_clear()
