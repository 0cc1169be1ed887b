"""Long rows and rows that start anywhere, in machine code for an H200, which needs no GPU: nothing spilled, accesses wide."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.fuser.codegen.triton.module import write_module, write_stages
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.ir.expression import Operation, walk
from fulgurite.fuser.pipeline_triton import installed
from fulgurite.fuser.runtime import compile_triton
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule, choose_gpu_schedule, row_limit
from fulgurite.fuser.schedule.gpu.register_resident import KEPT_BLOCK, scans
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from tests.fuser.support import trace
from tests.fuser.test_long_rows import BF16, F32, case
from tests.fuser.test_triton import H200

needs_compiler = pytest.mark.skipif(
    not installed() or "TRITON_INTERPRET" in os.environ, reason="no Triton that compiles"
)


def chosen(name: str, width: int, dtype: torch.dtype) -> GpuSchedule:
    function, arguments = case(name, 1, width, dtype)
    sizes = [(300, a.shape[1]) if a.dim() == 2 else a.shape for a in arguments]
    pairs = zip(arguments, sizes, strict=True)
    graph = trace(function, [torch.empty(size, dtype=a.dtype) for a, size in pairs])
    region = split_axes.refine(lower_graph.read(graph))
    (part,) = segment(region, row_limit(H200))
    return choose_gpu_schedule(build(region, part), H200)


def schedule_of(function: Any, width: int) -> list[GpuSchedule]:
    graph = trace(function, [torch.empty(300, width, dtype=BF16)])
    region = split_axes.refine(lower_graph.read(graph))
    parts = segment(region, row_limit(H200))
    return [choose_gpu_schedule(build(region, part), H200) for part in parts]


def machine_code(schedule: GpuSchedule, wide: bool = False) -> Any:
    from triton.backends.compiler import GPUTarget

    stages = write_stages("kernel", schedule, H200, wide)
    module = compile_triton.load_module(write_module(stages))
    target = GPUTarget("cuda", 90, 32)
    return compile_triton.compile_stage(module.kernel, stages[0], compile_triton.ALIGNED, target)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [
        ("rms_norm", 73728, BF16),
        ("layer_norm", 98304, BF16),
        ("rms_norm", 49152, F32),
        ("rms_norm", 131072, BF16),
        ("softmax", 131072, F32),
        ("rms_norm_backward", 16384, BF16),
        ("rms_norm", 32768, F32),
        ("softmax", 32768, F32),
        ("softmax", 49152, F32),
        ("layer_norm", 32768, F32),
        ("rms_norm", 50257, BF16),
    ],
)
def test_nothing_is_spilled(name: str, width: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tests.kernels.compile_support import SHARED_BYTES, stack_bytes

    made = machine_code(chosen(name, width, dtype))
    assert stack_bytes(made, tmp_path) == 0
    assert made.metadata.shared <= SHARED_BYTES


@needs_compiler
def test_a_walk_from_the_end_spills_little(tmp_path: Path) -> None:
    from tests.kernels.compile_support import stack_bytes

    schedule = chosen("rms_norm", 65536, F32)
    assert schedule.back and schedule.kept
    assert stack_bytes(machine_code(schedule), tmp_path) <= 8


@needs_compiler
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("width", "dtype", "size"), [(50257, BF16, 16), (50257, F32, 16), (4098, BF16, 8)]
)
def test_rows_that_start_anywhere_have_wide_accesses(
    width: int, dtype: torch.dtype, size: int, wide: bool, tmp_path: Path
) -> None:
    """So many bytes a thread but for the block of edges and the weights."""
    from tests.kernels.compile_support import stack_bytes

    schedule = chosen("softmax", width, dtype)
    assert schedule.granule == size // dtype.itemsize
    made = machine_code(schedule, wide)
    accesses = re.findall(r"(?:ld|st)\.global[.\w]*", made.asm["ptx"])
    narrow = [a for a in accesses if f".v{size // 4}.b32" not in a and not a.endswith("b64")]
    walks = schedule.passes
    assert len(narrow) <= walks + 1 and len(accesses) > 3 * len(narrow), narrow
    assert stack_bytes(made, tmp_path) <= 32


@needs_compiler
@pytest.mark.parametrize(("width", "dtype"), [(4096, F32), (50257, F32), (4096, BF16)])
def test_softmax_divides_once_a_row(width: int, dtype: torch.dtype) -> None:
    """One quotient, and none that is rounded: that calls a function for numbers out of range."""
    quotients = re.findall(
        r"div\.\w+\.f32", machine_code(chosen("softmax", width, dtype)).asm["ptx"]
    )
    assert quotients == ["div.full.f32"]


def test_quotients_by_other_sums_are_divisions() -> None:
    def operations(function: Any) -> set[str]:
        (s,) = schedule_of(function, 4096)
        parts = [p for x in s.nest.locals.values() for p in walk(x.expression)]
        return {p.name for p in parts if isinstance(p, Operation)}

    assert "share" in operations(lambda x: torch.softmax(x.float(), -1))
    assert "div" not in operations(lambda x: torch.softmax(x.float(), -1))
    assert "share" not in operations(lambda x: x.float() / x.float().exp().sum(-1, keepdim=True))
    assert "share" not in operations(lambda x: x.float().exp() / x.float().exp().sum(-1, True))


def test_rows_that_are_aligned_have_no_edges() -> None:
    for width, dtype in ((4096, BF16), (4100, BF16), (4098, F32), (73728, BF16), (50258, F32)):
        assert not chosen("rms_norm", width, dtype).granule
    assert chosen("rms_norm", 4098, BF16).granule == 8
    assert chosen("rms_norm", 50257, BF16).granule == chosen("rms_norm", 50257, F32).granule == 4
    assert chosen("softmax", 4098, BF16).granule == 4


def test_rows_that_fill_registers_are_kept_as_they_were_read() -> None:
    for name in ("rms_norm", "softmax", "layer_norm"):
        for dtype in (F32, BF16):
            assert chosen(name, 32768, dtype).kept == 4 and not chosen(name, 16384, dtype).kept


def test_rows_that_start_anywhere_have_small_blocks_where_nothing_is_beside_them() -> None:
    """Weights would be read one by one."""
    assert chosen("softmax", 50257, F32).kept * 2048 >= 50257
    assert chosen("softmax", 50257, BF16).kept * 4096 >= 50257
    assert chosen("rms_norm", 50257, F32).sizes.popitem()[1] == KEPT_BLOCK
    longest = chosen("softmax", 57001, F32)
    assert longest.kept * 2048 * 4 <= 200 << 10


def test_squares_about_a_mean_leave_room_for_shorter_rows_only() -> None:
    assert chosen("layer_norm", 73728, F32).kept and not chosen("layer_norm", 131072, F32).kept
    assert not chosen("layer_norm", 131072, BF16).kept and chosen("rms_norm", 131072, BF16).kept


def test_rows_that_must_be_read_in_order_or_once_are_not_kept() -> None:
    from tests.fuser.test_triton import schedules_of

    (entropy,) = schedules_of("cross_entropy_long")
    assert not entropy.kept and entropy.passes == 1
    for width in (4097, 50000):
        scan = schedule_of(lambda x: x.cumsum(-1) / x.float().sum(-1, keepdim=True), width)
        assert not any((s.kept or s.granule) and scans(s.nest) for s in scan)
    (sums,) = schedule_of(lambda x: (x - x.amax(-1, keepdim=True)).float().exp().sum(-1), 50257)
    assert sums.passes > 1 and sums.kept
    (online,) = schedule_of(
        lambda x: (x.float() - x.float().amax(-1, keepdim=True)).exp().sum(-1), 50257
    )
    assert online.passes == 1 and not online.kept
