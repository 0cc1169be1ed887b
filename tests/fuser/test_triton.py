"""Triton kernels: their text, that they compile for a GPU without one, and the fuser's tests once more.

The other files of this folder run a second time in Triton's interpreter (a sample of them here, everything
with `-m slow`) and a third time on a GPU (`-m gpu`).
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
from fulgurite.device import Device
from fulgurite.fuse import fuse
from fulgurite.fuser.codegen.kernel_names import kernel_name
from fulgurite.fuser.codegen.triton.module import Stage, write_module, write_stages
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.frontend.input_mutations import in_place
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.pipeline_triton import installed
from fulgurite.fuser.runtime import compile_triton, triton_region
from fulgurite.fuser.runtime.autotune import neighbours
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule, choose_gpu_schedule, row_limit
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from tests.fuser import support
from tests.fuser.support import trace
from tests.fuser.test_golden import CASES, tensors

F = torch.nn.functional
H200 = Device("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))
ROOT = Path(__file__).parents[2]
HALF = torch.bfloat16
MORE = {
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
NAMES = [*CASES, *MORE]
SAMPLE = " or ".join(
    [
        "test_forward_is_one_kernel",
        "(test_backward_is_one_kernel and shape0)",
        "(test_cross_entropy and mean)",
        "(test_small_shapes and shape4)",
        "(test_one_kernel_for_all_lengths and (heads or row_and_column or cat_inner))",
        "test_bools or test_sums_of_bools or test_nothing_to_reduce",
        "(test_pointwise and (test_unary or test_integers))",
        "test_nan_and_infinity",
        "(test_writes and (elementwise or shape3))",
        "(test_variance and (test_shapes or small_spread or one_row))",
        "test_float8_casts",
        "(test_single_places and not (constants or shape0))",
        "(test_special and test_powers and dtype1)",
        "(test_long_rows and (50257 or 131072 or 65537 or 4098 or 8201 or infinity))",
    ]
)

needs_triton = pytest.mark.skipif(not installed(), reason="Triton is not installed")


def stages_of(name: str, wide: bool = False) -> list[Stage]:
    return stages(*(CASES | MORE)[name], wide)


def stages(
    function: Callable[..., Any], arguments: Sequence[Any], wide: bool = False
) -> list[Stage]:
    return graph_stages(trace(function, arguments), wide)


def graph_stages(graph: torch.fx.GraphModule, wide: bool = False) -> list[Stage]:
    """The kernels that an H200 gets of a region."""
    region = split_axes.refine(lower_graph.read(graph))
    found: list[Stage] = []
    parts = segment(region, row_limit(H200))
    _, nests = in_place(region, [build(region, part) for part in parts])
    for number, (part, nest) in enumerate(zip(parts, nests, strict=True)):
        schedule = choose_gpu_schedule(nest, H200)
        found += write_stages(kernel_name(part, number), schedule, H200, wide)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_kernel_text(name: str, golden) -> None:
    golden(f"triton_{name}.py", write_module(stages_of(name)))


@pytest.mark.parametrize(
    ("values", "fast"),
    [
        (torch.zeros(99, dtype=HALF), True),
        (torch.zeros(99), False),
        (torch.zeros(99, dtype=torch.float64), False),
        (torch.zeros(99, dtype=torch.int64), False),  # which are exact
    ],
)
def test_approximations_are_for_narrow_floats(values: torch.Tensor, fast: bool) -> None:
    text = write_module(stages(lambda x: (torch.exp(x), torch.sigmoid(-x)), (values,)))
    assert ("fast_expf" in text, "quick_sigmoid" in text) == (fast, fast), text


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float64])
def test_a_number_among_others_has_their_type(dtype: torch.dtype) -> None:
    """Else what is smaller than an int32 becomes one, and a double is rounded (tl.maximum of Triton 3.6)."""
    text = write_module(stages(lambda x: torch.relu(x) % 3, (torch.zeros(99, dtype=dtype),)))
    assert re.search(rf"max(imum)?\(.*, tl.full\(\[\], 0(.0)?, tl.{str(dtype)[6:]}\)\)", text), text


JUMPING = {
    "floor": lambda x: torch.floor(x / x),
    "through_locals": lambda x: torch.ceil((1 - x / (x + 1)) * 2),
    "integer": lambda x: (1 / x).to(torch.int32),
    "equal": lambda x: torch.where(x / x == 1, x, 0),
    "root": lambda x: torch.sqrt(x).trunc(),
}


@pytest.mark.parametrize("name", JUMPING)
def test_what_jumps_has_exact_quotients(name: str) -> None:
    """In kernels of narrow floats, too, where a quotient may be two last places off otherwise."""
    x = torch.zeros(99, dtype=HALF)
    text = write_module(stages(JUMPING[name], (x,)))
    assert ("tl.div_rn" in text or "tl.sqrt_rn" in text) and " / " not in without_formulas(text), (
        text
    )
    smooth = write_module(stages(lambda x: (x / (x + 1), torch.sqrt(x)), (x,)))
    assert "_rn" not in smooth, smooth


def without_formulas(text: str) -> str:
    return re.sub(r"^ *#.*$", "", text, flags=re.MULTILINE)


def schedules_of(name: str) -> list[GpuSchedule]:
    function, arguments = (CASES | MORE)[name]
    region = split_axes.refine(lower_graph.read(trace(function, arguments)))
    parts = segment(region, row_limit(H200))
    return [choose_gpu_schedule(build(region, part), H200) for part in parts]


@pytest.mark.parametrize("name", NAMES)
def test_a_search_stays_near(name: str) -> None:
    """Neighbours can be written, and rows that are held whole stay whole."""
    for schedule in schedules_of(name):
        near = neighbours(schedule)
        assert near[0] == schedule and len(near) > 1
        for other in near:
            assert write_stages("kernel", other, H200, False)
            if not schedule.looped:
                assert all(other.sizes[axis] == schedule.sizes[axis] for axis in other.nest.body)


def test_norm_backward_fetches_rows_ahead() -> None:
    (schedule,) = schedules_of("rms_norm_backward")
    assert schedule.kind == "walking" and schedule.stages > 1 and schedule.programs >= H200.threads


def test_cross_entropy_reads_its_logits_once() -> None:
    (schedule,) = schedules_of("cross_entropy_long")
    assert schedule.looped and schedule.passes == 1 and schedule.online


def compiled(stages: list[Stage], variant: int = compile_triton.ALIGNED) -> list[str]:
    """The PTX of each stage, for a Hopper GPU."""
    from triton.backends.compiler import GPUTarget

    module = compile_triton.load_module(write_module(stages))
    target = GPUTarget("cuda", 90, 32)
    return [
        compile_triton.compile_stage(getattr(module, s.name), s, variant, target).asm["ptx"]
        for s in stages
    ]


@needs_triton
@pytest.mark.parametrize("name", ["rms_norm", "silu_mul_bf16", "rms_norm_backward", "transpose"])
def test_it_compiles_with_wide_accesses(name: str) -> None:
    (ptx, *_) = compiled(stages_of(name))
    accesses = re.findall(r"(?:ld|st)\.global[.\w]*", ptx)
    narrow = [a for a in accesses if "v4" not in a and not a.endswith("b64")]
    assert accesses and not narrow, f"accesses of fewer than 16 bytes: {narrow}"


@needs_triton
def test_addresses_that_are_not_aligned_are_not_taken_for_aligned() -> None:
    (ptx,) = compiled(stages_of("silu_mul_bf16"), variant=0)
    assert ".v4" not in ptx


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles(name: str) -> None:
    assert all(compiled(stages_of(name)))


def test_indices_have_64_bits_only_where_sizes_need_them() -> None:
    assert "int64" not in write_module(stages_of("rms_norm"))
    assert "tl.program_id(0).to(tl.int64)" in write_module(stages_of("layer_norm", wide=True))
    large = torch.empty(1 << 16, 1 << 15, device="meta")
    small = torch.empty(1 << 15, 1 << 15, device="meta")
    for x, wide in ((large, True), (small, False)):
        region = lower_graph.read(trace(lambda x: x + 1, (torch.empty_like(x, device="cpu"),)))
        assert triton_region.needs_wide(region) is wide


def run_again(*options: str) -> None:
    """The fuser's tests in a process of its own, where kernels run in Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "tests/fuser", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, "TRITON_INTERPRET=1 pytest tests/fuser\n" + done.stdout[-4000:]


