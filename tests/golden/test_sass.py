"""The search for ptxas's fault finds it, and nothing of what the stack is used for."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden.sass import faults

LINE = "        /*2e70*/                   {} ;    /* 0x000000ff01007212 */\n"


@pytest.mark.parametrize(
    "text",
    [
        "F2FP.F16.E4M3.UNPACK_B R2, R1",
        "LOP3.LUT R30, R1, 0xffff, RZ, 0xc0, !PT",
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R0, R4, R1",
        "@!P0 PRMT R5, R6, 0x5410, R1",
        "STG.E desc[UR4][R2.64], R1",
    ],
)
def test_what_is_found(text):
    assert faults(LINE.format(text)) == [text]


@pytest.mark.parametrize(
    "text",
    [
        "LDC R1, c[0x0][0x28]",
        "IADD3 R1, R1, -0x10, RZ",
        "VIADD R1, R1, 0xfffffff0",
        "STL.64 [R1+0x8], R10",
        "@P1 LDL R4, [R1]",
        "IADD3 R2, R1, 0x8, RZ",
        "FMUL R11, R12, R13",
    ],
)
def test_what_is_the_stacks(text):
    assert not faults(LINE.format(text))
