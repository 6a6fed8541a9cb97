"""The check of Hopper's asynchronous products: registers of an unfinished one are touched nowhere, on any path."""

import pytest

pytest.importorskip("triton")
import sass
import wgmma

# A loop of products with an operand in registers; the next turn loads that operand.
LOOP = """
        /*0000*/                   MOV R4, RZ ;
.L_x_1:
        /*0010*/                   LDS.128 R8, [R20] ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   ISETP.GE.AND P0, PT, R21, R22, PT ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
        /*0070*/                   F2FP.BF16.F32.PACK_AB R50, R25, R24 ;
        /*0080*/                   EXIT ;
"""


def early_access(text: str) -> str:
    return wgmma.early_access(sass.parsed(text))


def test_a_loop_that_waits_is_right():
    assert early_access(LOOP) == ""


def test_an_operand_that_the_next_turn_loads_too_early_is_found():
    pending = LOOP.replace("gsb0, 0x0", "gsb0, 0x1").replace("F2FP.BF16.F32.PACK_AB R50, R25, R24", "NOP")
    assert early_access(pending).startswith("at 0010, LDS.128 R8") and "unfinished HGMMA" in early_access(pending)


def test_a_sum_that_is_read_too_early_is_found():
    once = LOOP.replace("@!P0 BRA `(.L_x_1)", "NOP").replace("gsb0, 0x0", "gsb0, 0x1")
    assert early_access(once).startswith("at 0070, F2FP.BF16.F32.PACK_AB R50")


def test_an_operand_may_be_read_and_the_sum_continued():
    more = LOOP.replace("@!P0 BRA `(.L_x_1)", "NOP").replace("F2FP.BF16.F32.PACK_AB R50, R25, R24", "MOV R50, R8")
    assert early_access(more.replace("gsb0, 0x0", "gsb0, 0x1")) == ""
    second = "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0"
    assert early_access(more.replace("gsb0, 0x0", "gsb0, 0x1").replace("MOV R50, R8", second)) == ""


def test_a_group_before_the_last_is_finished_after_a_wait_for_all_but_one():
    """The wait ends the product of R8; the operand of the newer one, R12, must stay."""
    newer = """        /*0038*/                   HGMMA.64x16x16.F32.BF16 R40, R12, gdesc[UR8], R40, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"""
    code = LOOP.replace("        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", newer)
    assert early_access(code.replace("@!P0 BRA `(.L_x_1)", "NOP")) == ""
    wider = code.replace("LDS.128 R8", "LDS.128 R12")
    assert early_access(wider).startswith("at 0010, LDS.128 R12")
