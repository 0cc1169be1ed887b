"""Results with fewer loops than their inputs: single elements, reduced constants, expanded results.

A kernel has the loops of its stores. An input with more loops is computed only at the elements
read.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fuser import support

RUNS_ON_TRITON = True

NAN = float("nan")
SELECTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda x, n: (x + 1)[n],
    "index_pair": lambda x, n: (x * 2)[n[:, None], n],
    "select": lambda x, n: (x + 1).select(0, 2).gather(0, n) * 2,
    "take": lambda x, n: (x.amax(-1) + x.sum(-1)).repeat_interleave(2, 0).take(n),
    "gather": lambda x, n: (1 - x % 3).gather(0, n.expand(1, x.shape[1])),
    "index_select": lambda x, n: x.cumsum(0).index_select(1, n),
    "embedding": lambda x, n: torch.nn.functional.embedding(n, x + 1),
}


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("shape", [(17, 33), (5, 2)])
def test_one_element_of_many(name: str, shape: tuple[int, int]) -> None:
    """Next to a result with all elements, and next to a reduction."""
    x = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) / 4
    function, n = SELECTIONS[name], torch.tensor([0])
    support.check_fused(lambda x, n: (function(x, n), x + 1), x, n)
    support.check_fused(lambda x, n: (function(x, n), x.sum(0)), x, n)


def test_kernel_of_one_element_has_no_loop() -> None:
    """A single value is stored once, not by every program of its input's loops."""
    x, n = torch.arange(5000.0), torch.tensor([3])
    region = support.check_fused(lambda x, n: ((x + 1)[n] < x, (x + 1)[n]), x, n)
    loops = [str(kernel.schedule.nest.grid) for kernel in region.kernels]
    assert any(loop == "()" for loop in loops), loops


def test_same_indices_in_both_inputs_of_a_cat() -> None:
    """Indices are loaded under the mask of each input: those of one are not known in the other."""
    x, n = torch.arange(170.0).view(17, 10), torch.tensor([3, 0, 16, 5, 5])

    def function(x, n):
        y = x.cumsum(0)
        return (
            torch.stack([y[n], y[n]], -1).sum(),
            torch.cat([y[n], y[n] * 2], 1),
            torch.stack([y.t().flatten()[n], y.flatten()[n]]).sum(0),
        )

    support.check_fused(function, x, n)


def reduce_constant(x: torch.Tensor, value: float) -> tuple[torch.Tensor, ...]:
    full = torch.full_like(x, value)
    return full.amin(0), full.amax(), full.sum(0), full.prod(0), full.cumsum(0), full[1:].amax(-1)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("value", [0, 1])
def test_reductions_of_constants(dtype: torch.dtype, value: int) -> None:
    for shape in ((5, 3), (8, 16)):
        support.check_fused(lambda x: reduce_constant(x, value), torch.zeros(shape, dtype=dtype))
    support.check_fused(lambda x: (x.isnan().amax(0), x.isnan().any()), torch.zeros(3, 7).long())


def test_expanded_results() -> None:
    """An expanded result is stored once."""
    region = support.check_fused(
        lambda x: (torch.full((), 2.0).expand(3, 2), (x + 1).expand(4, 3, 5)), torch.randn(3, 5)
    )
    assert all(kernel.bytes_moved < 200 for kernel in region.kernels), [
        k.bytes_moved for k in region.kernels
    ]


def test_empty_scan() -> None:
    """The loop of a scan exists although the strides of an empty tensor mean nothing."""
    empty = torch.zeros(3, 8, 0)
    support.check_fused(lambda x: (x.cumsum(0), x.cumsum(0).flatten()[::3], x.cumprod(1)), empty)


def test_empty_results_need_no_kernel() -> None:
    """They are only allocated. A reduction of an empty tensor is a constant, without a loop over it."""
    empty = torch.zeros(3, 0)
    region = support.check_fused(
        lambda x: (x.sigmoid(), x.tril()[1:], x.sum(0).cumsum(0), x.T), empty
    )
    assert not region.kernels, region.source
    region = support.check_fused(
        lambda x: (x + 1, (x + 1).sum(1), (x > 0).all(1), torch.nn.functional.pad(x, (1, 2))), empty
    )
    stored = [store for kernel in region.kernels for store in kernel.schedule.nest.stores]
    assert len(stored) == 3 and all(not store.tensor.is_empty for store in stored), region.source
    assert not any(axis.size == 0 for k in region.kernels for axis in k.schedule.nest.axes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # eager loses it for others
def test_sign_of_a_negated_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, -NAN, 0.0, -0.0, 1.0, float("-inf")], dtype=dtype)
    x = x[2:] if support.TARGET == "cuda" else x  # eager on CUDA changes the sign of NaN
    support.check_fused(lambda x: ((-x).signbit(), x.signbit(), (-x.abs()).signbit()), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_integer_quotients_are_exact(dtype: torch.dtype) -> None:
    """x / x is 1, so its floor is 1, too. Denormals are not flushed."""
    x = torch.arange(1, 200).to(dtype)
    flushed = support.TARGET == "cuda" and dtype == torch.bfloat16  # by fast math
    tiny = torch.full_like(x, torch.finfo(dtype).tiny / (1 if flushed else 4))

    def function(x, tiny):
        integers = torch.floor(x / x), torch.div(3 * x, x, rounding_mode="trunc"), (7 * x) // x
        return *integers, torch.floor(-tiny), torch.ceil(tiny), tiny.rsqrt(), tiny.sqrt()

    support.check_fused(function, x, tiny)


def test_complex_results_of_one_element() -> None:
    z = torch.randn(1, 1, dtype=torch.complex64)

    def function(z):
        total = z.sum(-2).cumsum(0)
        return torch.view_as_real(total.expand(3, 1)), torch.view_as_real(z.expand(5, 1) * 2)

    support.check_fused(function, z)
