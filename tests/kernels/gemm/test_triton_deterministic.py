"""GEMMs of deterministic mode on a GPU: a row's bits don't depend on the other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.determinism import deterministic
from fulgurite.kernels.gemm import triton_quant_linear
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.kernels.tuning.deterministic import PART_K
from fulgurite.quant import quantize
from tests.kernels.triton_support import DEVICE, assert_same_bits

# tiles of 16 to 128 rows, and K in several parts, which one program has or several share
ROWS, COUNTS = 130, (1, 2, 17, 64, 65, 130)


def check_rows(function, x: Tensor) -> Tensor:
    whole = function(x)
    for count in COUNTS:
        for start in {0, ROWS - count}:
            part = slice(start, start + count)
            assert_same_bits(function(x[part]), whole[part], f"{count} rows from {start} on")
    return whole


@pytest.mark.parametrize(("n", "k"), [(40, 80), (65, 64), (65, PART_K), (40, 2 * PART_K + 72)])
def test_dense_linear(n: int, k: int) -> None:
    torch.manual_seed(n)
    sizes = ((ROWS, k), (n, k), (n,))
    x, weight, bias = (torch.randn(*size).to(DEVICE, torch.bfloat16) for size in sizes)
    with deterministic():
        out = check_rows(lambda rows: triton_quant_linear.dense_linear(rows, weight, bias), x)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=0.05 + k / 4096)


@pytest.mark.parametrize("k", [128, PART_K + 128])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3_128x128", "int4_g128", "mxfp4"])
def test_quant_linear(format: str, k: int) -> None:
    torch.manual_seed(5)
    weight = quantize(torch.randn(64, k), format).to(DEVICE)
    x = torch.randn(ROWS, k).to(DEVICE, torch.bfloat16)
    scales = list(weight.scales.values())

    def linear(rows: Tensor) -> Tensor:
        return triton_quant_linear.quant_linear(rows, weight.packed, scales, format)

    with deterministic():
        out = check_rows(linear, x)
    expected = x.double() @ weight.dequantize().double().t()
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=0.2 + k / 2048)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("k", [PART_K, 2 * PART_K + 72])
def test_programs_that_share_the_parts_of_k(k: int, rows: int, monkeypatch) -> None:
    """One program adds the parts in registers, several in memory: the same bits, in the interpreter too."""
    torch.manual_seed(k)
    x, weight = (torch.randn(n, k).to(DEVICE, torch.bfloat16) for n in (rows, 65))
    with deterministic():
        shared = triton_quant_linear.dense_linear(x, weight, None)
        monkeypatch.setattr(heuristics_for(x.device), "num_sms", 1)
        alone = triton_quant_linear.dense_linear(x, weight, None)
    assert torch.equal(shared, alone)
