"""searchsorted and bucketize against eager: sides, dtypes, boundaries out of order, NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulgurite.compile import compile
from tests.fuser.support import check_fused, check_interpreted

RUNS_ON_TRITON = True

NAN, INF = float("nan"), float("inf")


def search_all(boundaries: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.searchsorted(boundaries, values),
        torch.searchsorted(boundaries, values, right=True),
        torch.searchsorted(boundaries, values, side="right", out_int32=True),
        torch.bucketize(values, boundaries) if boundaries.dim() == 1 else values,
        torch.bucketize(values, boundaries, right=True, out_int32=True)
        if boundaries.dim() == 1
        else values,
    )


def make_values() -> torch.Tensor:
    values = torch.randn(4, 9)
    values[0, :4] = torch.tensor([NAN, INF, -INF, -0.0])
    return values


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 100])
def test_sorted_boundaries(length: int) -> None:
    boundaries = torch.randn(length).sort().values
    values = make_values()
    if length > 4:
        boundaries[3] = boundaries[2]
        values[1, :3] = boundaries[1:4]
    check_fused(search_all, boundaries, values)
    check_interpreted(search_all, boundaries, values)


def test_boundaries_out_of_order_and_nan() -> None:
    boundaries = torch.randn(37)
    check_fused(search_all, boundaries, make_values())
    boundaries[20] = NAN
    check_fused(search_all, boundaries, make_values())


def test_boundaries_of_each_row() -> None:
    boundaries = torch.randn(4, 13).sort().values
    check_fused(search_all, boundaries, make_values())
    check_fused(search_all, boundaries.t().contiguous().t(), make_values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.int8], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    boundaries = torch.randint(-20, 20, (15,)).sort().values.to(dtype)
    check_fused(search_all, boundaries, torch.randint(-25, 25, (3, 11)).to(dtype))


def test_numbers_and_a_sorter() -> None:
    def function(boundaries: torch.Tensor, shuffled: torch.Tensor, sorter: torch.Tensor) -> Any:
        return (
            torch.searchsorted(boundaries, 2.5),
            torch.bucketize(3, boundaries, right=True),
            torch.searchsorted(shuffled, boundaries.float() * 0.7, sorter=sorter),
        )

    shuffled = torch.randn(12)
    check_fused(function, torch.arange(9), shuffled, shuffled.argsort())


def test_with_what_comes_before_and_after() -> None:
    def function(x: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
        return boundaries[torch.bucketize(x.tanh() * 2, boundaries).clamp(max=9)] - x

    region = check_fused(function, torch.randn(5, 33), torch.linspace(-2, 2, 10))
    assert len(region.kernels) == 1


def test_dynamic_sizes() -> None:
    compiled = compile(search_all, dynamic=True)
    for length in (3, 40, 1000):
        boundaries, values = torch.randn(length).sort().values, torch.randn(2, length + 1)
        torch.testing.assert_close(compiled(boundaries, values), search_all(boundaries, values))