@needs_triton
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="already in the interpreter")
def test_a_sample_in_the_interpreter() -> None:
    run_again("-k", SAMPLE)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="already in the interpreter")
def test_everything_in_the_interpreter() -> None:
    run_again("--deselect", "tests/fuser/test_triton.py")


# on a GPU


def norm_backward(g, x, w):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    gw = g * w
    dx = rstd * (gw - x * rstd * (gw * x * rstd).mean(-1, keepdim=True))
    return dx, (g * x * rstd).sum(0)


@pytest.mark.gpu
def test_addresses_that_are_not_aligned() -> None:
    memory = torch.randn(1 << 16, device="cuda")
    region = fuser.lower(trace(lambda x: x.relu() * 2, (memory[: 1 << 15],)))
    for offset in (0, 1, 2, 4, 7):
        x = memory[offset : offset + (1 << 15)]
        assert torch.equal(region(x)[0], x.relu() * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [96, 4096, 20000])
def test_the_same_bits_every_time(width: int) -> None:
    g, x, w = (torch.randn(s, device="cuda") for s in ((3000, width), (3000, width), (width,)))
    region = fuser.lower(trace(norm_backward, (g, x, w)))
    support.compare(region(g, x, w), norm_backward, (g, x, w))
    first, second = region(g, x, w), region(g, x, w)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.zeros((1 << 31) + 13, dtype=torch.uint8, device="cuda")
    x[-1], x[1 << 31] = 7, 5
    region = fuser.lower(trace(lambda x: ((x + 1), x.amax(), x.argmax()), (x,)))
    more, largest, place = region(x)
    assert (int(more[-1]), int(more[1 << 31]), int(more[12345])) == (8, 6, 1)
    assert (int(largest), int(place)) == (7, (1 << 31) + 12)


@pytest.mark.gpu
def test_an_index_out_of_range_stops_the_device() -> None:
    program = (
        "import torch\n"
        "from tests.fuser.support import trace\n"
        "from fulgurite import fuser\n"
        "t, i = torch.randn(30, 5, device='cuda'), torch.tensor([1, 30], device='cuda')\n"
        "fuser.lower(trace(lambda t, i: torch.nn.functional.embedding(i, t) * 2, (t, i)))(t, i)\n"
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
    assert kernel.bytes == 2 * 8 * 64 * 4 + 64 * 4
    assert kernel.predicted > 0 and kernel.measure() > 0


@pytest.mark.gpu
def test_a_search_is_right_and_remembered() -> None:
    x = torch.randn(512, 3000, device="cuda")
    graph = trace(lambda x: torch.softmax(x, -1), (x,))
    first = fuser.lower(graph, tune=True)
    support.compare(first(x), lambda x: torch.softmax(x, -1), (x,))
    started = time.perf_counter()
    again = fuser.lower(graph, tune=True)
    again(x)
    assert time.perf_counter() - started < 0.5
    assert str(again.kernels[0].schedule) == str(first.kernels[0].schedule)
