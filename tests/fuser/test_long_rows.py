"""Rows that registers hold only as narrow as memory has them, rows that start anywhere, and rows with sums over rows.

In Triton's interpreter and on a GPU; `test_machine_code.py` looks at what becomes of the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fulgurite.fuser import pipeline_triton
from fulgurite.fuser.schedule.cpu.base import analyse
from fulgurite.fuser.schedule.cpu.rows import count_passes
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule, choose_gpu_schedule
from fulgurite.fuser.schedule.online_reduction import online_sums, replaced_waits
from tests.fuser import support
from tests.fuser.support import fused

F = torch.nn.functional
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def on_a_gpu(target: None) -> None:
    if support.TARGET == "cpp":
        pytest.skip("C++ kernels have no registers to fill: other files test their rows")


def softmax_backward(g, y):
    return (g - (g * y).sum(-1, keepdim=True)) * y


def rms_norm_backward(g, x, rstd, w):
    gw, normed = g.float() * w.float(), x.float() * rstd
    dx = rstd * (gw - normed * (gw * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g.float() * normed).sum(0).to(w.dtype)


def case(
    name: str, rows: int, width: int, dtype: torch.dtype
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(width)
    x, y = torch.randn(rows, width).to(dtype), torch.rand(rows, width).to(dtype)
    w, one = torch.randn(width).to(dtype), torch.rand(rows, 1) + 0.5
    found: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        "rms_norm": (lambda x, w: F.rms_norm(x, (width,), w), (x, w)),
        "layer_norm": (lambda x, w: F.layer_norm(x, (width,), w, w), (x, w)),
        "softmax": (lambda x: torch.softmax(x, -1), (x,)),
        "softmax_backward": (softmax_backward, (x, y)),
        "add_rms_norm": (lambda x, y, w: (x + y, F.rms_norm(x + y, (width,), w)), (x, y, w)),
        "rms_norm_backward": (rms_norm_backward, (x, y, one, w)),
    }
    return found[name]


LONG = [
    ("rms_norm", 73728, BF16),  # all of it kept
    ("softmax", 32769, BF16),
    ("rms_norm", 50257, BF16),  # the same, and no row but the first is aligned
    ("softmax", 50257, F32),  # all but a block
    ("softmax_backward", 49155, BF16),  # two reads
    ("layer_norm", 50257, BF16),
    ("rms_norm", 131072, BF16),  # half of it
    ("softmax", 65537, F32),
    ("layer_norm", 65537, F32),
    ("add_rms_norm", 40001, F32),
    ("rms_norm", 32768, F32),  # which registers would hold as float32, too
    ("softmax", 32768, F32),
    ("layer_norm", 20001, BF16),
    ("rms_norm", 4098, BF16),  # one block and edges
    ("softmax", 4097, BF16),
    ("layer_norm", 1027, BF16),
]


@pytest.mark.parametrize(("name", "width", "dtype"), LONG)
def test_long_rows(name: str, width: int, dtype: torch.dtype) -> None:
    rows = 300 if support.TARGET == "cuda" else 9  # enough that a program has a row
    function, arguments = case(name, rows, width, dtype)
    region = fused(function, *arguments)
    (kernel,) = region.kernels
    assert kernel.schedule.kept, f"{kernel.schedule}"


def test_long_rows_with_nan_and_infinity() -> None:
    """Each is in one row only, wherever it is: an edge belongs to no other row."""
    x = torch.randn(300 if support.TARGET == "cuda" else 14, 50257)
    for row, place in enumerate((0, 1, 3, 50253, 50255, 50256)):
        x[2 * row, place], x[2 * row + 1, place] = float("nan"), float("-inf")
    fused(lambda x: torch.softmax(x, -1), x.to(BF16))


@pytest.mark.parametrize(("width", "dim"), [(4099, 1), (33001, 1), (70, 0)])
def test_shares_are_rounded_quotients(width: int, dim: int) -> None:
    """Of numbers down to denormal ones. The interpreter rounds products before it adds."""

    def parts(x):
        powers = (x - x.amax(dim, keepdim=True)).exp()
        total = powers.sum(dim, keepdim=True)
        return powers, total, powers / total

    torch.manual_seed(width)
    x = -104 * torch.rand(300 if support.TARGET == "cuda" else 9, width)
    region = fused(parts, x)
    assert any("share" in kernel.source for kernel in region.kernels)
    powers, total, shares = (t.cpu() for t in region(support.placed(x)))
    off = (shares.view(torch.int32) - (powers / total).view(torch.int32)).abs()
    most = 0 if support.TARGET == "cuda" else 3
    assert off[powers > 2.0**-99].max() <= most and off.max() <= max(most, 1)


def test_shares_of_rows_without_a_finite_maximum() -> None:
    x = torch.randn(9, 40001)
    x[1], x[2, 7], x[3, 40000], x[4, 5:] = float("-inf"), float("inf"), float("nan"), float("-inf")
    fused(lambda x: torch.softmax(x, -1), x)


def small(block: int, granule: int, **others: int) -> Callable[[GpuSchedule], GpuSchedule]:
    """All of a row kept, in small blocks."""

    def changed(s: GpuSchedule) -> GpuSchedule:
        (body,) = s.nest.body
        kept = -(-body.size.constant // block)
        return replace(s, sizes={body: block}, kept=kept, granule=granule, **others)

    return changed


def together(schedule: GpuSchedule) -> GpuSchedule:
    """The maximum and the exponentials in one walk, beside what is kept."""
    facts = analyse(schedule.nest)
    online = online_sums(schedule.nest)
    passes = count_passes(schedule.nest, replaced_waits(schedule.nest, facts, online))
    return replace(schedule, online=online, passes=passes, group=8)


@pytest.mark.parametrize(
    ("name", "width", "dtype", "way"),
    [
        ("rms_norm", 131072, BF16, lambda s: replace(s, back=True)),
        ("layer_norm", 65537, F32, lambda s: replace(s, back=True)),
        ("layer_norm", 131073, BF16, lambda s: replace(s, back=True)),  # nothing kept
        ("softmax", 65536, BF16, together),
        ("softmax", 50257, BF16, together),
        ("softmax", 50257, F32, small(2048, 2)),
        ("layer_norm", 50257, BF16, small(4096, 8, warps=16)),
    ],
)
def test_ways_that_measurements_try(name, width, dtype, way, monkeypatch) -> None:
    """What `benchmarks/sweep_rows.py` times is right, too."""
    monkeypatch.setattr(
        pipeline_triton, "choose_gpu_schedule", lambda *known: way(choose_gpu_schedule(*known))
    )
    rows = 300 if support.TARGET == "cuda" else 9
    function, arguments = case(name, rows, width, dtype)
    arguments[0][1, [0, 3, width - 1]] = torch.tensor([float("-inf"), 90.0, 3.0]).to(dtype)
    (kernel,) = fused(function, *arguments).kernels
    chosen = kernel.schedule
    assert chosen.back or chosen.online or chosen.sizes[chosen.nest.body[0]] < 8192, f"{chosen}"


@pytest.mark.parametrize("width", [16384, 8201])
def test_long_rows_that_are_summed_over(width: int) -> None:
    function, arguments = case("rms_norm_backward", 37, width, BF16)
    region = fused(function, *arguments)
    (kernel,) = region.kernels
    assert kernel.schedule.remade, f"{kernel.schedule}"
