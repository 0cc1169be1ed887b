"""Reductions over inner, outer, middle, several and all axes, against eager and float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fulgurite
from fulgurite import fuser
from fulgurite.fuser.schedule.cpu.base import CpuSchedule
from tests.fuser.support import check_fused, to_target, trace

RUNS_ON_TRITON = True

OPS = {
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "var": lambda x, d: x.var(d),
    "std": lambda x, d: x.std(d, correction=0),
    "var_mean": lambda x, d: torch.var_mean(x, d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "logsumexp": lambda x, d: torch.logsumexp(x, d),
    "keep": lambda x, d: x.sum(d, keepdim=True) + x,
    "any": lambda x, d: (x > 1).any(dim=d) if isinstance(d, int) else (x > 1).any(),
    "all": lambda x, d: (x > -3).all(dim=d) if isinstance(d, int) else (x > -3).all(),
}
INDEX_OPS = {
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d, keepdim=True),
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
    "prod": lambda x, d: x.prod(d),
}


def flatten(results) -> tuple:
    found = []
    for result in results:
        found += result if isinstance(result, tuple | list) else [result]
    return tuple(found)


def all_reductions(x: torch.Tensor) -> tuple:
    """Applies every op over every axis, every pair of axes and all axes."""
    results = []
    dims = list(range(x.dim()))
    several = [[d, e] for d in dims for e in dims if d < e]
    for d in [*dims, *several, dims]:
        for name, op in OPS.items():
            if isinstance(d, list) and name in ("any", "all") and len(d) != len(dims):
                continue
            results.append(op(x, d))
    for d in dims:
        results += [op(x, d) for op in INDEX_OPS.values()]
    return flatten([*results, x.argmax(), x.prod(), x.max()])


def test_axes() -> None:
    torch.manual_seed(0)
    # sums of sixteenths are exact in any order: a mean near 0 has no luck in eager's rounding
    check_fused(all_reductions, (torch.randn(3, 17, 33) * 16).round() / 16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_fused(all_reductions, torch.randn(19, 33).to(dtype))


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1,), (2, 2), (129, 3), (4, 3, 5, 2)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check_fused(
        lambda x: flatten(
            [x.sum(0), x.mean(-1), x.amax(0), x.argmin(-1), x.sum(), x.std(0, correction=0)]
        ),
        torch.randn(shape),
    )


def test_integers_and_bools() -> None:
    torch.manual_seed(0)
    x = torch.randint(-9, 9, (7, 19))

    def function(x, small, flags):
        return flatten(
            [
                *(x.sum(0), x.sum(1), x.sum(), x.amax(1), x.amin(0), x.argmax(1), x.prod(1)),
                *(small.sum(0), small.amax(), small.sum(1, dtype=torch.float32), small.any(1)),
                *(flags.sum(), flags.sum(0), flags.any(1), flags.all(0), flags.any(), flags.all()),
            ]
        )

    check_fused(function, x, x.to(torch.int8), x > 3)


def test_nan_and_infinity() -> None:
    x = torch.randn(5, 40)
    x[0, 3] = math.nan
    x[1, 7] = math.inf
    x[2, 9] = -math.inf
    x[3, 39] = math.nan
    x[4, 0], x[4, 1] = math.inf, -math.inf

    def function(x):
        return flatten(
            [
                x.sum(1),
                x.amax(1),
                x.amin(1),
                x.argmax(1),
                x.argmin(1),
                x.max(1),
                x.max(0),
                x.mean(0),
            ]
        )

    check_fused(function, x)


def test_empty_reductions() -> None:
    x = torch.zeros(0, 4)
    check_fused(
        lambda x: flatten([x.sum(0), x.sum(1), x.prod(0), x.any(0), x.all(0), x.sum(), x.mean(0)]),
        x,
    )
    check_fused(lambda x: torch.stack([x + 1, x + 1], 1).sum(), x)  # the sum of no elements


@pytest.mark.parametrize("shape", [(5, 0, 5), (0, 5, 5), (5, 5, 0)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_empty_results(shape: tuple[int, ...], dim: int) -> None:
    """Includes rows that are read twice: for their maximum, and to compare with it."""
    if shape[dim] == 0:
        check_fused(lambda x: (x * 2, x.sum(dim)), torch.zeros(shape))
        return

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = x == x.amax(dim, keepdim=True)
        return largest, largest.sum(dim), torch.softmax(x, dim), x.cumsum(dim)

    check_fused(function, torch.zeros(shape))


@pytest.mark.parametrize("size", [1 << 12, (1 << 18) + 7])
def test_long_sums(size: int) -> None:
    """Sums that are split over chunks and threads are as accurate as torch's."""
    torch.manual_seed(0)
    x = torch.rand(size) + 1
    check_fused(lambda x: (x.sum(), x.mean(), (x * x).sum(), x.var(), x.std()), x)
    y = torch.rand(3, size // 3) + 1
    check_fused(lambda y: (y.sum(0), y.sum(1), y.sum(), y.var(1)), y)
    z = y.t().contiguous()
    check_fused(lambda z: (z.sum(0), z.sum(1), z.mean(0), z.var(0)), z)


def test_layouts() -> None:
    torch.manual_seed(0)
    base = torch.randn(20, 12, 30)
    inputs = [
        base.permute(2, 0, 1),
        base.transpose(0, 1),
        base[::2, :, 3:],
        torch.randn(1, 12, 1).expand(20, 12, 30),
        base.flip(1),
    ]

    def sums(*xs):
        return flatten(
            [r for x in xs for r in (x.sum(0), x.sum(1), x.amax(2), x.sum((0, 2)), x.sum())]
        )

    check_fused(sums, *inputs)


def test_rows_and_columns_are_one_kernel() -> None:
    torch.manual_seed(0)
    region = check_fused(lambda x: ((x * 2).sum(0), (x * 2).sum(1), x.sum()), torch.randn(300, 200))
    assert len(region.kernels) == 1
    assert region.kernels[0].bytes_moved < 300 * 200 * 4 * 1.1, "the input is read more than once"


def test_many_rows_and_columns_in_parallel() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, 700)
    check_fused(
        lambda x: (x.sum(0), x.sum(1), x.sum(), torch.softmax(x, 0), torch.softmax(x, 1)), x
    )


