"""Triton kernels: golden texts, compilation for a GPU without one, and the fuser's tests once more.

The fuser's tests run a second time in Triton's interpreter (a sample here, all with `-m slow`) and
a third time on a GPU (`-m gpu`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite import fuser
from fulgurite.device import DeviceInfo
from fulgurite.fuse import fuse
from fulgurite.fuser.codegen.triton.kernel import TritonKernelSource, write_kernels
from fulgurite.fuser.codegen.triton.module import write_module
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.lowering import has_triton, name_kernel
from fulgurite.fuser.runtime import compile_triton, triton_region
from fulgurite.fuser.runtime.autotune import neighbor_schedules
from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, make_row_limit
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from fulgurite.fuser.segment.inplace import store_in_place
from tests.forked import run_pytest
from tests.fuser import support
from tests.fuser.codegen.test_cpp import CASES, tensors
from tests.fuser.support import trace

F = torch.nn.functional
H200 = DeviceInfo("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))
ROOT = Path(__file__).parents[3]
HALF = torch.bfloat16
GPU_CASES = {
    "softmax_long": (lambda x: torch.softmax(x, -1), tensors((300, 100000), dtype=HALF)),
    "cross_entropy_long": (
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        (torch.zeros(300, 128256, dtype=HALF), torch.zeros(300, dtype=torch.int64)),
    ),
    "layer_norm_long": (
        lambda x, w: F.layer_norm(x, (50000,), w),
        tensors((300, 50000), (50000,), dtype=HALF),
    ),
    "batch_norm_columns": (lambda x: torch.var_mean(x, 0, correction=0), tensors((100352, 64))),
    "quantize_blocks": (
        lambda x: (
            (x / (x.abs().amax(-1, keepdim=True) / 448)).clamp(-448, 448).to(torch.float8_e4m3fn)
        ),
        tensors((4096, 32, 128)),
    ),
}
NAMES = [*CASES, *GPU_CASES]
# Tests of the sample in the interpreter, for pytest's -k.
SAMPLE = " or ".join(
    [
        "test_forward_is_one_kernel",
        "(test_backward_is_one_kernel and shape0)",
        "(test_cross_entropy and mean)",
        "(test_small_shapes and shape4)",
        "(test_one_kernel_for_all_lengths and (heads or row_and_column or cat_inner))",
        "test_bools or test_sums_with_dtype_bool or test_empty_reductions",
        "(test_pointwise and (test_unary or test_integers))",
        "test_nan_and_infinity",
        "(test_input_mutations and (elementwise or shape3))",
        "(test_variance and (test_shapes or small_variance or one_row))",
        "test_float8_casts",
        "(test_single_element and not (constants or shape0))",
        "(test_special and test_integer_powers and dtype1)",
        "(test_long_rows and (50257 or 131072 or 65537 or 4098 or 8201 or infinity))",
    ]
)

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")


def write_case(name: str, int64_index: bool = False) -> list[TritonKernelSource]:
    return write_sources(*(CASES | GPU_CASES)[name], int64_index)


def write_sources(
    function: Callable[..., Any], arguments: Sequence[Any], int64_index: bool = False
) -> list[TritonKernelSource]:
    """The kernels of a function on an H200."""
    return write_graph_sources(trace(function, arguments), int64_index)


def write_graph_sources(
    graph: torch.fx.GraphModule, int64_index: bool = False
) -> list[TritonKernelSource]:
    region = split_axes.split_axes(lower_graph.lower_graph(graph))
    segments = segment_region(region, make_row_limit(H200))
    _, nests = store_in_place(region, [build_loop_nest(region, part) for part in segments])
    sources: list[TritonKernelSource] = []
    for number, (part, nest) in enumerate(zip(segments, nests, strict=True)):
        schedule = choose_gpu_schedule(nest, H200)
        sources += write_kernels(name_kernel(part, number), schedule, int64_index)
    return sources


def make_schedules(function: Callable[..., Any], arguments: Sequence[Any]) -> list[GpuSchedule]:
    """The schedules of a function on an H200."""
    region = split_axes.split_axes(lower_graph.lower_graph(trace(function, arguments)))
    segments = segment_region(region, make_row_limit(H200))
    return [choose_gpu_schedule(build_loop_nest(region, part), H200) for part in segments]


def schedule_case(name: str) -> list[GpuSchedule]:
    return make_schedules(*(CASES | GPU_CASES)[name])


@pytest.mark.parametrize("name", NAMES)
def test_kernel_text(name: str, golden) -> None:
    golden(f"triton_{name}.py", write_module(write_case(name)))


@pytest.mark.parametrize(
    ("values", "fast"),
    [
        (torch.zeros(99, dtype=HALF), True),
        (torch.zeros(99), False),
        (torch.zeros(99, dtype=torch.float64), False),
        (torch.zeros(99, dtype=torch.int64), False),  # integers are exact
    ],
)
def test_fast_math_only_for_narrow_floats(values: torch.Tensor, fast: bool) -> None:
    text = write_module(write_sources(lambda x: (torch.exp(x), torch.sigmoid(-x)), (values,)))
    assert ("fast_expf" in text, "fast_sigmoid" in text) == (fast, fast), text


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float64])
def test_literals_have_the_type_of_their_operands(dtype: torch.dtype) -> None:
    """With an untyped literal, tl.maximum of Triton 3.6 widens small integers and rounds float64."""
    text = write_module(write_sources(lambda x: torch.relu(x) % 3, (torch.zeros(99, dtype=dtype),)))
    assert re.search(rf"max(imum)?\(tl.full\(\[\], 0(.0)?, tl.{str(dtype)[6:]}\), ", text), text


DISCONTINUOUS = {
    "floor": lambda x: torch.floor(x / x),
    "through_locals": lambda x: torch.ceil((1 - x / (x + 1)) * 2),
    "integer": lambda x: (1 / x).to(torch.int32),
    "equal": lambda x: torch.where(x / x == 1, x, 0),
    "root": lambda x: torch.sqrt(x).trunc(),
}


@pytest.mark.parametrize("name", DISCONTINUOUS)
def test_divisions_before_discontinuous_operations_are_exact(name: str) -> None:
    """Also with fast math, where a division may be off by 2 ulp otherwise."""
    x = torch.zeros(99, dtype=HALF)
    text = write_module(write_sources(DISCONTINUOUS[name], (x,)))
    is_exact = "tl.div_rn" in text or "tl.sqrt_rn" in text
    assert is_exact and " / " not in strip_comments(text), text
    smooth = write_module(write_sources(lambda x: (x / (x + 1), torch.sqrt(x)), (x,)))
    assert "_rn" not in smooth, smooth


def strip_comments(text: str) -> str:
    return re.sub(r"^ *#.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_neighbor_schedules_can_be_written(name: str) -> None:
    """And rows in a single block stay in a single block."""
    for schedule in schedule_case(name):
        near = neighbor_schedules(schedule)
        assert near[0] == schedule and len(near) > 1
        for other in near:
            assert write_kernels("kernel", other, False)
            if not schedule.is_looped:
                assert all(
                    other.block_sizes[axis] == schedule.block_sizes[axis]
                    for axis in other.nest.body
                )


@pytest.mark.parametrize(("width", "is_pipelined"), [(4096, True), (512, True), (128, False)])
def test_norm_backward_is_persistent(width: int, is_pipelined: bool) -> None:
    """Rows are pipelined, except several short ones (`test_short_rows.py`)."""
    function, _ = (CASES | GPU_CASES)["rms_norm_backward"]
    g, x = torch.empty(2, 16384, width, dtype=HALF)
    (schedule,) = make_schedules(function, (g, x, g[0]))
    assert schedule.kind == "persistent"
    assert (schedule.num_stages > 1) == is_pipelined and schedule.num_programs >= H200.num_cores


def test_cross_entropy_reads_its_logits_once() -> None:
    (schedule,) = schedule_case("cross_entropy_long")
    assert schedule.is_looped and schedule.passes == 1 and schedule.online_softmax


def compile_ptx(
    sources: list[TritonKernelSource], variant: int = compile_triton.ALIGNED
) -> list[str]:
    """The PTX of each kernel, for a Hopper GPU."""
    from triton.backends.compiler import GPUTarget

    module = compile_triton.load_module(write_module(sources))
    target = GPUTarget("cuda", 90, 32)
    return [
        compile_triton.compile_for_target(getattr(module, s.name), s, variant, target).asm["ptx"]
        for s in sources
    ]


@needs_triton
@pytest.mark.parametrize("name", ["rms_norm", "silu_mul_bf16", "rms_norm_backward", "transpose"])
def test_accesses_are_16_bytes_wide(name: str) -> None:
    (ptx, *_) = compile_ptx(write_case(name))
    accesses = re.findall(r"(?:ld|st)\.global[.\w]*", ptx)
    narrow = [a for a in accesses if "v4" not in a and not a.endswith("b64")]
    assert accesses and not narrow, f"accesses of fewer than 16 bytes: {narrow}"


@needs_triton
def test_unaligned_variant_has_no_wide_accesses() -> None:
    (ptx,) = compile_ptx(write_case("silu_mul_bf16"), variant=0)
    assert ".v4" not in ptx


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile(name: str) -> None:
    assert all(compile_ptx(write_case(name)))


def test_indices_have_64_bits_only_where_sizes_need_them() -> None:
    assert "int64" not in write_module(write_case("rms_norm"))
    text = write_module(write_case("layer_norm", int64_index=True))
    assert "tl.program_id(0).to(tl.int64)" in text
    large = torch.empty(1 << 16, 1 << 15, device="meta")
    small = torch.empty(1 << 15, 1 << 15, device="meta")
    for x, needs_int64 in ((large, True), (small, False)):
        region = lower_graph.lower_graph(
            trace(lambda x: x + 1, (torch.empty_like(x, device="cpu"),))
        )
        assert triton_region.needs_int64_indices(region) is needs_int64


def run_in_interpreter(*options: str) -> None:
    """Runs the fuser's tests in another process, where kernels run in Triton's interpreter."""
    done = run_pytest("tests/fuser", *options, TRITON_INTERPRET="1")
    assert done.returncode == 0, "TRITON_INTERPRET=1 pytest tests/fuser\n" + done.output[-4000:]


@needs_triton
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="already in the interpreter")
def test_sample_in_the_interpreter() -> None:
    run_in_interpreter("-k", SAMPLE)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="already in the interpreter")
def test_all_in_the_interpreter() -> None:
    run_in_interpreter("--deselect", "tests/fuser/codegen/test_triton.py")


# on a GPU


def norm_backward(g, x, w):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    gw = g * w
    dx = rstd * (gw - x * rstd * (gw * x * rstd).mean(-1, keepdim=True))
    return dx, (g * x * rstd).sum(0)


@pytest.mark.gpu
def test_unaligned_addresses() -> None:
    memory = torch.randn(1 << 16, device="cuda")
    region = fuser.lower_region(trace(lambda x: x.relu() * 2, (memory[: 1 << 15],)))
    for offset in (0, 1, 2, 4, 7):
        x = memory[offset : offset + (1 << 15)]
        assert torch.equal(region(x)[0], x.relu() * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [96, 4096, 20000])
def test_results_are_deterministic(width: int) -> None:
    g, x, w = (torch.randn(s, device="cuda") for s in ((3000, width), (3000, width), (width,)))
    region = fuser.lower_region(trace(norm_backward, (g, x, w)))
    support.check_against_eager(region(g, x, w), norm_backward, (g, x, w))
    first, second = region(g, x, w), region(g, x, w)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    x = torch.zeros((1 << 31) + 13, dtype=torch.uint8, device="cuda")
    x[-1], x[1 << 31] = 7, 5
    region = fuser.lower_region(trace(lambda x: ((x + 1), x.amax(), x.argmax()), (x,)))
    incremented, largest, position = region(x)
    assert [int(incremented[k]) for k in (-1, 1 << 31, 12345)] == [8, 6, 1]
    assert (int(largest), int(position)) == (7, (1 << 31) + 12)


@pytest.mark.gpu
def test_index_out_of_range_traps() -> None:
    program = (
        "import torch\n"
        "from tests.fuser.support import trace\n"
        "from fulgurite import fuser\n"
        "t, i = torch.randn(30, 5, device='cuda'), torch.tensor([1, 30], device='cuda')\n"
        "fuser.lower_region(trace(lambda t, i: torch.nn.functional.embedding(i, t) * 2, (t, i)))(t, i)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "index out of range" in done.stdout + done.stderr


@pytest.mark.gpu
def test_fuse_on_a_gpu() -> None:
    fused = fuse(lambda x, w: F.rms_norm(x, (64,), w) * 2)
    x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, device="cuda")
    torch.testing.assert_close(fused(x, w), F.rms_norm(x, (64,), w) * 2)
    (kernel,) = fused.kernels
    assert "@triton.jit" in kernel.source
    assert kernel.bytes_moved == 2 * 8 * 64 * 4 + 64 * 4
    assert kernel.predicted_seconds > 0 and kernel.measure() > 0


@pytest.mark.gpu
def test_autotuned_schedule_is_correct_and_cached() -> None:
    x = torch.randn(512, 3000, device="cuda")
    graph = trace(lambda x: torch.softmax(x, -1), (x,))
    first = fuser.lower_region(graph, autotune=True)
    support.check_against_eager(first(x), lambda x: torch.softmax(x, -1), (x,))
    started = time.perf_counter()
    again = fuser.lower_region(graph, autotune=True)
    again(x)
    assert time.perf_counter() - started < 0.5
    assert str(again.kernels[0].schedule) == str(first.kernels[0].schedule)
