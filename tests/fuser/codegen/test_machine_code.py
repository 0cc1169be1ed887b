"""Long and unaligned rows as machine code for an H200, compiled without a GPU: spills, access widths.

Also which schedules such rows get.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fulgurite.compile import compile
from fulgurite.fuser.codegen.triton.kernel import write_kernels
from fulgurite.fuser.codegen.triton.module import write_module
from fulgurite.fuser.ir.expression import Operation, walk
from fulgurite.fuser.lowering import has_triton
from fulgurite.fuser.runtime import compile_triton
from fulgurite.fuser.schedule.analysis import has_scan
from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from fulgurite.kernels.tuning import fuser_gpu
from tests.fuser.codegen.test_triton import make_schedules, schedule_case
from tests.fuser.schedule.test_long_rows import BF16, F32, make_case

needs_compiler = pytest.mark.skipif(
    not has_triton() or "TRITON_INTERPRET" in os.environ, reason="needs Triton's compiler"
)


def schedule_op(name: str, width: int, dtype: torch.dtype) -> GpuSchedule:
    """The schedule of an op on 300 rows."""
    function, arguments = make_case(name, 1, width, dtype)
    sizes = [(300, a.shape[1]) if a.dim() == 2 else a.shape for a in arguments]
    pairs = zip(arguments, sizes, strict=True)
    inputs = [torch.empty(size, dtype=a.dtype) for a, size in pairs]
    (schedule,) = make_schedules(function, inputs)
    return schedule


def schedule_rows(function: Any, width: int) -> list[GpuSchedule]:
    """The schedules of a function on 300 rows of bfloat16."""
    return make_schedules(function, [torch.empty(300, width, dtype=BF16)])


def compile_schedule(schedule: GpuSchedule, int64_index: bool = False) -> Any:
    from triton.backends.compiler import GPUTarget

    sources = write_kernels("kernel", schedule, int64_index)
    module = compile_triton.load_module(write_module(sources))
    target = GPUTarget("cuda", 90, 32)
    return compile_triton.compile_for_target(
        module.kernel, sources[0], compile_triton.ALIGNED, target
    )


def count_stack_bytes(kernel: Any, folder: Path) -> int:
    """Bytes that a compiled kernel spills to its stack."""
    from tests.kernels.compile_support import stack_bytes  # needs Triton

    return stack_bytes(kernel, folder)


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
def test_no_register_spills(name: str, width: int, dtype: torch.dtype, tmp_path: Path) -> None:
    kernel = compile_schedule(schedule_op(name, width, dtype))
    assert count_stack_bytes(kernel, tmp_path) == 0
    assert kernel.metadata.shared <= 227 << 10, "more shared memory than a program has on an H200"


@needs_compiler
def test_alternating_direction_spills_at_most_two_registers(tmp_path: Path) -> None:
    schedule = schedule_op("rms_norm", 65536, F32)
    assert schedule.alternates_direction and schedule.resident_blocks
    assert count_stack_bytes(compile_schedule(schedule), tmp_path) <= 8


@pytest.mark.covering
@needs_compiler
@pytest.mark.parametrize("int64_index", [False, True])
@pytest.mark.parametrize(
    ("width", "dtype", "size"), [(50257, BF16, 16), (50257, F32, 16), (4098, BF16, 8)]
)
def test_unaligned_rows_have_wide_accesses(
    width: int, dtype: torch.dtype, size: int, int64_index: bool, tmp_path: Path
) -> None:
    """Accesses of `size` bytes a thread, except for the block of edges."""
    schedule = schedule_op("softmax", width, dtype)
    assert schedule.peel_width == size // dtype.itemsize
    kernel = compile_schedule(schedule, int64_index)
    accesses = re.findall(r"(?:ld|st)\.global[.\w]*", kernel.asm["ptx"])
    narrow = [a for a in accesses if f".v{size // 4}.b32" not in a and not a.endswith("b64")]
    assert len(narrow) <= schedule.passes + 1 and len(accesses) > 3 * len(narrow), narrow
    assert count_stack_bytes(kernel, tmp_path) <= 32


@needs_compiler
@pytest.mark.parametrize(("width", "dtype"), [(4096, F32), (50257, F32), (4096, BF16)])
def test_softmax_divides_once_a_row(width: int, dtype: torch.dtype) -> None:
    """One approximate division; a correctly rounded one calls a function for numbers out of range."""
    kernel = compile_schedule(schedule_op("softmax", width, dtype))
    assert re.findall(r"div\.\w+\.f32", kernel.asm["ptx"]) == ["div.full.f32"]


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_products_are_rounded_before_they_are_added(dtype: torch.dtype) -> None:
    """torch rounds between two ops. With a fused multiply-add, a*b - max(a*b) would not be 0."""

    def center(x: torch.Tensor) -> torch.Tensor:
        scaled = x * 0.3
        return scaled - scaled.amax(-1, keepdim=True)

    (schedule,) = make_schedules(center, [torch.empty(300, 512, dtype=dtype)])
    assert "fma." not in compile_schedule(schedule).asm["ptx"]


def test_only_softmax_uses_softmax_div() -> None:
    def find_operations(function: Any) -> set[str]:
        (schedule,) = schedule_rows(function, 4096)
        parts = [p for x in schedule.nest.locals.values() for p in walk(x.expression)]
        return {p.name for p in parts if isinstance(p, Operation)}

    softmax = find_operations(lambda x: torch.softmax(x.float(), -1))
    assert "softmax_div" in softmax and "div" not in softmax
    for function in (
        lambda x: x.float() / x.float().exp().sum(-1, keepdim=True),
        lambda x: x.float().exp() / x.float().exp().sum(-1, True),
    ):
        assert "softmax_div" not in find_operations(function)


def test_peel_widths() -> None:
    for width, dtype in ((4096, BF16), (4100, BF16), (4098, F32), (73728, BF16), (50258, F32)):
        assert not schedule_op("rms_norm", width, dtype).peel_width, "aligned rows have no edges"
    assert schedule_op("rms_norm", 4098, BF16).peel_width == 8
    assert schedule_op("rms_norm", 50257, BF16).peel_width == 4
    assert schedule_op("rms_norm", 50257, F32).peel_width == 4
    assert schedule_op("softmax", 4098, BF16).peel_width == 4


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["rms_norm", "softmax", "layer_norm"])
def test_long_rows_are_register_resident(name: str, dtype: torch.dtype) -> None:
    assert schedule_op(name, 32768, dtype).resident_blocks == 4
    assert not schedule_op(name, 16384, dtype).resident_blocks


def test_unaligned_rows_without_weights_have_small_blocks() -> None:
    """With small blocks, weights would be read one by one."""
    assert schedule_op("softmax", 50257, F32).resident_blocks * 2048 >= 50257
    assert schedule_op("softmax", 50257, BF16).resident_blocks * 4096 >= 50257
    block = schedule_op("rms_norm", 50257, F32).block_sizes.popitem()[1]
    assert block == fuser_gpu.RESIDENT_BLOCK
    longest = schedule_op("softmax", 57001, F32)
    assert longest.resident_blocks * 2048 * 4 <= 200 << 10


def test_welford_limits_the_length_of_resident_rows() -> None:
    assert schedule_op("layer_norm", 73728, F32).resident_blocks
    assert not schedule_op("layer_norm", 131072, F32).resident_blocks
    assert not schedule_op("layer_norm", 131072, BF16).resident_blocks
    assert schedule_op("rms_norm", 131072, BF16).resident_blocks


def test_scans_and_single_passes_are_not_resident() -> None:
    (entropy,) = schedule_case("cross_entropy_long")
    assert not entropy.resident_blocks and entropy.passes == 1
    for width in (4097, 50000):
        scan = schedule_rows(lambda x: x.cumsum(-1) / x.float().sum(-1, keepdim=True), width)
        assert not any((s.resident_blocks or s.peel_width) and has_scan(s.nest) for s in scan)
    (sums,) = schedule_rows(lambda x: (x - x.amax(-1, keepdim=True)).float().exp().sum(-1), 50257)
    assert sums.passes > 1 and sums.resident_blocks
    (online,) = schedule_rows(
        lambda x: (x.float() - x.float().amax(-1, keepdim=True)).exp().sum(-1), 50257
    )
    assert online.passes == 1 and not online.resident_blocks


def pool(x: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool3d(x.reshape(1, 1, -1, 1, x.size(-1)), (3, 1, 2))


@needs_compiler
def test_quotients_have_64_bits() -> None:
    """ptxas compiles differences of 32-bit quotients that are extended to 64 bits wrong."""
    (schedule,) = make_schedules(pool, [torch.empty(1, 1, 130)])
    ptx = compile_schedule(schedule).asm["ptx"]
    assert "mul.hi.s64" in ptx and "mul.hi.u32" not in ptx


def repeat(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each number three times: a quotient of the position."""
    n = like.shape[-1] // 3
    return torch.arange(n, dtype=dtype, device=like.device).view(-1, 1).expand(n, 3).reshape(-1)


