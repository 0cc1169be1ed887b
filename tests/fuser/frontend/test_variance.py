"""Variances of rows and columns: one Welford pass on a GPU, as accurate as two passes."""

from __future__ import annotations

import functools

import pytest
import torch

import fulgurite
from fulgurite import fuser
from tests.fuser import support
from tests.fuser.support import check_fused, trace

RUNS_ON_TRITON = True


def var_mean(x, dims):
    return torch.var_mean(x, dims, correction=0)


SHAPES = [
    ((3, 70001), [1]),  # few rows: split reduction
    ((70001,), [0]),
    ((9001, 5), [0]),  # columns: split reduction
    ((2, 3001, 7), [1]),
    ((3, 4, 61, 53), [0, 2, 3]),  # batch norm
    ((9, 33000), [1]),  # enough rows: one program per row
    ((1, 40000), [1]),
]


@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_shapes(shape, dims):
    torch.manual_seed(0)
    check_fused(lambda x: var_mean(x, dims), torch.randn(shape) * 2 + 1)


LARGE = [SHAPES[0], SHAPES[1], SHAPES[2], ((2, 40001, 3), [1]), ((5, 3, 101, 103), [0, 2, 3])]


@pytest.mark.parametrize(("shape", "dims"), LARGE, ids=str)
def test_small_variance_with_large_mean(shape, dims):
    """A sum of squares would lose all digits here: 1e8 times the variance cancels."""
    torch.manual_seed(0)
    x = torch.randn(shape) * 1e-2 + 1e4
    graph = trace(lambda x: torch.var(x, dims, correction=1), (x,))
    region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
    exact = torch.var(x.double(), dims, correction=1)
    error = ((region(x)[0].double() - exact) / exact).abs().max()
    assert error < (1e-4 if support.TARGET != "cpp" else 1e-6)


SMALL = [((9, 7), [1]), ((16, 64), [1]), ((5, 1024), [1]), ((1000, 33), [0]), ((3, 5, 41), [0, 2])]


@pytest.mark.parametrize(("shape", "dims"), SMALL, ids=str)
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_rounded_means_are_corrected(shape, dims, mean):
    """The sum of deviations corrects a rounded mean: as exact as eager's doubles."""
    if support.TARGET != "cpp":
        pytest.skip("GPU kernels do not correct the mean of register-resident rows")
    torch.manual_seed(0)
    x = torch.randn(shape) * 1e-2 + mean
    graph = trace(lambda x: torch.var_mean(x, dims), (x,))
    for ours, exact in zip(
        fuser.lower_region(graph)(x), torch.var_mean(x.double(), dims), strict=True
    ):
        assert ((ours.double() - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("length", [1, 7, 768, 4096])
def test_layer_norm_with_large_mean(length):
    torch.manual_seed(0)
    x = torch.randn(5, length) * 1e-2 + 1e3
    check_fused(
        lambda x: torch.nn.functional.layer_norm(x, (length,), eps=0.0 if length > 1 else 1e-5), x
    )


def test_variance_of_equal_values_is_not_negative():
    """The correction never makes a variance negative, whose square root would be NaN."""
    x = torch.linspace(-1e5, 1e5, 301)[:, None].expand(301, 67).contiguous()
    for dim, over in ((1, x), (0, x.t().contiguous())):
        graph = trace(functools.partial(torch.std, dim=dim), (over,))
        std = fuser.lower_region(graph, use_triton=support.TARGET == "triton")(over)[0]
        assert bool((std >= 0).all()) and std.max() < 1e-2


def test_squares_beyond_the_range_of_float32_on_a_cpu():
    """Eager's var and std on CPUs have the range of float64; on GPUs that of float32."""
    if support.TARGET != "cpp":
        pytest.skip("eager overflows, too")
    x = torch.linspace(-2, 2, 65)
    for name, scale in (("std", 1e30), ("var", 5e18)):
        compiled = fulgurite.compile(lambda x, name=name: getattr(x, name)(-1) * 1)
        for shape in ((65,), (5, 13)):
            wide = getattr((x * scale).double().view(shape), name)(-1).float()
            torch.testing.assert_close(compiled((x * scale).view(shape)), wide)


def test_drifting_mean_and_leading_outlier():
    torch.manual_seed(0)
    x = torch.randn(2, 70000) + torch.linspace(0, 1e3, 70000)
    x[0, 0] = 1e6
    check_fused(lambda x: torch.std(x, 1), x)
    check_fused(lambda x: torch.std(x, 0), x.t().contiguous())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, 12345, 69999])
def test_nan_and_infinity_in_one_row(value, position):
    torch.manual_seed(0)
    x = torch.randn(3, 70000)
    x[1, position] = value
    check_fused(
        lambda x: torch.var(x, 1), x
    )  # NaN; torch's mean is NaN or infinite, depending on the position


@pytest.mark.parametrize("length", [4095, 8193, 65536 + 1])
def test_dynamic_lengths(length):
    region = check_fused(lambda x: torch.var(x, -1), torch.randn(3, 5000), mode="symbolic")
    support.check_fused_again(region, lambda x: torch.var(x, -1), torch.randn(3, length) + 3)


def test_layer_norm_of_long_rows():
    torch.manual_seed(0)
    rows = 600 if support.TARGET == "cuda" else 9  # fewer rows would use a split reduction on a GPU
    x, w = torch.randn(rows, 70001) * 3 + 5, torch.randn(70001)
    region = check_fused(lambda x, w: torch.nn.functional.layer_norm(x, (70001,), w), x, w)
    if support.TARGET != "cpp":
        (kernel,) = region.kernels
        assert kernel.schedule.passes == 2, "one pass for the statistics, one for the result"


def test_statistics_are_one_kernel_with_one_pass():
    if support.TARGET == "cpp":
        pytest.skip("a C++ kernel makes a second pass over a cached row")
    for shape, dims in LARGE:
        (kernel,) = check_fused(functools.partial(var_mean, dims=dims), torch.randn(shape)).kernels
        schedule = kernel.schedule
        assert schedule.is_looped and schedule.passes == 1 and schedule.welford, str(schedule)
