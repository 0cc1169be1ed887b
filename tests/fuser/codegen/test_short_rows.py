"""Norm backward over many short rows as machine code for an H200, compiled without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from tests.fuser.codegen.test_machine_code import compile_schedule, needs_compiler
from tests.fuser.codegen.test_triton import H200, make_schedules
from tests.fuser.schedule.test_short_rows import BF16, F32, make_case

REGISTERS = 1 << 16  # of an SM


def schedule_case(name: str, width: int, dtype: torch.dtype) -> GpuSchedule:
    """The schedule of 64 Mi elements."""
    function, arguments = make_case(name, 1, width, dtype)
    rows = (64 << 20) // width
    sizes = [(rows, a.shape[1]) if a.dim() == 2 else a.shape for a in arguments]
    pairs = zip(arguments, sizes, strict=True)
    inputs = [torch.empty(size, dtype=a.dtype) for a, size in pairs]
    (schedule,) = make_schedules(function, inputs)
    return schedule


@pytest.mark.covering
@needs_compiler
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(64, F32), (96, BF16), (128, BF16), (128, F32), (256, BF16)]
)
def test_rows_lie_within_warps(name: str, width: int, dtype: torch.dtype) -> None:
    """No barrier, since a row is one access of a warp or less, and few shuffles: no other layout."""
    schedule = schedule_case(name, width, dtype)
    assert schedule.num_stages == 1
    kernel = compile_schedule(schedule)
    loop = find_loop(kernel.asm["ptx"])
    assert "bar.sync" not in loop
    reductions = 1 if name == "rms_norm" else 2
    assert loop.count("shfl.sync") <= 24 * reductions
    assert "convert_layout" not in kernel.asm["ttgir"].partition("scf.for")[2].partition("yield")[0]


@needs_compiler
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(64, F32), (96, BF16), (100, F32), (128, F32), (192, BF16), (256, BF16)]
)
def test_all_programs_are_resident(
    name: str, width: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    from tests.kernels.compile_support import register_count  # needs Triton

    schedule = schedule_case(name, width, dtype)
    registers = register_count(compile_schedule(schedule), tmp_path)
    programs_per_sm = -(-schedule.num_programs // H200.num_cores)
    assert programs_per_sm * schedule.num_warps * 32 * registers <= REGISTERS
    assert programs_per_sm >= 4, "loads are hidden by other programs"


@pytest.mark.parametrize(("width", "dtype"), [(32, BF16), (64, BF16), (256, F32), (512, BF16)])
def test_shorter_and_longer_rows_are_pipelined(width: int, dtype: torch.dtype) -> None:
    """Measured: these lose by the schedule of short rows."""
    assert schedule_case("rms_norm", width, dtype).num_stages > 1


def find_loop(ptx: str) -> str:
    """The text from a label to the first branch back to it."""
    for branch in re.finditer(r"bra[.\w]*\s+(\$L\w+);", ptx):
        start = ptx.find(f"{branch[1]}:")
        if 0 <= start < branch.start():
            return ptx[start : branch.start()]
    raise AssertionError("the kernel has no loop")
