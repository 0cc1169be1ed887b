"""Results past the caches, rows fetched ahead, buffers between passes, few long rows: against eager."""

from __future__ import annotations

import pytest
import torch

from fulgurite import native
from fulgurite.fuser import schedule
from fulgurite.fuser.codegen.cpp import translation_unit
from fulgurite.fuser.schedule.cpu import columns, memory_traffic
from tests.fuser.support import fused

F = torch.nn.functional
ROWS = [(7, 1000), (3, 513), (5, 4099), (1, 64), (2, 3, 511)]


@pytest.fixture
def streaming(monkeypatch):
    """Every result is large enough to go past the caches."""
    monkeypatch.setattr(memory_traffic, "STREAM_BYTES", 0)
    monkeypatch.setattr(memory_traffic, "FETCH_ROW", 0)


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setenv("FULGURITE_THREADS", "3")


def uses(region, word: str) -> bool:
    return any(f"{word}(" in kernel.source for kernel in region.kernels)


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pointwise_results_past_the_caches(shape, dtype, streaming) -> None:
    region = fused(
        lambda x, y: x * y + 1, torch.randn(shape).to(dtype), torch.ones(shape).to(dtype)
    )
    assert uses(region, "stream")


@pytest.mark.parametrize("shape", ROWS[:4])
def test_row_results_past_the_caches(shape, streaming) -> None:
    region = fused(lambda x: torch.softmax(x, -1), torch.randn(shape))
    assert uses(region, "stream")
    assert len(shape) < 2 or shape[0] == 1 or uses(region, "fetch")


@pytest.mark.parametrize("shape", [(130, 77), (64, 64), (200, 1000)])
def test_transposed_results_past_the_caches(shape, streaming, monkeypatch) -> None:
    monkeypatch.setattr(schedule.transpose, "SMALLEST_KERNEL", 0)
    region = fused(lambda x: (x.t() + 1).contiguous(), torch.randn(shape))
    assert uses(region, "turn")
    assert uses(region, "stream")


def test_results_into_memory_that_starts_off_a_line(streaming) -> None:
    """A row of 13 floats: no row but the first starts where a line does."""
    for width in (65, 77, 129):
        fused(lambda x: torch.softmax(x * 2, -1), torch.randn(9, width))


@pytest.mark.parametrize("shape", [(33, 100), (128, 16), (50, 17), (260, 48)])
@pytest.mark.parametrize("name", ["softmax", "var", "norm"])
def test_packed_columns(shape, name, streaming, monkeypatch) -> None:
    monkeypatch.setattr(columns, "_worth_packing", lambda nest, device: True)
    functions = {
        "softmax": lambda x: torch.softmax(x, 0),
        "var": lambda x: x.var(0),
        "norm": lambda x: (x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5),
    }
    region = fused(functions[name], torch.randn(shape))
    assert any(kernel.schedule.packed for kernel in region.kernels)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("width", [50257, 32768])
def test_few_long_rows_are_shared(rows, width, three_threads) -> None:
    for function in (
        lambda x: torch.softmax(x, -1),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: x.logsumexp(-1),
    ):
        region = fused(function, torch.randn(rows, width))
        assert all(kernel.schedule.split for kernel in region.kernels)


@pytest.mark.parametrize("rows", [4096, 4095, 1002])
def test_sums_of_columns_are_shared(rows, three_threads) -> None:
    region = fused(lambda x: (x * 2).sum(0), torch.randn(rows, 40))
    assert region.kernels[0].schedule.split


def test_nan_and_infinity_reach_shared_rows(three_threads) -> None:
    x = torch.randn(2, 40000)
    x[0, 39999] = torch.nan
    x[1, 5] = torch.inf
    fused(lambda x: torch.softmax(x, -1), x)


DIVISION = """
EXPORT int64_t divide(const int64_t* a) {
  const float* x = (const float*)a[0];
  const float* c = (const float*)a[1];
  float* y = (float*)a[2];
  for (int64_t i = 0; i < a[3]; ++i) {
    const Inverse by = inverse(c[i]);
    #pragma omp simd
    for (int64_t j = 0; j < a[4]; ++j) y[i * a[4] + j] = x[i * a[4] + j] / by;
  }
  return 0;
}
"""


def test_division_by_a_shared_number_is_division() -> None:
    """Bit for bit where x and the quotient are ordinary, within an ulp elsewhere, at every limit."""
    import ctypes
    import struct

    rows, width = 300, 2048
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-(1 << 31), 1 << 31, (rows, width + 1), generator=generator)
    numbers = codes.to(torch.int32).view(torch.float32)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38, 1.0]
    x, c = numbers[:, 1:].contiguous(), numbers[:, 0].contiguous()
    x[:, : len(special)] = torch.tensor(special)
    c[: len(special)] = torch.tensor(special)
    y = torch.empty_like(x)
    run = native.load(translation_unit.header(DIVISION) + DIVISION).divide
    run.argtypes = [ctypes.c_char_p]
    run(struct.pack("5q", x.data_ptr(), c.data_ptr(), y.data_ptr(), rows, width))
    want = x / c[:, None]
    same = (y.view(torch.int32) == want.view(torch.int32)) | (y.isnan() & want.isnan())
    ordinary = (x.abs() > 2.0**-100) & (want.abs() > 2.0**-100)
    assert bool(same[ordinary].all())
    near = (y.view(torch.int32) - want.view(torch.int32)).abs() <= 1
    assert bool((same | near).all())
