"""The bits of a row depend on the row alone: C++ kernels reduce and scan in one order of operations.

A row is computed together with others and alone, by static and symbolic kernels, by one thread and
two, contiguous or not. `include/reductions.h` and `codegen/cpp/scan.py` define the order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.fuser import support
from tests.fuser.support import as_tuple, lower_for_target

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def needs_cpp_kernels(target: None) -> None:
    if support.TARGET != "cpp":
        pytest.skip("schedules of C++ kernels")


def reduce_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums, products and extremes; minus and plus zero are equal, but have different bits."""
    zeros = torch.where(x > 0, 0.0, -0.0)
    return x.sum(-1), x.var(-1), (1 + x / 64).prod(-1), (x * zeros).amax(-1), x.argmin(-1)


def normalize_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Softmax of a wide range has subnormal results."""
    return F.softmax(x * 30, -1), F.layer_norm(F.gelu(x), x.shape[-1:]), F.normalize(x, dim=-1)


def select_and_sum(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Bools and floats in one pass."""
    return torch.where(x > 0, x.exp(), x).logsumexp(-1), (x > 0).sum(-1)


def scan_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.cumsum(-1), (1 + x / 64).cumprod(-1), x.logcumsumexp(-1)


def sort_rows(x: torch.Tensor) -> torch.Tensor:
    """A row program."""
    return torch.sort(F.softmax(x, -1), -1).values / x.exp().sum(-1, keepdim=True)


FUNCTIONS = [reduce_rows, normalize_rows, select_and_sum, scan_rows, sort_rows]


def make_rows(layout: str, rows: int, width: int) -> torch.Tensor:
    if layout == "transposed":
        return torch.randn(width, rows).t()
    return (
        torch.randn(rows, width + 3)[:, 1:-2] if layout == "strided" else torch.randn(rows, width)
    )


def assert_same_bits(results: Any, expected: Any, rows: slice | None = None) -> None:
    for result, whole in zip(as_tuple(results), as_tuple(expected), strict=True):
        want = whole if rows is None else whole[rows]
        assert torch.equal(result.isnan(), want.isnan())
        result, want = result.nan_to_num(), want.nan_to_num()
        assert torch.equal(result, want) and torch.equal(result.signbit(), want.signbit())


@pytest.mark.parametrize("seed", range(6))
def test_a_row_has_the_same_bits_alone_and_with_others(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    rows, width = chance.randint(2, 100), chance.choice([chance.randint(1, 40), 64, 100, 300])
    layout = chance.choice(["contiguous", "transposed", "strided"])
    x = make_rows(layout, rows, width).to(chance.choice([F32, F32, F32, BF16, F16, F64]))
    function: Callable[..., Any] = FUNCTIONS[seed % len(FUNCTIONS)]
    whole = lower_for_target(function, (x,))(x)
    alone = x[1:2].contiguous()
    assert_same_bits(lower_for_target(function, (alone,))(alone), whole, slice(1, 2))
    symbolic = lower_for_target(function, (x,), "symbolic")
    for k in (rows, chance.randint(2, rows)):
        assert_same_bits(symbolic(x[:k]), whole, slice(k))


@pytest.mark.parametrize("shape", [(4, 20000), (40000, 4)])
def test_bits_do_not_depend_on_the_number_of_threads(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split rows, columns and scans, and sums over rows beside sums over columns."""
    torch.manual_seed(0)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x / x.sum(-1, keepdim=True)
        return y, (x * x).sum(0), x.sum(), F.softmax(x, 0), x.cumsum(-1)

    x = torch.randn(shape)
    results = []
    for threads in (1, 5):  # schedules, too, depend on them
        monkeypatch.setenv("FULGURITE_NUM_THREADS", str(threads))
        results.append(lower_for_target(function, (x,))(x))
    for result in results[1:]:
        assert_same_bits(result, results[0])
