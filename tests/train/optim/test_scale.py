"""Scaling of many tensors: one product in float32, rounded once."""

from __future__ import annotations

import pytest
import torch

from fulgurite.train.optim.scale import scale_tensors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_products_in_float32(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (3, 5), (0,), (), (130, 9)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    transposed = torch.randn(6, 4, generator=generator).to(dtype).t()
    special = torch.tensor([float("inf"), float("nan"), 0.0, -1.0]).to(dtype)
    tensors = [x.to(device) for x in (*tensors, transposed, special)]
    transposed = tensors[-2]
    factor = torch.tensor(1 / 3, device=device)  # a bfloat16 factor would be off by 0.1%
    expected = [(x.double() * factor.double() if dtype == torch.float64 else x.float() * factor).to(dtype) for x in tensors]  # fmt: skip
    scale_tensors(tensors, factor)
    for found, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(transposed.nan_to_num(), tensors[-2].nan_to_num())  # in place


def test_no_tensors() -> None:
    scale_tensors([], torch.tensor(2.0))
