"""The CUDA collectives on a GPU, with several ranks on one device: each has its own memory and stream, and grids are
small enough that all run at a time. The kernels' protocol is also tested without a GPU: tests/csrc/test_cuda_on_threads.py.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from virtual_ranks import (
    OPERATIONS,
    Trial,
    VirtualRanks,
    counts_of,
    name_of,
    values,
)

from weft import _C
from weft.testing import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TIMED_OUT, MISMATCHED, STOPPED = (_C.wait_record.states[name] for name in ("timed_out", "mismatched", "stopped"))

needs_cuda_build = pytest.mark.skipif(_C.cuda is None, reason="this build has no CUDA")


def code_of(name):
    return next(code for code, known in _C.wait_record.names.items() if known == name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_results_have_the_bits_of_the_reference(world, operation, dtype):
    ranks = VirtualRanks(world)
    for count in (0, 1, 7, 8, 1000, 65_537, 300_003):  # the largest takes several pieces of the workspace
        for offset in (0, 1):  # in elements: off by one is not aligned to 16 bytes
            trial = Trial(operation, ranks, dtype, counts_of(operation, world, count), average=True, offset=offset)
            torch.cuda.synchronize()
            ranks.call(trial.launch)
            torch.cuda.synchronize()
            trial.check()
    ranks.assert_idle()


@pytest.mark.gpu
def test_all_reduce_has_the_bits_of_rank_order_sum():
    ranks = VirtualRanks(3)
    parts, scale = [values(5000, torch.bfloat16) for _ in range(3)], 0.37
    expected = torch.empty_like(parts[0])
    _C.cuda.rank_order_sum([part.data_ptr() for part in parts], expected.data_ptr(), 5000, "bfloat16", scale)
    for algorithm in ("one_shot", "two_shot"):
        sums = [part.clone() for part in parts]  # the destination is the source
        torch.cuda.synchronize()
        addresses = [x.data_ptr() for x in sums]
        ranks.call(
            lambda on, rank, stream, to=addresses, how=algorithm: on.all_reduce(
                to[rank], to[rank], 5000, "bfloat16", False, scale, how, stream
            )
        )
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected) for x in sums)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
def test_calls_back_to_back_are_right_however_late_a_rank_is(world):
    chosen, ranks = random.Random(world), VirtualRanks(world, workspace_bytes=2**14)
    trials = []
    for _ in range(50):
        operation = chosen.choice(OPERATIONS)
        count = chosen.choice((3, 500, 4096, 20_001))
        trials.append(Trial(operation, ranks, chosen.choice(DTYPES), counts_of(operation, world, count)))
    torch.cuda.synchronize()
    for trial in trials:
        ranks.call(trial.launch, late=chosen.randrange(2 * world), cycles=chosen.randrange(2_000_000))
        if chosen.random() < 0.2:
            ranks.call(lambda on, rank, stream: on.barrier(stream))
    torch.cuda.synchronize()
    for trial in trials:
        trial.check()
    ranks.assert_idle()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_norm_of_the_sum_is_that_of_separate_calls(world, dtype):
    ranks = VirtualRanks(world)
    for rows, hidden in [(1, 1), (3, 33), (4, 2048), (4, 4095 if dtype.itemsize == 2 else 2047), (1, 8191), (1, 3)]:
        assert rows <= ranks.ranks[0].rms_norm_rows(hidden, name_of(dtype))
        parts = [values(rows * hidden, dtype, rank % 2) for rank in range(world)]
        residual, weight = values(rows * hidden, dtype), values(hidden, dtype)
        results = [[torch.empty_like(residual) for _ in range(2)] for _ in range(world)]
        torch.cuda.synchronize()

        def launch(on, rank, stream, rows=rows, hidden=hidden, inputs=(parts, residual, weight), results=results):
            parts, *shared = inputs
            addresses = [x.data_ptr() for x in (parts[rank], *shared, *results[rank])]
            on.all_reduce_rms_norm(*addresses, rows, hidden, name_of(dtype), 1e-5, stream)

        ranks.call(launch, late=rows % world, cycles=1_000_000)
        torch.cuda.synchronize()
        expected = residual.cpu() + reference.reduce([part.cpu() for part in parts])
        exact = torch.nn.functional.rms_norm(expected.double().view(rows, -1), (hidden,), weight.cpu().double(), 1e-5)
        rounding = torch.finfo(dtype).eps * (0.52 if dtype.itemsize == 2 else 8)
        for normalised, total in results:
            assert torch.equal(total.cpu(), expected) and torch.equal(normalised, results[0][0])
            torch.testing.assert_close(normalised.cpu().double(), exact.view(-1), rtol=rounding, atol=1e-7)
    ranks.assert_idle()


@pytest.mark.gpu
def test_a_barrier_orders_what_ranks_write():
    ranks = VirtualRanks(4)
    cells = torch.zeros(4, dtype=torch.int32, device="cuda")
    seen = [torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    for late in range(4):
        ranks.call(lambda on, rank, stream: cells[rank].add_(1), late=late, cycles=20_000_000)
        ranks.call(lambda on, rank, stream: on.barrier(stream))
        ranks.call(lambda on, rank, stream: seen[rank].copy_(cells))
        ranks.call(lambda on, rank, stream: on.barrier(stream))
        torch.cuda.synchronize()
        assert all(x.tolist() == [late + 1] * 4 for x in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_captured_calls_can_be_replayed(world):
    ranks = VirtualRanks(world)
    trials = [
        Trial(operation, ranks, torch.bfloat16, counts_of(operation, world, 3001))
        for operation in OPERATIONS
        if operation != "in_place"  # it would reduce its own result at the next replay
    ]
    for trial in trials:  # once, so that the kernels are loaded
        ranks.call(trial.launch)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(world)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for trial in trials:
                trial.launch(ranks.ranks[rank], rank, ranks.streams[rank].cuda_stream)
    for replay in range(10):
        for trial in trials:
            for results in trial.results:
                for result in results:
                    result.zero_()
        torch.cuda.synchronize()
        ranks.call(lambda on, rank, stream: graphs[rank].replay(), late=replay % world, cycles=5_000_000)
        torch.cuda.synchronize()
        for trial in trials:
            trial.check()
    ranks.assert_idle()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("operation", OPERATIONS)
def test_small_calls_are_right(operation):
    ranks = VirtualRanks(2, blocks=2, workspace_bytes=4096, timeout_s=120)
    for offset in (0, 1):
        trial = Trial(operation, ranks, torch.bfloat16, counts_of(operation, 2, 3001), offset=offset)
        torch.cuda.synchronize()
        ranks.call(trial.launch)
        torch.cuda.synchronize()
        trial.check()
    ranks.assert_idle()


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_does_not_come_is_named_and_results_are_nan(operation):
    world, timeout_s = 3, 0.3
    ranks = VirtualRanks(world, timeout_s=timeout_s)
    trial = Trial(operation, ranks, torch.float32, counts_of(operation, world, 5000))
    later = Trial("two_shot", ranks, torch.float32, [5000])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for rank in (0, 1):  # and not 2
        ranks.put(rank, trial.launch)
        ranks.put(rank, later.launch)
    torch.cuda.synchronize()
    assert timeout_s < time.perf_counter() - start < 2 * timeout_s + 1  # the later call does not wait again
    codes = {
        "one_shot": ("all_reduce (one_shot)", "staged"),
        "two_shot": ("all_reduce (two_shot)", "staged"),
        "in_place": ("all_reduce (in place)", "arrived"),
        "reduce_scatter": ("reduce_scatter", "staged"),
        "all_gather": ("all_gather", "staged"),
        "low_latency": ("all_reduce (low_latency)", "staged"),
        "reduce_scatter_in_place": ("reduce_scatter (in place)", "arrived"),
        "all_gather_in_place": ("all_gather (in place)", "arrived"),
        "all_gather_by_copies": ("all_gather (by copies)", "arrived"),
    }
    for rank in (0, 1):
        state, recorded_rank, operation_code, phase, peer, block, seen, expected = ranks.records[rank][:8].tolist()
        assert (state, recorded_rank, peer, seen) == (TIMED_OUT, rank, 2, 0)
        assert [operation_code, phase] == [code_of(name) for name in codes[operation]]
        assert 0 <= block < 4 and 0 < expected < 2**31
        assert later.is_nan(rank)
        if operation.startswith("all_gather"):  # but for its own part, which needs nobody
            assert all(result.isnan().all() for r, result in enumerate(trial.results[rank]) if r != rank)
        else:
            assert trial.is_nan(rank)


@pytest.mark.gpu
def test_ranks_that_call_different_things_raise():
    ranks = VirtualRanks(2, timeout_s=60)
    trials = [Trial("one_shot", ranks, torch.float32, [count]) for count in (5000, 5001)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for rank, trial in enumerate(trials):
        ranks.put(rank, trial.launch)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 10
    records = [record[:8].tolist() for record in ranks.records]
    assert [record[0] for record in records] == [MISMATCHED] * 2
    assert records[0][6:8] == records[1][7:5:-1] and records[0][6] != records[0][7]
    assert all(trial.is_nan(rank) for rank, trial in enumerate(trials))


@pytest.mark.gpu
def test_the_host_can_end_a_wait():
    ranks = VirtualRanks(2, timeout_s=60)
    trial = Trial("one_shot", ranks, torch.float32, [5000])
    torch.cuda.synchronize()
    start = time.perf_counter()
    ranks.put(0, trial.launch)
    ranks.records[0][4] = 1
    ranks.records[0][0] = STOPPED
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 10
    assert ranks.records[0][:8].tolist() == [STOPPED, 0, 0, 0, 1, 0, 0, 0] and trial.is_nan(0)


# What needs no GPU.

PADS, WORKSPACE, RECORD = [4096, 8192], [16384, 32768], 65536


def some_ranks(**changes):
    arguments = dict(
        rank=0,
        pads=PADS,
        pad_words=192,
        workspace=WORKSPACE,
        workspace_bytes=1024,
        record=RECORD,
        timeout_s=1.0,
        blocks=32,
    )
    return _C.cuda.Ranks(**{**arguments, **changes})


@needs_cuda_build
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            dict(blocks=33),
            r"33 blocks .* 3 meetings .* 2 ranks = 198 flags do not fit into .* of 192 words; use at most 32 blocks",
        ),
        (dict(blocks=0), "blocks must be 1 or more, got 0"),
        (dict(rank=2), "rank must be 0 to 1, got 2"),
        (dict(rank=-1), "rank must be 0 to 1, got -1"),
        (dict(pads=[4096] * 73, workspace=[4096] * 73), "1 to 72 signal pads, one for each rank; got 73"),
        (dict(pads=[]), "1 to 72 signal pads, one for each rank; got 0"),
        (dict(workspace=[4096]), "workspaces of Ranks: expected one for each of 2 ranks, got 1"),
        (dict(workspace=[4096, 8200]), "the workspace of rank 1 must be aligned to 16 bytes and not null, got .* 8200"),
        (dict(pads=[4096, 0]), "the signal pad of rank 1 must be aligned to 16 bytes and not null, got address 0"),
        (dict(record=12), "the record must be aligned to 8 bytes and not null, got address 12"),
        (dict(workspace_bytes=31), "a workspace for 2 ranks needs 32 bytes or more, got 31"),
        (dict(workspace_bytes=255), "a workspace for 32 blocks needs 256 bytes or more, got 240"),
        (dict(timeout_s=0.0), "timeout_s must be more than 0"),
        (dict(timeout_s=float("nan")), "timeout_s must be more than 0"),
    ],
    ids=str,
)
def test_ranks_refuse_what_would_corrupt_memory(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        some_ranks(**changes)


@needs_cuda_build
@pytest.mark.parametrize(
    ("method", "arguments", "complaint"),
    [
        ("all_reduce", (16, 16, 4, "int8", False, 1.0, "one_shot"), "takes float32, float16 and bfloat16, got int8"),
        ("all_reduce", (16, 16, 4, "float32", False, 1.0, "ring"), '"one_shot" and "two_shot", got "ring"'),
        ("all_reduce", (16, 16, 4, "float32", False, 1.0, "low_latency"), "takes at most 0 bytes here, got 16"),
        (
            "all_reduce",
            (0, 16, 4, "float32", False, 1.0, "one_shot"),
            "the source of all_reduce .* not null, got address 0",
        ),
        (
            "all_reduce",
            (16, 18, 4, "float32", False, 1.0, "two_shot"),
            "the destination of .* to 4 bytes .* got address 18",
        ),
        (
            "all_reduce_rms_norm",
            (16, 16, 16, 16, 16, 1, 9, "float32", 0.0),
            "takes 1 to 0 rows of 9 float32 elements here, got 1",
        ),
        ("all_reduce_in_place", ([16], 4, "float32", False, 1.0), "expected one for each of 2 ranks, got 1"),
        (
            "all_reduce_in_place",
            ([16, 17], 4, "float16", False, 1.0),
            "the memory of rank 1 .* to 2 bytes .* got address 17",
        ),
        (
            "all_reduce_multimem",
            (24, 4, "float32", False, 1.0),
            "multicast address .* aligned to 16 bytes .* got address 24",
        ),
        ("all_reduce_multimem", (32, 12, "bfloat16", False, 1.0), "a multiple of 8 bfloat16 elements; got 12"),
        ("reduce_scatter", (16, 16, [4, 4, 4], "float32", False, 1.0), "expected one for each of 2 ranks, got 3"),
        (
            "reduce_scatter",
            (16, 0, [4, 4], "float32", False, 1.0),
            "the destination of reduce_scatter .* got address 0",
        ),
        ("all_gather", (16, [16], [4, 4]), "destinations of all_gather: expected one for each of 2 ranks, got 1"),
        ("all_gather", (16, [16, 16], [4]), "bytes of all_gather: expected one for each of 2 ranks, got 1"),
        ("all_gather", (16, [16, 0], [4, 4]), "the memory for rank 1 in all_gather .* got address 0"),
        (
            "reduce_scatter_in_place",
            ([16], 0, 16, [4, 4], "float32", False, 1.0),
            "parts of a window: expected one for each of 2 ranks, got 1",
        ),
        (
            "reduce_scatter_in_place",
            ([16, 32], 2, 16, [4, 4], "float32", False, 1.0),
            "an offset in a window must be a multiple of 4 bytes, got 2",
        ),
        ("all_gather_in_place", ([16, 0], 0, [16, 16], [4, 4], 4), "the window of rank 1 .* got address 0"),
        ("all_gather_in_place", ([16, 32], 0, [16, 16], [4, 6], 4), "whole elements of 4 bytes, got 6 bytes of rank 1"),
        ("all_gather_by_copies", ([16, 0], [16, 16], [4, 4]), "the memory of rank 1 in .* got address 0"),
    ],
)
def test_calls_refuse_what_would_corrupt_memory(method, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        getattr(some_ranks(), method)(*arguments, 0)


@needs_cuda_build
def test_a_broken_rank_is_marked_where_no_peer_sets_a_flag():
    for rank in (0, 1):
        assert some_ranks(rank=rank, blocks=3).marks == [rank, 6 + rank, 12 + rank]


LAUNCHES = {
    "barrier": lambda ranks, dtype: ranks.barrier(0),
    "all_reduce (one_shot)": lambda ranks, dtype: ranks.all_reduce(16, 16, 9, dtype, False, 1.0, "one_shot", 0),
    "all_reduce (two_shot)": lambda ranks, dtype: ranks.all_reduce(16, 16, 9, dtype, False, 1.0, "two_shot", 0),
    "all_reduce_rms_norm": lambda ranks, dtype: some_ranks(pad_words=2**16).all_reduce_rms_norm(
        16, 16, 16, 16, 16, 2, 9, dtype, 1e-6, 0
    ),
    "all_reduce (in place)": lambda ranks, dtype: ranks.all_reduce_in_place(
        [16, 32], 9, dtype, False, 1.0, 0, offset=4
    ),
    "all_reduce (multimem)": lambda ranks, dtype: ranks.all_reduce_multimem(32, 8, dtype, False, 1.0, 0, own=64),
    "reduce_scatter": lambda ranks, dtype: ranks.reduce_scatter(16, 16, [3, 4], dtype, False, 1.0, 0),
    "all_gather": lambda ranks, dtype: ranks.all_gather(16, [16, 32], [dtype_bytes(dtype), 0], 0),
    "all_reduce (low_latency)": lambda ranks, dtype: some_ranks(pad_words=2**16).all_reduce(
        16, 16, 9, dtype, False, 1.0, "low_latency", 0
    ),
    "reduce_scatter (in place)": lambda ranks, dtype: ranks.reduce_scatter_in_place(
        [16, 32], 4, 16, [3, 4], dtype, False, 1.0, 0
    ),
    "all_gather (in place)": lambda ranks, dtype: ranks.all_gather_in_place(
        [16, 32], 4, [16, 32], [dtype_bytes(dtype), 0], dtype_bytes(dtype), 0
    ),
    "all_gather (by copies)": lambda ranks, dtype: ranks.all_gather_by_copies([16, 32], [16, 32], [4, 4], 0),
}


def dtype_bytes(name):
    return getattr(torch, name).itemsize


@needs_cuda_build
@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch would succeed, on addresses that are nobody's")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", LAUNCHES)
def test_a_launch_that_fails_says_which_and_why(operation, dtype):
    with pytest.raises(RuntimeError, match=rf"^{re.escape(operation)}: cudaError\w+ \("):
        LAUNCHES[operation](some_ranks(), name_of(dtype))


BLOCKING_DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void load(void) {
  fclose(fopen(getenv("BEGAN"), "w"));
  for (int tries = 0; access(getenv("LET_GO"), F_OK) != 0; ++tries) {
    if (tries == 5000) _exit(3);  // no other thread came to let it go
    usleep(1000);
  }
}
"""
LAUNCH_BESIDE_ANOTHER_THREAD = """
import os, threading, time
from weft import _C
def launch():
    try:
        {call}
    except RuntimeError:  # this driver has no function
        pass
thread = threading.Thread(target=launch)
thread.start()
while not os.path.exists(os.environ["BEGAN"]):
    assert thread.is_alive(), "the launch asks no driver"
    time.sleep(0.001)
open(os.environ["LET_GO"], "w").close()
thread.join()
"""


