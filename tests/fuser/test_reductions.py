"""Reductions over inner, outer, middle, several and all axes, against eager by the float64 rule."""

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
from tests.fuser.support import fused, placed, trace

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
PLACES = {
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d, keepdim=True),
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
    "prod": lambda x, d: x.prod(d),
}


def flat(results) -> tuple:
    found = []
    for result in results:
        found += result if isinstance(result, tuple | list) else [result]
    return tuple(found)


def every(x: torch.Tensor) -> tuple:
    """Every op over every axis, pairs of axes and all axes."""
    results = []
    dims = list(range(x.dim()))
    several = [[d, e] for d in dims for e in dims if d < e]
    for d in [*dims, *several, dims]:
        for name, op in OPS.items():
            if isinstance(d, list) and name in ("any", "all") and len(d) != len(dims):
                continue
            results.append(op(x, d))
    for d in dims:
        results += [op(x, d) for op in PLACES.values()]
    return flat([*results, x.argmax(), x.prod(), x.max()])


def test_axes() -> None:
    torch.manual_seed(0)
    fused(every, torch.randn(3, 17, 33))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fused(every, torch.randn(19, 33).to(dtype))


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1,), (2, 2), (129, 3), (4, 3, 5, 2)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    fused(
        lambda x: flat(
            [x.sum(0), x.mean(-1), x.amax(0), x.argmin(-1), x.sum(), x.std(0, correction=0)]
        ),
        torch.randn(shape),
    )


def test_integers_and_bools() -> None:
    torch.manual_seed(0)
    x = torch.randint(-9, 9, (7, 19))

    def whole(x, small, flags):
        return flat(
            [
                *(x.sum(0), x.sum(1), x.sum(), x.amax(1), x.amin(0), x.argmax(1), x.prod(1)),
                *(small.sum(0), small.amax(), small.sum(1, dtype=torch.float32), small.any(1)),
                *(flags.sum(), flags.sum(0), flags.any(1), flags.all(0), flags.any(), flags.all()),
            ]
        )

    fused(whole, x, x.to(torch.int8), x > 3)


