"""The committed instruction counts: ours beside the peers', what they are counted of, and that they still hold."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import sass
import static_figures
import triton

from weft.kernels import archive

ROOT = Path(__file__).parents[2]
HERE = {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
ROWS = json.loads((ROOT / static_figures.RESULTS).read_text())["rows"]
OURS = [row for row in ROWS if row["kernel"] == "weft"]


def name(row):
    return row["loop"], row["architecture"]


def test_no_peer_has_fewer_instructions_but_where_a_reason_is_given():
    above = {name(ours) for ours, _ in static_figures.above(ROWS)}
    assert above == set(static_figures.EXCEPTIONS)
    assert {name(row): row["reason"] for row in OURS if row["reason"]} == static_figures.EXCEPTIONS


def test_every_loop_is_beside_a_peers_on_every_architecture():
    compared = {name(row) for row in ROWS if row["kernel"] != "weft"}
    assert {name(row) for row in OURS} == compared
    every = set(product(static_figures.LOOPS, static_figures.ARCHITECTURES))
    assert every - compared == {("attention dq, head dim 64, masked", "sm_80")}  # the tutorial's is unrolled
    assert {row["kernel"].split()[0] for row in ROWS} == {"weft", "03", "06", "09", "liger"}


@pytest.mark.slow("kernels", "tests/gate")
@pytest.mark.timeout(900)
@pytest.mark.skipif(not archive.launches_as(triton.__version__), reason=f"counted with triton {archive.TRITON}")
@pytest.mark.parametrize("architecture", static_figures.ARCHITECTURES)
def test_our_committed_figures_are_those_of_the_kernels(architecture):
    """`python tests/gate/static_figures.py` writes them again."""
    program = f"import json; from static_figures import rows; print(json.dumps(rows({architecture!r})))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | HERE
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    compared = {name(row) for row in OURS}
    assert [row for row in json.loads(done.stdout) if name(row) in compared] == [
        row for row in OURS if row["architecture"] == architecture
    ]


CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/              @!P1 BRA `(.L_x_1) ;
        /*0030*/                   STG.E.128 [R4.64], R8 ;
        /*0040*/                   STG.E.128 [R4.64], R8 ;
.L_x_1:
        /*0050*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R2 ;
        /*0070*/              @!P0 BRA `(.L_x_4) ;
.L_x_2:
        /*0080*/                   HMMA.16816.F32 R12, R4, R6, R12 ;
        /*0090*/               @P2 BRA `(.L_x_0) ;
.L_x_3:
        /*00a0*/                   HMMA.16816.F32 R16, R4, R6, R16 ;
        /*00b0*/               @P3 BRA `(.L_x_3) ;
        /*00c0*/               @P4 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R2 ;
        /*00f0*/              @!P0 BRA `(.L_x_4) ;
        /*0100*/                   BRA `(.L_x_2) ;
"""


def test_a_turn_skips_what_it_can_and_loops_inside_count_for_themselves():
    code = sass.parsed(CODE)
    loops = code.loops_with(lambda instruction: instruction.opcode.startswith("HMMA"))
    turns = [sorted(code.turn(points, inside)) for inside, points in loops]
    # The first skips the stores and does not wait, the second is the loop in it.
    assert turns == [[1, 2, 5, 6, 7, 8, 9], [10, 11]]
    with pytest.raises(ValueError, match="no path from at 00d0, EXIT"):
        code.path(13, [0])


TUTORIAL = """
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

def fit(arguments):
    arguments["a"].block_shape = [arguments["ROWS"], 16]

tiles = [triton.Config({"ROWS": rows}, num_warps=warps, num_stages=2, pre_hook=fit) for rows, warps in ((32, 4), (64, 8))]

@triton.autotune(tiles if torch.cuda.get_device_capability() == (9, 0) else tiles[:1], key=["n"])
@triton.jit
def add(a, out, n, ROWS: tl.constexpr):
    tl.store(out + tl.arange(0, ROWS), tl.sum(a.load([0, 0]), 1) + n)

def matmul(a, out):
    add[(1,)](TensorDescriptor.from_tensor(a, [1, 16]), out, 5)

raise SystemExit("what follows is the tutorial's own run")
"""
RECORD = """
import sys
from pathlib import Path
import torch
import static_figures
with static_figures._recording(sys.argv[1]) as made:
    module = static_figures._imported(Path(sys.argv[2]), "03-matrix-multiplication")
    module.matmul(torch.zeros(64, 16), torch.zeros(64))
for each in made:
    print(each.arguments[0].block_shape, each.arguments[2], each.constants, each.warps, each.stages)
"""


@pytest.mark.slow("tests/gate")
def test_a_peer_is_recorded_with_each_of_its_tiles(tmp_path):
    (tmp_path / "03-matrix-multiplication.py").write_text(TUTORIAL)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | HERE
    found = []
    for architecture in ("sm_90", "sm_100"):
        command = [sys.executable, "-c", RECORD, architecture, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    small, large = "[32, 16] 5 {'ROWS': 32} 4 2", "[64, 16] 5 {'ROWS': 64} 8 2"
    assert found == [[small, large], [small]]
