"""Memory traffic of C++ kernels: non-temporal stores, prefetches, packed columns, split rows."""

from __future__ import annotations

import pytest
import torch

from fulgurite.fuser.schedule.cpu import columns
from fulgurite.kernels.tuning import fuser_cpu
from tests.fuser.support import check_fused

F = torch.nn.functional
ROWS = [(7, 1000), (3, 513), (5, 4099), (1, 64), (2, 3, 511)]


@pytest.fixture
def nontemporal(monkeypatch):
    """Every result is large enough for non-temporal stores, and every row for prefetches."""
    monkeypatch.setattr(fuser_cpu, "MIN_NONTEMPORAL_BYTES", 0)
    monkeypatch.setattr(fuser_cpu, "MIN_PREFETCH_ROW_BYTES", 0)


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setenv("FULGURITE_NUM_THREADS", "3")


def calls(region, function: str) -> bool:
    return any(f"{function}(" in kernel.source for kernel in region.kernels)


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nontemporal_stores_of_pointwise_kernels(shape, dtype, nontemporal) -> None:
    region = check_fused(
        lambda x, y: x * y + 1, torch.randn(shape).to(dtype), torch.ones(shape).to(dtype)
    )
    assert calls(region, "store_nontemporal")


@pytest.mark.parametrize("shape", ROWS[:4])
def test_nontemporal_stores_of_row_kernels(shape, nontemporal) -> None:
    region = check_fused(lambda x: torch.softmax(x, -1), torch.randn(shape))
    assert calls(region, "store_nontemporal")
    assert len(shape) < 2 or shape[0] == 1 or calls(region, "prefetch")


@pytest.mark.parametrize("shape", [(130, 77), (64, 64), (200, 1000)])
def test_nontemporal_stores_of_transposes(shape, nontemporal, monkeypatch) -> None:
    monkeypatch.setattr(fuser_cpu, "MIN_TRANSPOSE_POINTS", 0)
    region = check_fused(lambda x: (x.t() + 1).contiguous(), torch.randn(shape))
    assert calls(region, "transpose_tile")
    assert calls(region, "store_nontemporal")


def test_rows_that_start_inside_a_cache_line(nontemporal) -> None:
    """Only the first row starts with a cache line."""
    for width in (65, 77, 129):
        check_fused(lambda x: torch.softmax(x * 2, -1), torch.randn(9, width))


@pytest.mark.parametrize("shape", [(33, 100), (128, 16), (50, 17), (260, 48)])
@pytest.mark.parametrize("name", ["softmax", "var", "norm"])
def test_packed_columns(shape, name, nontemporal, monkeypatch) -> None:
    monkeypatch.setattr(columns, "_is_worth_packing", lambda nest, device: True)
    functions = {
        "softmax": lambda x: torch.softmax(x, 0),
        "var": lambda x: x.var(0),
        "norm": lambda x: (x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5),
    }
    region = check_fused(functions[name], torch.randn(shape))
    assert any(kernel.schedule.packed for kernel in region.kernels)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("width", [50257, 32768])
def test_threads_split_few_long_rows(rows, width, three_threads) -> None:
    for function in (
        lambda x: torch.softmax(x, -1),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: x.logsumexp(-1),
    ):
        region = check_fused(function, torch.randn(rows, width))
        assert all(kernel.schedule.splits_body for kernel in region.kernels)


@pytest.mark.parametrize("rows", [4096, 4095, 1002])
def test_threads_split_column_sums(rows, three_threads) -> None:
    region = check_fused(lambda x: (x * 2).sum(0), torch.randn(rows, 40))
    assert region.kernels[0].schedule.splits_body


def test_nan_and_infinity_in_split_rows(three_threads) -> None:
    x = torch.randn(2, 40000)
    x[0, 39999] = torch.nan
    x[1, 5] = torch.inf
    check_fused(lambda x: torch.softmax(x, -1), x)
