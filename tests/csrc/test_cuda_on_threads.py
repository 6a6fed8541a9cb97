"""The CUDA collectives' kernels, run on threads of the CPU: the same source, compiled by g++ (tests/cuda_on_threads).

Flags are atomic there and all else is plain memory, so a thread sanitizer reports every access that no flag orders.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from weft import _C

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "cuda_on_threads"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread", f"-I{ROOT / 'csrc' / 'cuda'}"]
RACE_FOUND = 66
TIMED_OUT, MISMATCHED, STOPPED = (_C.wait_record.states[name] for name in ("timed_out", "mismatched", "stopped"))
CODES = {name: code for code, name in _C.wait_record.names.items()}
IN_BOXES = ("all_reduce (low_latency)", "all_reduce_rms_norm")  # have neither meetings nor flags
OPERATIONS = {  # their codes, and those of their first meetings
    name: (CODES[name], CODES[phase])
    for name, phase in {
        "barrier": "arrived",
        "all_reduce (one_shot)": "staged",
        "all_reduce (two_shot)": "staged",
        "all_reduce (in place)": "arrived",
        "all_reduce (multimem)": "arrived",
        "reduce_scatter": "staged",
        "all_gather": "staged",
        "reduce_scatter (in place)": "arrived",
        "all_gather (in place)": "arrived",
        "all_gather (by copies)": "arrived",
        **dict.fromkeys(IN_BOXES, "staged"),
    }.items()
}
IN_SYMMETRIC_MEMORY = [name for name in OPERATIONS if "(in place)" in name]
# Meetings that order accesses. The third one in place orders the same as the second: it is there for late ranks.
MEETINGS = [("barrier", "12"), ("all_gather (by copies)", "12")] + [
    (name, meetings)
    for name in OPERATIONS
    if name not in ("barrier", "all_gather (by copies)", *IN_BOXES)
    for meetings in ("1", "23" if name in (*IN_SYMMETRIC_MEMORY, "all_reduce (multimem)") else "2")
]

pytestmark = [
    pytest.mark.slow("csrc/cuda"),
    pytest.mark.skipif(COMPILER is None, reason="no g++ here"),
]


def run(program, *arguments, timeout_s=120):
    environment = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1:exitcode={RACE_FOUND}"}
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, env=environment
    )


def output(program, *arguments):
    done = run(program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(text):
    names = list(_C.wait_record.fields)[:8]
    return [dict(zip(names, map(int, line.split()), strict=True)) for line in text.splitlines()]


def compiled(folder, *flags):
    program = folder / "collectives"
    subprocess.run([COMPILER, *FLAGS, *flags, HERE / "main.cpp", "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("plain"), "-O2")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    (folder / "nothing.cpp").write_text("int main() {}")
    tried = subprocess.run(
        [COMPILER, "-fsanitize=thread", folder / "nothing.cpp", "-o", folder / "nothing"], capture_output=True
    )
    if tried.returncode != 0 or run(folder / "nothing").returncode != 0:
        pytest.skip("no thread sanitizer here, or none that this kernel's memory layout allows")
    return compiled(folder, "-O1", "-g", "-fsanitize=thread")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_calls_back_to_back_give_the_bits_of_a_plain_sum(program, seed):
    assert output(program, "random", seed, 40, 30) == "40 rounds of 30 calls\n"


def test_flags_order_every_access(sanitized):
    assert output(sanitized, "random", 4, 15, 20) == "15 rounds of 20 calls\n"


@pytest.mark.parametrize(("operation", "meetings"), MEETINGS)
def test_a_meeting_that_is_left_out_is_found(sanitized, operation, meetings):
    done = run(sanitized, "without", operation, meetings)
    assert done.returncode == RACE_FOUND and "data race" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in ("barrier", *IN_BOXES)])
def test_a_flag_that_does_not_release_is_found(sanitized, operation):
    done = run(sanitized, "relaxed", operation)
    assert done.returncode == RACE_FOUND and "data race" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_norm_of_the_sum_has_the_bits_of_a_plain_one(program, world):
    """Any number of rows and elements; the plain one is compared with fp64."""
    assert output(program, "norms", world, 24) == "24 rounds, with long rows\n"


def test_nan_of_all_ones_arrives(program):
    output(program, "ones")


def test_a_rank_that_does_not_come_is_named_and_results_are_nan(program):
    found = records(output(program, "missing"))
    assert len(found) == len(OPERATIONS)
    for record, (code, phase) in zip(found, OPERATIONS.values(), strict=True):
        assert record["block"] in (0, 1) and record["expected"] % 4 == 1, record
        fields = {key: record[key] for key in ("state", "rank", "operation", "phase", "peer", "seen")}
        assert fields == dict(state=TIMED_OUT, rank=0, operation=code, phase=phase, peer=2, seen=0)


def test_ranks_that_call_different_things_raise(program):
    of_0, of_1, of_2 = records(output(program, "different"))
    for rank, record in enumerate((of_0, of_1, of_2)):
        assert (record["state"], record["rank"], record["operation"]) == (MISMATCHED, rank, 2)
        assert 0 < record["seen"] < 2**31 and 0 < record["expected"] < 2**31
    assert of_0["peer"] == of_2["peer"] == 1
    assert of_0["expected"] == of_2["expected"] == of_1["seen"] and of_0["seen"] == of_2["seen"] == of_1["expected"]


def test_the_host_can_end_a_wait(program):
    (record,) = records(output(program, "stopped"))
    assert (record["state"], record["peer"]) == (STOPPED, 1)  # as the host wrote it


@pytest.mark.parametrize("operation", [*IN_SYMMETRIC_MEMORY, "all_gather (by copies)"])
def test_a_rank_that_is_overtaken_takes_no_result_for_right(program, operation):
    of_1, of_2 = records(output(program, "overtaken", operation))
    assert (of_1["state"], of_1["rank"]) == (TIMED_OUT, 1)
    assert (of_2["state"], of_2["rank"]) == (TIMED_OUT, 2)


@pytest.mark.parametrize(
    ("scenario", "complaint"),
    [
        (["missing", "marks"], "has changed staging memory"),
        (["overtaken", "all_reduce (in place)", "3"], "of all_reduce (in place) of float32 on rank 1"),
        (["overtaken", "reduce_scatter (in place)", "3"], "of reduce_scatter (in place) of float32 on rank 2"),
        (["overtaken", "all_gather (in place)", "3"], "of all_gather (in place)"),
        (["overtaken", "all_gather (by copies)", "2"], "of all_gather (by copies)"),
    ],
    ids=lambda value: " without ".join(value[1:]) if isinstance(value, list) else "",
)
def test_what_keeps_late_ranks_right_is_needed(program, scenario, complaint):
    done = run(program, *scenario)
    assert done.returncode == 1 and complaint in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_a_late_rank_does_sums_are_right_or_nan(program, seed):
    right, _, _, spoiled, _ = output(program, "late", seed, 40).split()
    assert int(right) > 10_000 and int(spoiled) > 10_000  # both happened