def test_column_sums_of_long_rows_have_their_own_kernel() -> None:
    """Column sums of rows that exceed the cache need no buffer per thread."""
    torch.manual_seed(0)
    region = check_fused(lambda x: (x.sum(0), x.sum(1)), torch.randn(3, 1 << 20))
    for kernel in region.kernels:
        on_cpu = isinstance(kernel.schedule, CpuSchedule)
        is_split = kernel.schedule.splits_body if on_cpu else kernel.schedule.num_splits
        assert "_partials" not in kernel.source or is_split


@pytest.mark.slow
def test_more_than_2_31_elements() -> None:
    x = torch.zeros((1 << 31) + 13, dtype=torch.uint8)
    x[-1], x[1 << 31] = 7, 5
    region = fuser.lower_region(trace(lambda x: ((x + 1), x.amax(), x.argmax()), (x,)))
    more, largest, index = region(x)
    assert (int(more[-1]), int(more[1 << 31]), int(more[12345])) == (8, 6, 1)
    assert (int(largest), int(index)) == (7, (1 << 31) + 12)


def test_sums_of_many_rows_stay_accurate() -> None:
    torch.manual_seed(0)
    check_fused(lambda x: x.sum(0) * 2, torch.rand(200000, 24) + 1)
    region = check_fused(lambda x: (x.sum(0), x.sum(1), x.sum()), torch.rand(60000, 20) + 1)
    assert len(region.kernels) == 1


def test_fewer_threads_than_requested() -> None:
    """OpenMP may give fewer threads than requested. All rows are still computed."""
    program = (
        "import torch\n"
        "from tests.fuser.support import check_fused\n"
        "torch.set_num_threads(4)\n"
        "torch.manual_seed(0)\n"
        "x = torch.rand(4000, 300)\n"
        "check_fused(lambda x: (x.sum(0), x.sum(1), x.sum(), torch.softmax(x, 1)), x)\n"
        "check_fused(lambda x: x.sum(), torch.rand(1 << 20))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_THREAD_LIMIT": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr


def test_bools_with_their_max_and_min() -> None:
    """Max and min of bools are accumulated as integers; other bools of the kernel are not."""

    def function(x: torch.Tensor) -> tuple:
        largest, smallest = x.amax(-1, True), x.amin(0, True)
        return (
            torch.maximum(largest, x),
            torch.minimum(smallest, x),
            torch.fmax(x.any(-1, True), x),
            torch.fmin(smallest, x),
            torch.where(largest, x, smallest),
            x.prod(-1, True, dtype=torch.bool) ^ x,
        )

    x = torch.randint(0, 2, (5, 17), generator=torch.Generator().manual_seed(0)).bool()
    check_fused(function, x)


def test_sums_with_dtype_bool() -> None:
    x = torch.zeros(5, 17, dtype=torch.bool)
    x[2], x[3, 4] = True, True
    check_fused(lambda x: tuple(x.sum(d, dtype=torch.bool) for d in (0, 1, (0, 1))), x)
    x = torch.ones(3, 256, dtype=torch.bool)  # more than a byte can count
    x[1, 7] = False
    check_fused(lambda x: (x.sum(1, dtype=torch.bool), x.prod(1, dtype=torch.bool), x.sum(1)), x)


def test_value_with_fewer_axes_than_its_reduction() -> None:
    """The numerator has fewer axes than the sum's operand: a second kernel loads the sum."""
    x = torch.arange(1.0, 7 * 16 + 1).reshape(7, 16)
    check_fused(lambda x: torch.stack([x * 2, x * 2], -2).sum() / x, x)
    check_fused(lambda x: torch.stack([x, -x], 0).amax(0).sum() - x, x)


def test_sum_of_one_negative_zero_is_zero() -> None:
    """Sums start with 0, and 0 + -0 is 0."""

    def sums(x: torch.Tensor) -> tuple:
        one = x[0, 0]
        return x.sum(1), x.mean(1), x.cumsum(1), one.sum(), x[:1].sum(0), x.amax(1), x.prod(1)

    x = to_target(torch.full((3, 1), -0.0))
    got = check_fused(sums, x)(x)
    signs = [bool(torch.signbit(value).any()) for value in got]
    assert signs == [False, False, False, False, False, True, True]


@pytest.mark.parametrize("op", [torch.max, lambda x: x.min(0).values])
def test_max_of_empty_tensor_raises(op):
    with pytest.raises((RuntimeError, IndexError), match="reduction dim"):
        fulgurite.compile(lambda x: op(x) * 2)(torch.ones(0))
