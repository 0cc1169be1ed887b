"""The scaling kernel: one product in float32, rounded once."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.common.triton_import import INTERPRETED
from fulgurite.kernels.optimizer.triton_scale import scale_in_place
from tests.kernels.triton_support import DEVICE


@pytest.mark.parametrize("size", [1, 7, 1024, 3001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    x[-1] = float("nan")
    factor = torch.tensor(1 / 3)
    expected = (x.float() * factor).to(dtype)
    ours = x.to(DEVICE)
    scale_in_place(ours, factor.to(DEVICE))
    # The interpreter truncates where a GPU rounds to nearest.
    rtol = 2**-7 if INTERPRETED and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(ours.cpu(), expected, rtol=rtol, atol=0, equal_nan=True)