WIDENED_QUOTIENTS = {
    "masked": (lambda x: ((x & 0xFFFFFF) // 3).long() - x, (900,)),
    "truncated": (lambda x: torch.div(x & 0xFFFFFF, 3, rounding_mode="trunc").long() - x, (900,)),
    "positions": (lambda x: (repeat(x, torch.int64) - x).amax(-1), (4, 210000)),
    "32-bit positions": (
        lambda x: (repeat(x, torch.int32).long() - x.long()).amax(-1),
        (4, 210000),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", WIDENED_QUOTIENTS)
@pytest.mark.parametrize("int64_index", [False, True])
def test_32_bit_quotients_are_signed(name: str, int64_index: bool) -> None:
    """ptxas subtracts from an extended unsigned quotient wrong: `mul.hi.u32`, `cvt.u64.u32`, `sub.s64`."""
    function, size = WIDENED_QUOTIENTS[name]
    (schedule, *_) = make_schedules(function, [torch.empty(size, dtype=torch.int32)])
    ptx = compile_schedule(schedule, int64_index).asm["ptx"]
    quotients = re.findall(r"mul\.hi\.u32\s+(%r\d+)", ptx)
    extended = re.findall(r"cvt\.u64\.u32\s+%rd\d+, (%r\d+)", ptx)
    assert "sub.s64" in ptx and not set(quotients) & set(extended)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDENED_QUOTIENTS)
def test_differences_of_32_bit_quotients_on_a_gpu(name: str) -> None:
    function, size = WIDENED_QUOTIENTS[name]
    x = torch.randint(-5, 5, size, dtype=torch.int32, device="cuda")
    torch.testing.assert_close(compile(function)(x), function(x))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [130, 7, 64])
def test_differences_of_quotients_on_a_gpu(size: int) -> None:
    x = torch.randn(1, 1, size, device="cuda")
    torch.testing.assert_close(compile(pool)(x), pool(x))
    n = torch.arange(100, device="cuda")
    window = lambda n: (n + 3) // 3 - n // 3  # noqa: E731
    torch.testing.assert_close(compile(window)(n), window(n))
