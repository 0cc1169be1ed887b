"""Gradients of grouped weights on a GPU: whole and partial blocks of rows, against float64."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.grouped_gemm import reference
from fulgurite.kernels.grouped_gemm.triton_wgrad import grouped_wgrad, supports_tma
from tests.kernels.triton_support import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [(37, 70), (40, 72), (136, 8), (16, 1)], ids=str)
@pytest.mark.parametrize(
    "ends", [[3, 3, 40, 41], [64, 128, 129, 321], [0, 0, 0, 0], [63, 64, 65, 200]]
)
def test_gradients_of_weights(
    dtype: torch.dtype, columns: tuple[int, int], ends: list[int]
) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor(ends).int()
    rows = ends[-1] + 5  # the last have no expert
    a, b = (torch.randn(rows, size).to(dtype) for size in columns)
    a[ends[-1] :] = torch.nan
    actual = grouped_wgrad(a.to(DEVICE), b.to(DEVICE), offsets.to(DEVICE)).cpu()
    expected = reference.grouped_wgrad(a.double(), b.double(), offsets)
    bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert actual.dtype == dtype and (actual.double() - expected).abs().max() <= bound


def test_strided_operands() -> None:
    wide = torch.randn(70, 96).bfloat16().to(DEVICE)
    offsets = torch.tensor([64, 70]).int().to(DEVICE)
    a, b = wide[:, 8:28], wide[:, 40:].T.contiguous().T
    assert supports_tma(a) and not supports_tma(wide[:, 1:20])
    actual = grouped_wgrad(a, b, offsets).cpu()
    expected = reference.grouped_wgrad(a.cpu().double(), b.cpu().double(), offsets.cpu())
    assert (actual.double() - expected).abs().max() <= 0.02 * expected.abs().max()
