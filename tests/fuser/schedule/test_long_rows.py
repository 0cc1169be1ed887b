"""Long rows on GPUs: register-resident, peeled and rematerialized.

In Triton's interpreter and on a GPU. `codegen/test_machine_code.py` looks at the same kernels as
machine code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fulgurite.fuser import lowering
from fulgurite.fuser.schedule.analysis import analyze_nest, count_passes
from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule
from fulgurite.fuser.schedule.online_reduction import find_online_softmax, merge_online_passes
from tests.fuser import support
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True

F = torch.nn.functional
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def needs_triton_kernels(target: None) -> None:
    if support.TARGET == "cpp":
        pytest.skip("only Triton kernels have register-resident rows")


def softmax_backward(g, y):
    return (g - (g * y).sum(-1, keepdim=True)) * y


def rms_norm_backward(g, x, rstd, w):
    gw, normed = g.float() * w.float(), x.float() * rstd
    dx = rstd * (gw - normed * (gw * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g.float() * normed).sum(0).to(w.dtype)


def make_case(
    name: str, rows: int, width: int, dtype: torch.dtype
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """An op by name, and its inputs."""
    torch.manual_seed(width)
    x, y = torch.randn(rows, width).to(dtype), torch.rand(rows, width).to(dtype)
    w, rstd = torch.randn(width).to(dtype), torch.rand(rows, 1) + 0.5
    cases: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        "rms_norm": (lambda x, w: F.rms_norm(x, (width,), w), (x, w)),
        "layer_norm": (lambda x, w: F.layer_norm(x, (width,), w, w), (x, w)),
        "softmax": (lambda x: torch.softmax(x, -1), (x,)),
        "softmax_backward": (softmax_backward, (x, y)),
        "add_rms_norm": (lambda x, y, w: (x + y, F.rms_norm(x + y, (width,), w)), (x, y, w)),
        "rms_norm_backward": (rms_norm_backward, (x, y, rstd, w)),
    }
    return cases[name]


LONG_ROWS = [
    ("rms_norm", 73728, BF16),  # all of it resident
    ("softmax", 32769, BF16),
    ("rms_norm", 50257, BF16),  # the same, unaligned except for the first row
    ("softmax", 50257, F32),  # all but one block
    ("softmax_backward", 49155, BF16),  # two loads
    ("layer_norm", 50257, BF16),
    ("rms_norm", 131072, BF16),  # half of it
    ("softmax", 65537, F32),
    ("layer_norm", 65537, F32),
    ("add_rms_norm", 40001, F32),
    ("rms_norm", 32768, F32),  # would also fit in registers as float32
    ("softmax", 32768, F32),
    ("layer_norm", 20001, BF16),
    ("rms_norm", 4098, BF16),  # one block and edges
    ("softmax", 4097, BF16),
    ("layer_norm", 1027, BF16),
]


@pytest.mark.parametrize(("name", "width", "dtype"), LONG_ROWS)
def test_long_rows(name: str, width: int, dtype: torch.dtype) -> None:
    rows = 300 if support.TARGET == "cuda" else 9  # enough that a program has a row
    function, arguments = make_case(name, rows, width, dtype)
    region = check_fused(function, *arguments)
    (kernel,) = region.kernels
    assert kernel.schedule.resident_blocks, f"{kernel.schedule}"


def test_long_rows_with_nan_and_infinity() -> None:
    """Each affects only its own row, also at an edge."""
    x = torch.randn(300 if support.TARGET == "cuda" else 14, 50257)
    for row, column in enumerate((0, 1, 3, 50253, 50255, 50256)):
        x[2 * row, column], x[2 * row + 1, column] = float("nan"), float("-inf")
    check_fused(lambda x: torch.softmax(x, -1), x.to(BF16))


@pytest.mark.parametrize(("width", "dim"), [(4099, 1), (33001, 1), (70, 0)])
def test_softmax_div_is_correctly_rounded(width: int, dim: int) -> None:
    """For numbers down to denormals. The interpreter rounds products before it adds."""

    def softmax_parts(x):
        powers = (x - x.amax(dim, keepdim=True)).exp()
        total = powers.sum(dim, keepdim=True)
        return powers, total, powers / total

    torch.manual_seed(width)
    x = -104 * torch.rand(300 if support.TARGET == "cuda" else 9, width)
    region = check_fused(softmax_parts, x)
    assert any("softmax_div" in kernel.source for kernel in region.kernels)
    powers, total, quotients = (t.cpu() for t in region(support.to_target(x)))
    ulps = (quotients.view(torch.int32) - (powers / total).view(torch.int32)).abs()
    max_ulps = 0 if support.TARGET == "cuda" else 3
    assert ulps[powers > 2.0**-99].max() <= max_ulps and ulps.max() <= max(max_ulps, 1)


def test_softmax_of_rows_without_a_finite_maximum() -> None:
    x = torch.randn(9, 40001)
    x[1], x[2, 7], x[3, 40000], x[4, 5:] = float("-inf"), float("inf"), float("nan"), float("-inf")
    check_fused(lambda x: torch.softmax(x, -1), x)


def use_small_blocks(
    block: int, peel_width: int, **changes: int
) -> Callable[[GpuSchedule], GpuSchedule]:
    """All of a row resident, in small blocks."""

    def change(s: GpuSchedule) -> GpuSchedule:
        (body,) = s.nest.body
        blocks = -(-body.size.constant // block)
        return replace(
            s, block_sizes={body: block}, resident_blocks=blocks, peel_width=peel_width, **changes
        )

    return change


def alternate_direction(schedule: GpuSchedule) -> GpuSchedule:
    return replace(schedule, alternates_direction=True)


def use_online_softmax(schedule: GpuSchedule) -> GpuSchedule:
    """An online softmax in a kernel with register-resident blocks."""
    analysis = analyze_nest(schedule.nest)
    online = find_online_softmax(schedule.nest)
    passes = count_passes(schedule.nest, merge_online_passes(schedule.nest, analysis, online))
    return replace(schedule, online_softmax=online, passes=passes, online_group=8)


@pytest.mark.parametrize(
    ("name", "width", "dtype", "change"),
    [
        ("rms_norm", 131072, BF16, alternate_direction),
        ("layer_norm", 65537, F32, alternate_direction),
        ("layer_norm", 131073, BF16, alternate_direction),  # nothing resident
        ("softmax", 65536, BF16, use_online_softmax),
        ("softmax", 50257, BF16, use_online_softmax),
        ("softmax", 50257, F32, use_small_blocks(2048, 2)),
        ("layer_norm", 50257, BF16, use_small_blocks(4096, 8, num_warps=16)),
    ],
)
def test_schedules_of_the_row_sweep(name, width, dtype, change, monkeypatch) -> None:
    """The schedules that `benchmarks/sweep_rows.py` times are correct, too."""
    monkeypatch.setattr(
        lowering, "choose_gpu_schedule", lambda *known: change(choose_gpu_schedule(*known))
    )
    rows = 300 if support.TARGET == "cuda" else 9
    function, arguments = make_case(name, rows, width, dtype)
    arguments[0][1, [0, 3, width - 1]] = torch.tensor([float("-inf"), 90.0, 3.0]).to(dtype)
    (kernel,) = check_fused(function, *arguments).kernels
    schedule = kernel.schedule
    assert (
        schedule.alternates_direction
        or schedule.online_softmax
        or schedule.block_sizes[schedule.nest.body[0]] < 8192
    ), f"{schedule}"


@pytest.mark.parametrize("width", [16384, 8201])
def test_long_rows_with_column_sums_are_rematerialized(width: int) -> None:
    function, arguments = make_case("rms_norm_backward", 37, width, BF16)
    region = check_fused(function, *arguments)
    (kernel,) = region.kernels
    assert kernel.schedule.rematerializes, f"{kernel.schedule}"


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_online_softmax_of_masked_rows(dtype: torch.dtype, dim: int, monkeypatch) -> None:
    """Masks are -inf or finfo.min: parts of a row, all of it, and more than one block."""
    monkeypatch.setattr(
        lowering,
        "choose_gpu_schedule",
        lambda *known: use_online_softmax(choose_gpu_schedule(*known)),
    )
    lowest, width = torch.finfo(dtype).min, 65536 if dim else 600
    x = torch.randn(9, width).to(dtype)
    x[0, 16:500], x[1, : width // 2], x[2] = -torch.inf, -torch.inf, lowest
    x[3], x[4, 100:], x[5, 9:] = -torch.inf, lowest, torch.inf
    times = 40 if support.TARGET == "cuda" else 1  # else rows are split over programs
    x = x.repeat(times, 1) if dim else x.repeat(500 * times, 1).T.contiguous()
    region = check_fused(lambda x: x.softmax(dim), x)
    assert any(kernel.schedule.online_softmax for kernel in region.kernels)
