"""The batch-invariant GEMM: float64 as the oracle, any strides, and rows that don't see each other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_support import DEVICE  # isort: skip

from fulgurite.kernels.gemm.triton_invariant_gemm import invariant_bmm, invariant_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def check_close(out: Tensor, expected: Tensor, k: int) -> None:
    # sums are float32, rounded once: half a unit of the dtype, and K roundings of float32
    tolerance = torch.finfo(out.dtype).eps + k * 2**-24
    assert (out.double() - expected).abs().max() <= tolerance * (1 + expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (70, 33, 77), (3, 130, 64), (129, 64, 200)])
def test_against_float64(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(m)
    x, weight, bias = make(m, k, dtype=dtype), make(n, k, dtype=dtype), make(n)
    check_close(
        invariant_linear(x, weight, bias), x.double() @ weight.double().t() + bias.double(), k
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stacks_of_any_strides(dtype: torch.dtype) -> None:
    """Heads of tokens times a matrix a head, by rows and by columns, into heads of tokens."""
    torch.manual_seed(0)
    tokens, heads, k, n = 9, 3, 21, 34
    x = make(tokens, heads, k + 5, dtype=dtype)[..., :k].transpose(0, 1)
    for weight in (make(heads, k, n, dtype=dtype), make(heads, n, k, dtype=dtype).mT):
        out = x.new_full((tokens, heads, n), float("nan"))
        invariant_bmm(x, weight, out_BMN=out.transpose(0, 1))
        check_close(out.transpose(0, 1), x.double() @ weight.double(), k)
        every_second = make(2 * heads, k, 2 * n, dtype=dtype)[::2, :, ::2]
        check_close(invariant_bmm(x, every_second), x.double() @ every_second.double(), k)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    assert torch.equal(invariant_linear(make(m, k), make(n, k)), torch.zeros(m, n, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    rng, rows = random.Random(1), 150
    x, weight = make(rows, 77, dtype=dtype), make(40, 77, dtype=dtype)
    whole = invariant_linear(x, weight)
    for _ in range(8):
        count = rng.choice((1, 2, 5, 63, 64, 65, 100))
        start = rng.randrange(rows - count + 1)
        part = slice(start, start + count)
        assert torch.equal(invariant_linear(x[part], weight), whole[part]), (start, count)
    poisoned = x.clone()
    poisoned[3] = float("nan")
    assert torch.equal(invariant_linear(poisoned, weight)[4:], whole[4:])
