"""GEMMs with padded columns, and the copy of their columns, against plain torch."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.gemm import padded_mm as module
from fulgurite.kernels.gemm.padded_mm import block_rows, padded_mm
from fulgurite.kernels.gemm.triton_copy_columns import copy_columns
from tests.kernels.triton_support import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 13, 2048, 2051, 4099])
def test_copy_of_columns(columns, dtype):
    source = torch.randn(5, columns + 7, device=DEVICE, dtype=dtype)
    target = torch.full((6, columns), -1.0, device=DEVICE, dtype=dtype)
    copy_columns(source, target[:5])
    assert torch.equal(target[:5], source[:, :columns])
    assert (target[5] == -1).all(), "a store went past the last row"


def test_copy_of_no_rows():
    copy_columns(torch.empty(0, 8, device=DEVICE), torch.empty(0, 3, device=DEVICE))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 9, 21])
def test_blocks_of_rows(rows, has_bias, monkeypatch):
    monkeypatch.setattr(module, "MIN_BLOCK_ROWS", 4)
    monkeypatch.setattr(module, "ROW_MULTIPLE", 2)
    a, b = torch.randn(rows, 16, device=DEVICE), torch.randn(16, 24, device=DEVICE)
    bias = torch.randn(24, device=DEVICE) if has_bias else None
    expected = a @ b if bias is None else torch.addmm(bias, a, b)
    result = padded_mm(a, b, bias, 19)
    assert result.is_contiguous() and result.shape == (rows, 19)
    torch.testing.assert_close(result, expected[:, :19], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 1, 511, 512, 513, 3072, 8192, 100_000])
def test_a_block_is_a_fraction_of_a_large_result(rows):
    size = block_rows(rows)
    assert size <= rows and (size <= 512 or size < rows / 8 + 128)
