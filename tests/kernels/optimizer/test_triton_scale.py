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
    scale_in_place([ours], factor.to(DEVICE))
    # The interpreter truncates where a GPU rounds to nearest.
    rtol = 2**-7 if INTERPRETED and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(ours.cpu(), expected, rtol=rtol, atol=0, equal_nan=True)


def test_many_tensors_in_one_launch() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(DEVICE) for size in (3, 0, 70_000, 1)]
    tensors.append(torch.randn(9, generator=generator).to(DEVICE)[1:])  # not aligned
    expected = [x * 0.5 for x in tensors]
    scale_in_place(tensors, torch.tensor(0.5).to(DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    scale_in_place([], torch.tensor(0.5).to(DEVICE))
