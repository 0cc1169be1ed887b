"""Results of one place among many, constants that are reduced, results that repeat: what has fewer loops than it reads.

A kernel has the loops of what it stores. What that is made of may have more, and then is computed at the places read.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fuser import support

NAN = float("nan")
PLACES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda x, n: (x + 1)[n],
    "index_pair": lambda x, n: (x * 2)[n[:, None], n],
    "select": lambda x, n: (x + 1).select(0, 2).gather(0, n) * 2,
    "take": lambda x, n: (x.amax(-1) + x.sum(-1)).repeat_interleave(2, 0).take(n),
    "gather": lambda x, n: (1 - x % 3).gather(0, n.expand(1, x.shape[1])),
    "index_select": lambda x, n: x.cumsum(0).index_select(1, n),
    "embedding": lambda x, n: torch.nn.functional.embedding(n, x + 1),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("shape", [(17, 33), (5, 1)])
def test_one_place_of_many(name: str, shape: tuple[int, int]) -> None:
    """Alone, and beside all the others."""
    x = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) / 4
    function, n = PLACES[name], torch.tensor([0])
    support.fused(lambda x, n: (function(x, n), x + 1), x, n)
    support.fused(lambda x, n: (function(x, n), x.sum(0)), x, n)


def test_the_kernel_of_one_place_has_no_loop() -> None:
    """Each store of a value that has no loop is done once, not by every program of what it is read from."""
    x, n = torch.arange(5000.0), torch.tensor([3])
    region = support.fused(lambda x, n: ((x + 1)[n] < x, (x + 1)[n]), x, n)
    loops = [str(kernel.schedule.nest.grid) for kernel in region.kernels]
    assert any(loop == "()" for loop in loops), loops


def test_the_same_places_in_both_parts_of_a_join() -> None:
    """Positions are read where they are used: those of one part are not there in the other."""
    x, n = torch.arange(170.0).view(17, 10), torch.tensor([3, 0, 16, 5, 5])

    def function(x, n):
        y = x.cumsum(0)
        return (
            torch.stack([y[n], y[n]], -1).sum(),
            torch.cat([y[n], y[n] * 2], 1),
            torch.stack([y.t().flatten()[n], y.flatten()[n]]).sum(0),
        )

    support.fused(function, x, n)


def filled(x: torch.Tensor, value: float) -> tuple[torch.Tensor, ...]:
    full = torch.full_like(x, value)
    return full.amin(0), full.amax(), full.sum(0), full.prod(0), full.cumsum(0), full[1:].amax(-1)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("value", [0, 1])
def test_reductions_of_constants(dtype: torch.dtype, value: int) -> None:
    for shape in ((5, 3), (8, 16)):
        support.fused(lambda x: filled(x, value), torch.zeros(shape, dtype=dtype))
    support.fused(lambda x: (x.isnan().amax(0), x.isnan().any()), torch.zeros(3, 7).long())


def test_results_that_repeat_in_memory() -> None:
    """An expanded result is stored once, and seen many times."""
    region = support.fused(
        lambda x: (torch.full((), 2.0).expand(3, 2), (x + 1).expand(4, 3, 5)), torch.randn(3, 5)
    )
    assert all(kernel.bytes < 200 for kernel in region.kernels), [k.bytes for k in region.kernels]


def test_an_empty_scan() -> None:
    """Of an empty tensor strides say nothing, and the loop of a scan is there still."""
    empty = torch.zeros(3, 8, 0)
    support.fused(lambda x: (x.cumsum(0), x.cumsum(0).flatten()[::3], x.cumprod(1)), empty)


def test_nothing_is_computed_of_nothing() -> None:
    """What has no elements is allocated; what is reduced of it is there without a loop over it."""
    empty = torch.zeros(3, 0)
    region = support.fused(lambda x: (x.sigmoid(), x.tril()[1:], x.sum(0).cumsum(0), x.T), empty)
    assert not region.kernels, region.source
    region = support.fused(
        lambda x: (x + 1, (x + 1).sum(1), (x > 0).all(1), torch.nn.functional.pad(x, (1, 2))), empty
    )
    stored = [store for kernel in region.kernels for store in kernel.schedule.nest.stores]
    assert len(stored) == 3 and all(not store.tensor.is_empty for store in stored), region.source
    assert not any(axis.size == 0 for k in region.kernels for axis in k.schedule.nest.axes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # others lose it in eager
def test_the_sign_of_a_negated_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, -NAN, 0.0, -0.0, 1.0, float("-inf")], dtype=dtype)
    x = x[2:] if support.TARGET == "cuda" else x  # eager gives NaN another sign there, or none
    support.fused(lambda x: ((-x).signbit(), x.signbit(), (-x.abs()).signbit()), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_quotients_that_are_whole(dtype: torch.dtype) -> None:
    """x / x is 1, so that its floor is 1, too; denormals are numbers."""
    x = torch.arange(1, 200).to(dtype)
    flushed = support.TARGET == "cuda" and dtype == torch.bfloat16  # by approximate functions
    tiny = torch.full_like(x, torch.finfo(dtype).tiny / (1 if flushed else 4))

    def function(x, tiny):
        whole = torch.floor(x / x), torch.div(3 * x, x, rounding_mode="trunc"), (7 * x) // x
        return *whole, torch.floor(-tiny), torch.ceil(tiny), tiny.rsqrt(), tiny.sqrt()

    support.fused(function, x, tiny)


def test_complex_results_of_one_place() -> None:
    z = torch.randn(1, 1, dtype=torch.complex64)

    def function(z):
        total = z.sum(-2).cumsum(0)
        return torch.view_as_real(total.expand(3, 1)), torch.view_as_real(z.expand(5, 1) * 2)

    support.fused(function, z)
