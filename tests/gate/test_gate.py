"""The static gate: it passes what is listed and faults what is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gate as checker
import memory_orders
import pytest
import sass
import triton

from weft.kernels import archive, launch
from weft.kernels.machine_code import needs_tensor_cores

HERE = Path(__file__).parent


def gate(*arguments, program=("gate.py",), **environment):
    """Runs it where kernels are not interpreted."""
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env={**clean, **environment})


@pytest.mark.slow("kernels", "tests/gate")  # `make gate` compiles every one of them
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not archive.launches_as(triton.__version__), reason=f"what spills is known of triton {archive.TRITON} only"
)
@pytest.mark.parametrize("architecture", launch.ARCHITECTURES)
def test_a_sample_of_the_listed_variants_passes(architecture, tmp_path):
    done = gate("--architecture", architecture, "--every", "13", "--json", str(tmp_path / "table.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert len(rows) > 20 and {row["architecture"] for row in rows} == {architecture}
    instructions = {row["tensor_cores"] for row in rows}
    assert instructions == {"-", {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(architecture, "HMMA")}


@pytest.mark.slow("kernels", "tests/gate")
def test_each_fault_is_named_and_fails_the_gate(tmp_path):
    done = gate(
        "broken",
        "--architecture",
        "sm_90",
        "--json",
        str(tmp_path / "table.json"),
        PYTHONPATH=str(HERE),
        PYTHONSAFEPATH="",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    faults = {row["kernel"]: row["fault"] for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert "registers spilled" in faults["spills"]
    assert "shared memory, 232448 allowed" in faults["fills_shared_memory"]
    assert faults["has_a_small_dot"] == "a dot without HGMMA"
    assert faults["does_not_compile"].startswith("does not compile: ")
    assert "wgmma.mma_async instructions are serialized" in faults["serialises_its_products"]
    assert "wgmma.mma_async instructions are serialized" in faults["rewrites_registers_of_a_product"]
    assert re.fullmatch(r"(RED|ATOM)\S*F32\S* adds in any order", faults["adds_in_any_order"])
    assert faults["overtakes"] == "x is stored before all threads have loaded it (!tt.ptr<f32>)"
    assert "8 variants, 8 with a fault" in done.stdout


def test_sums_in_any_order_are_known_by_their_opcodes():
    for opcode in ("UTMAREDG.2D.ADD", "UBLKRED.G.S.ADD.F32.RN", "ATOMG.E.ADD.BF16x2.RN.STRONG.GPU", "RED.E.ADD.F64.RN"):
        assert checker._ADDS_IN_ANY_ORDER.match(opcode), opcode
    for opcode in ("REDUX.MAX.F32", "RED.E.MAX.F32.STRONG.GPU", "ATOMG.E.ADD.STRONG.GPU", "ATOMG.E.CAS.STRONG.SYS"):
        assert not checker._ADDS_IN_ANY_ORDER.match(opcode), opcode


OUTER_LOOP = """
.L_x_1:
        /*0000*/                   {before} ;
.L_x_2:
        /*0010*/                   {inside} ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(
    ("before", "inside", "spilled_bytes", "fault"),
    [
        ("LDL R4, [R1]", "HMMA.16816.F32 R8, R4, R6, R8", 8, ""),
        ("MOV R4, R5", "LDL.LU R4, [R1]", 8, "at 0010, LDL.LU R4, [R1] reloads spilled registers in an innermost loop"),
        ("STL.64 [R1], R4", "NOP", 264, "264 bytes of registers spilled"),
    ],
)
def test_only_what_an_innermost_loop_reloads_is_a_fault(before, inside, spilled_bytes, fault):
    code = sass.parsed(OUTER_LOOP.format(before=before, inside=inside))
    assert checker.spills(code, spilled_bytes) == fault


@pytest.mark.slow("kernels", "tests/gate")
def test_every_flag_function_has_its_memory_order():
    done = gate("memory_orders")
    assert done.returncode == 0, done.stdout + done.stderr
    for architecture in launch.ARCHITECTURES:
        checked = {line.split()[0] for line in done.stdout.splitlines() if f"{architecture} " in line}
        assert checked == {"wait", "put", "post", "last"}


@pytest.mark.slow("kernels", "tests/gate")
def test_a_relaxed_memory_order_is_a_fault(tmp_path):
    table = tmp_path / "table.json"
    done = gate("--architecture", "sm_90", "--json", str(table), program=[str(HERE / "weak_orders.py")])
    assert done.returncode == 1, done.stdout + done.stderr
    faults = {row["kernel"]: row["fault"] for row in json.loads(table.read_text())["rows"] if row["fault"]}
    assert set(faults) == {"wait", "put", "post", "last"}
    assert all(fault.startswith(f"signal.{function}: no ") for function, fault in faults.items())


def test_an_assembler_that_drops_a_fence_is_a_fault():
    ptx = "st.release.sys.global.u32"
    fenced = "BAR.SYNC 0x0 ; MEMBAR.ALL.SYS ; STG.E.STRONG.SYS [R2.64], R5 ;"
    assert memory_orders.fault("post", ptx, fenced) == ""
    assert "instead of BAR.SYNC" in memory_orders.fault("post", ptx, fenced.replace("MEMBAR.ALL.SYS ;", ""))


WAITING = """
.L_x_1:
        /*0000*/                   LDG.E.STRONG.SYS R4, [R2] ;
        /*0010*/                   CCTL.IVALL ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   FENCE.VIEW.ASYNC.G ;
        /*0040*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_a_tensor_load_that_no_fence_separates_from_a_wait_is_a_fault():
    def fault(text):
        return memory_orders.unfenced(sass.parsed(text))

    assert fault(WAITING) == ""
    assert fault(WAITING.replace("CCTL.IVALL", "NOP").replace("FENCE.VIEW.ASYNC.G", "NOP")) == "", "it does not wait"
    assert fault(WAITING.replace("FENCE.VIEW.ASYNC.G", "NOP")).startswith("at 0040, UTMALDG.2D")
    around = WAITING.replace(
        "/*0030*/                   FENCE", "/*0030*/              @!P2 BRA `(.L_x_2) ;\n/*0038*/ FENCE"
    )
    around = around.replace("        /*0040*/", ".L_x_2:\n        /*0040*/")
    assert fault(around).startswith("at 0040, UTMALDG.2D"), "a path around the fence"


@pytest.mark.slow("kernels", "tests/gate")
def test_where_kernels_are_interpreted_there_is_nothing_to_check():
    done = gate("matmul", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "unset it" in done.stderr


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        (
            "%1 = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<64x32xf32> * tensor<32x64xf32> -> tensor<64x64xf32>",
            True,
        ),
        ("%1 = tt.dot %a, %b, %c : tensor<64x32xf32> * tensor<32x64xf32> -> tensor<64x64xf32>", False),
        ("%1 = tt.dot %a, %b, %c : tensor<64x32xbf16> * tensor<32x64xbf16> -> tensor<64x64xf32>", True),
        ("%1 = arith.addf %a, %b", False),
    ],
)
def test_only_ieee_fp32_is_excused_from_tensor_cores(line, needed):
    assert needs_tensor_cores(line) == needed