@pytest.fixture(scope="module")
def blocking_driver(tmp_path_factory):
    """The folder of a CUDA driver that blocks its first caller, as a full launch queue would."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(BLOCKING_DRIVER)
    command = [compiler, "-shared", "-fPIC", folder / "driver.c", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", folder / "libcuda.so.1"], check=True)
    return folder


@needs_cuda_build
@pytest.mark.parametrize(
    "call",
    [
        "ranks.barrier(0)",
        "ranks.all_reduce(16, 16, 9, 'float32', False, 1.0, 'one_shot', 0)",
        "ranks.all_reduce_rms_norm(16, 16, 16, 16, 16, 2, 9, 'float32', 1e-6, 0)",
        "ranks.all_reduce_in_place([16, 32], 9, 'float32', False, 1.0, 0)",
        "ranks.all_reduce_multimem(32, 8, 'float32', False, 1.0, 0)",
        "ranks.reduce_scatter(16, 16, [3, 4], 'float32', False, 1.0, 0)",
        "ranks.all_gather(16, [16, 32], [4, 4], 0)",
        "ranks.reduce_scatter_in_place([16, 32], 0, 16, [3, 4], 'float32', False, 1.0, 0)",
        "ranks.all_gather_in_place([16, 32], 0, [16, 32], [4, 4], 4, 0)",
        "ranks.all_gather_by_copies([16, 32], [16, 32], [4, 4], 0)",
        "_C.cuda.rank_order_sum([16], 16, 1, 'float32')",
        "_C.cuda.copy_and_mark([16], [16], [1], [16], 0)",
    ],
)
def test_other_threads_run_while_a_launch_waits(blocking_driver, tmp_path, call):
    """The queue may be full behind a kernel that waits for a lost rank; the thread that ends it must run."""
    ranks = f"_C.cuda.Ranks(0, {PADS}, 2**16, {WORKSPACE}, 1024, {RECORD}, 1.0, 32)"
    program = LAUNCH_BESIDE_ANOTHER_THREAD.format(call=call.replace("ranks.", f"{ranks}."))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(blocking_driver),
        "BEGAN": str(tmp_path / "began"),
        "LET_GO": str(tmp_path / "let go"),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or "the launch held the interpreter's lock"


def test_codes_in_records_have_names_below_those_of_triton():
    names = _C.wait_record.names
    assert {"barrier", "reduce_scatter", "all_gather", "staged", "read"} <= set(names.values())
    assert all(0 < code < 100 for code in names) and len(set(names.values())) == len(names)


def tool(name):
    triton = pytest.importorskip("triton", reason="triton's wheel has the tools that read device code")
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def runs_on(code, capability):
    """Return whether a device loads the code (CUDA C++ programming guide, compute capabilities)."""
    kind, major, minor, specific = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code).groups()
    target = int(major), int(minor)
    if specific:
        return kind == "sm" and capability == target
    return capability >= target and (kind == "compute" or capability[0] == target[0])


@needs_cuda_build
@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)], ids=str
)
def test_every_device_has_code_and_from_hopper_on_with_multimem(capability):
    codes = _C.build["cuda_architectures"].split()
    before = (8, 9) if capability >= (9, 0) else (7, 5)  # code that runs there too has no multimem
    assert any(runs_on(code, capability) and not runs_on(code, before) for code in codes)
    listed = subprocess.run(
        [tool("cuobjdump"), "-lelf", "-lptx", _C.__file__], check=True, capture_output=True, text=True
    ).stdout
    assert set(re.findall(r"\.(sm_\w+)\.(?:cubin|ptx)", listed)) == {code.replace("compute", "sm") for code in codes}


@needs_cuda_build
def test_no_kernel_spills_on_any_architecture():
    text = subprocess.run(
        [tool("cuobjdump"), "-res-usage", _C.__file__], check=True, capture_output=True, text=True
    ).stdout
    bodies = ("Barrier", "AllReduceOneShot", "AllReduceTwoShot", "AllReduceInPlace", "AllReduceMultimem",
              "AllReduceLowLatency", "AllReduceRmsNorm", "ReduceScatter", "AllGather", "AfterCopies")  # fmt: skip
    found = set()
    for section in re.split(r"^arch = ", text, flags=re.MULTILINE)[1:]:
        architecture = section.split()[0]
        for kernel, stack, local in re.findall(
            r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", section
        ):
            assert stack == local == "0", (architecture, kernel)
            found |= {(architecture, body) for body in bodies if f"{len(body)}{body}" in kernel}
    assert found == {(architecture, body) for architecture in ("sm_80", "sm_90", "sm_100") for body in bodies}


def machine_code(architecture):
    """Return {kernel: its instructions}."""
    paths = os.pathsep.join((str(tool("cuobjdump").parent), os.environ["PATH"]))  # cuobjdump runs nvdisasm
    text = subprocess.run(
        [tool("cuobjdump"), "-sass", "-arch", architecture, _C.__file__],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": paths},
    ).stdout
    return {part.split()[0]: part for part in text.split("Function : ")[1:]}


@needs_cuda_build
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("sm_80", marks=pytest.mark.slow("csrc/cuda")),
        "sm_90",
        pytest.param("sm_100", marks=pytest.mark.slow("csrc/cuda")),
    ],
)
def test_flags_are_stores_and_no_atomics(architecture):
    """A link without native atomics (PCIe) does not make those of a peer's memory atomic."""
    kernels = {name: code for name, code in machine_code(architecture).items() if "collectives_cu" in name}
    assert len(kernels) == 26
    if architecture == "sm_80":
        kernels = {name: code for name, code in kernels.items() if "Multimem" not in name}  # they are empty
    for name, code in kernels.items():
        atomics = re.findall(r"(?<!BAR\.)\b(?:ATOMG?|RED)\.\S+", code)
        assert all(".CAS.64." in atomic for atomic in atomics), (name, atomics)  # the record's, in host memory
        if (
            "LowLatency" in name or "RmsNorm" in name
        ):  # it sets no flag: words come by themselves, 16 bytes in one store
            assert re.search(r"\bSTG?\.E\.128\.STRONG\.SYS", code) and re.search(r"\bLDG?\.E\.128\.STRONG\.SYS", code)
            assert len(re.findall(r"\bMEMBAR", code)) == len(atomics), "fences are the record's alone"
            continue
        flag = r"MEMBAR\S*\.SYS.*?\bST(?:G)?\.E\.STRONG\.SYS.*?\bLDG?\.E\.STRONG\.SYS\s.*?\bCCTL\.IVALL"
        assert re.search(flag, code, re.DOTALL), name


@needs_cuda_build
@pytest.mark.parametrize("architecture", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow("csrc/cuda"))])
def test_the_sum_in_the_switch_is_one_instruction(architecture):
    kernels = machine_code(architecture)
    of_multimem = [code for kernel, code in kernels.items() if "AllReduceMultimem" in kernel]
    assert len(of_multimem) == len(DTYPES)
    for code in of_multimem:
        assert len(re.findall(r"\bLDGMC\.\S*ADD\S*", code)) == 1
    text = "".join(of_multimem)
    widths = re.findall(r"\bLDGMC\.\S*?(F32x4|F16x8|BF16x8)", text)
    assert sorted(widths) == ["BF16x8", "F16x8", "F32x4"]
    # The switch, too, sums 16 bits in more than that; sm_100's name for it is another.
    assert len(re.findall(r"\bLDGMC\.\S*(?:F32ADD|HPADD)", text)) == 2
