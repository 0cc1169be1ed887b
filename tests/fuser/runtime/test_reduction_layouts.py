"""Reductions over lanes with gaps, which Triton before 3.7 compiles wrong, are found in its IR."""

from __future__ import annotations

import pytest

from fulgurite.fuser.runtime.reduction_layouts import WrongReductionError, check_reductions

IR = """
#blocked = #ttg.blocked<{{sizePerThread = [1, 1], threadsPerWarp = [4, 8], warpsPerCTA = [1, 1], order = [1, 0]}}>
#linear = #ttg.linear<{{register = [], lane = {lane}, warp = [], block = []}}>
module {{
    %0 = "tt.reduce"(%x) <{{axis = {axis} : i32}}> ({{
    ^bb0(%a: i32, %b: i32):
      %c = arith.addi %a, %b : i32
      tt.reduce.return %c : i32
    }}) : (tensor<{shape}xi32, {layout}>) -> tensor<1xi32, #ttg.slice<{{dim = 1, parent = #linear}}>>
}}
"""
SLICE = "#ttg.slice<{dim = 0, parent = #linear}>"
GAP = "[[0, 1], [0, 2], [0, 0], [0, 4], [0, 0]]"


@pytest.mark.parametrize(
    ("lane", "axis", "shape", "layout", "is_right"),
    [
        (GAP, 1, "1x8", "#linear", False),
        (GAP, 0, "8", SLICE, False),
        (GAP, 1, "1x4", "#linear", True),  # the fourth bit moves beyond the block
        (GAP, 0, "1x8", "#linear", True),
        ("[[0, 0], [0, 0], [0, 4], [0, 1], [0, 2]]", 1, "1x8", "#linear", True),
        ("[[0, 1], [1, 0], [0, 2], [2, 0], [0, 4]]", 1, "4x8", "#linear", False),
        (GAP, 1, "4x8", "#blocked", True),
    ],
)
def test_gaps_between_lanes(lane: str, axis: int, shape: str, layout: str, is_right: bool) -> None:
    ir = IR.format(lane=lane, axis=axis, shape=shape, layout=layout)
    if is_right:
        check_reductions(ir)
    else:
        with pytest.raises(WrongReductionError, match=f"dimension {axis}"):
            check_reductions(ir)
