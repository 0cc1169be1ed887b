"""Norm backward over many short rows on GPUs: row results and sums over rows in one kernel.

In Triton's interpreter and on a GPU. `codegen/test_short_rows.py` looks at the machine code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulgurite.bench.fusions.gpu_cases import rms_norm_backward
from fulgurite.fuser.schedule.gpu import persistent
from tests.fuser import support
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def needs_triton_kernels(target: None) -> None:
    if support.TARGET == "cpp":
        pytest.skip("schedules of Triton kernels")


def layer_norm_backward(g: Any, x: Any, mean: Any, rstd: Any, w: Any) -> Any:
    dtypes = (x.dtype, w.dtype, w.dtype)
    g, x, w = (t.float() if t.dtype.itemsize == 2 else t for t in (g, x, w))
    normed, gw = (x - mean) * rstd, g * w
    means = gw.mean(-1, keepdim=True) + normed * (gw * normed).mean(-1, keepdim=True)
    results = rstd * (gw - means), (g * normed).sum(0), g.sum(0)
    return tuple(t.to(dtype) for t, dtype in zip(results, dtypes, strict=True))


def make_case(name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(rows + width)
    g, x = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    w, rstd = torch.randn(width).to(dtype), torch.rand(rows, 1) + 0.5
    if name == "rms_norm":
        return rms_norm_backward, (g, x, rstd, w)
    return layer_norm_backward, (g, x, torch.randn(rows, 1), rstd, w)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1, 64, BF16),
        (77, 32, BF16),
        (1000, 64, F32),
        (1031, 96, BF16),
        (333, 128, torch.float16),
        (100, 256, F32),
        (129, 300, BF16),
        (67, 768, BF16),
    ],
)
def test_row_results_and_sums(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    function, arguments = make_case(name, rows, width, dtype)
    region = check_fused(function, *arguments)
    assert len(region.kernels) == 1, "one kernel and its combine kernel"


def test_a_few_programs_have_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations, a last one that is not full, and programs without any."""
    monkeypatch.setattr(persistent, "divide_rows", lambda count, most: 30)
    function, arguments = make_case("layer_norm", 2015, 64, BF16)
    region = check_fused(function, *arguments)
    assert region.kernels[0].schedule.num_programs == 30