def test_nan_and_infinity() -> None:
    x = torch.randn(5, 40)
    x[0, 3] = math.nan
    x[1, 7] = math.inf
    x[2, 9] = -math.inf
    x[3, 39] = math.nan
    x[4, 0], x[4, 1] = math.inf, -math.inf

    def every_row(x):
        return flat(
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

    fused(every_row, x)


def test_nothing_to_reduce() -> None:
    x = torch.zeros(0, 4)
    fused(
        lambda x: flat([x.sum(0), x.sum(1), x.prod(0), x.any(0), x.all(0), x.sum(), x.mean(0)]), x
    )
    fused(lambda x: torch.stack([x + 1, x + 1], 1).sum(), x)  # of one place, which is not there


@pytest.mark.parametrize("shape", [(5, 0, 5), (0, 5, 5), (5, 5, 0)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_results_without_elements(shape: tuple[int, ...], dim: int) -> None:
    """Also where a row is read twice: for its largest value, and to compare with that."""
    if shape[dim] == 0:
        fused(lambda x: (x * 2, x.sum(dim)), torch.zeros(shape))
        return

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = x == x.amax(dim, keepdim=True)
        return largest, largest.sum(dim), torch.softmax(x, dim), x.cumsum(dim)

    fused(function, torch.zeros(shape))


@pytest.mark.parametrize("size", [1 << 12, (1 << 18) + 7])
def test_long_sums(size: int) -> None:
    """As accurate as torch's, at lengths that are summed in parts and by several threads."""
    torch.manual_seed(0)
    x = torch.rand(size) + 1
    fused(lambda x: (x.sum(), x.mean(), (x * x).sum(), x.var(), x.std()), x)
    y = torch.rand(3, size // 3) + 1
    fused(lambda y: (y.sum(0), y.sum(1), y.sum(), y.var(1)), y)
    z = y.t().contiguous()
    fused(lambda z: (z.sum(0), z.sum(1), z.mean(0), z.var(0)), z)


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
        return flat(
            [r for x in xs for r in (x.sum(0), x.sum(1), x.amax(2), x.sum((0, 2)), x.sum())]
        )

    fused(sums, *inputs)


def test_rows_and_columns_are_one_kernel() -> None:
    torch.manual_seed(0)
    region = fused(lambda x: ((x * 2).sum(0), (x * 2).sum(1), x.sum()), torch.randn(300, 200))
    assert len(region.kernels) == 1
    assert region.kernels[0].bytes < 300 * 200 * 4 * 1.1, "the input is read once"


def test_many_rows_and_columns_with_threads() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, 700)
    fused(lambda x: (x.sum(0), x.sum(1), x.sum(), torch.softmax(x, 0), torch.softmax(x, 1)), x)


def test_long_rows_are_not_summed_over_in_buffers() -> None:
    """Column sums of rows past the cache get a kernel of their own, not a row a thread."""
    torch.manual_seed(0)
    region = fused(lambda x: (x.sum(0), x.sum(1)), torch.randn(3, 1 << 20))
    assert all("_parts" not in k.source or k.schedule.split for k in region.kernels)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.zeros((1 << 31) + 13, dtype=torch.uint8)
    x[-1], x[1 << 31] = 7, 5
    region = fuser.lower(trace(lambda x: ((x + 1), x.amax(), x.argmax()), (x,)))
    more, largest, place = region(x)
    assert (int(more[-1]), int(more[1 << 31]), int(more[12345])) == (8, 6, 1)
    assert (int(largest), int(place)) == (7, (1 << 31) + 12)


def test_many_rows_added_up_stay_exact() -> None:
    torch.manual_seed(0)
    fused(lambda x: x.sum(0) * 2, torch.rand(200000, 24) + 1)
    region = fused(lambda x: (x.sum(0), x.sum(1), x.sum()), torch.rand(60000, 20) + 1)
    assert len(region.kernels) == 1


def test_fewer_threads_than_asked_for() -> None:
    """A system that gives one thread where several were asked for still gets every row."""
    program = (
        "import torch\n"
        "from tests.fuser.support import fused\n"
        "torch.set_num_threads(4)\n"
        "torch.manual_seed(0)\n"
        "x = torch.rand(4000, 300)\n"
        "fused(lambda x: (x.sum(0), x.sum(1), x.sum(), torch.softmax(x, 1)), x)\n"
        "fused(lambda x: x.sum(), torch.rand(1 << 20))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_THREAD_LIMIT": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr


def test_bools_beside_their_extremes() -> None:
    """Extremes of bools are held in integers; what is beside them is not."""

    def beside(x: torch.Tensor) -> tuple:
        best, least = x.amax(-1, True), x.amin(0, True)
        return (
            torch.maximum(best, x),
            torch.minimum(least, x),
            torch.fmax(x.any(-1, True), x),
            torch.fmin(least, x),
            torch.where(best, x, least),
            x.prod(-1, True, dtype=torch.bool) ^ x,
        )

    x = torch.randint(0, 2, (5, 17), generator=torch.Generator().manual_seed(0)).bool()
    fused(beside, x)


def test_sums_of_bools_as_bools() -> None:
    x = torch.zeros(5, 17, dtype=torch.bool)
    x[2], x[3, 4] = True, True
    fused(lambda x: tuple(x.sum(d, dtype=torch.bool) for d in (0, 1, (0, 1))), x)
    x = torch.ones(3, 256, dtype=torch.bool)  # as many as a byte has no room for
    x[1, 7] = False
    fused(lambda x: (x.sum(1, dtype=torch.bool), x.prod(1, dtype=torch.bool), x.sum(1)), x)


def test_what_a_kernel_cant_store_reads_its_reduction() -> None:
    """x has fewer axes than what is summed: it is divided in a kernel that finds the sum in memory."""
    x = torch.arange(1.0, 7 * 16 + 1).reshape(7, 16)
    fused(lambda x: torch.stack([x * 2, x * 2], -2).sum() / x, x)
    fused(lambda x: torch.stack([x, -x], 0).amax(0).sum() - x, x)


def test_a_sum_of_one_negative_zero() -> None:
    """Sums start with 0, and 0 + -0 is 0."""

    def sums(x: torch.Tensor) -> tuple:
        one = x[0, 0]
        return x.sum(1), x.mean(1), x.cumsum(1), one.sum(), x[:1].sum(0), x.amax(1), x.prod(1)

    x = placed(torch.full((3, 1), -0.0))
    got = fused(sums, x)(x)
    signs = [bool(torch.signbit(value).any()) for value in got]
    assert signs == [False, False, False, False, False, True, True]


@pytest.mark.parametrize("op", [torch.max, lambda x: x.min(0).values])
def test_extremes_of_nothing_are_refused(op):
    with pytest.raises((RuntimeError, IndexError), match="reduction dim"):
        fulgurite.compile(lambda x: op(x) * 2)(torch.ones(0))
