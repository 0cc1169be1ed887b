"""Arguments that `grouped_gemm` refuses."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.quant import quantize


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("offsets", [torch.tensor([4]), torch.tensor([4, 4, 4])])
def test_offsets_of_another_dtype_or_length(offsets, is_quantized):
    weight = torch.randn(3, 8, 64)
    weight = quantize(weight, "q8_0") if is_quantized else weight
    with pytest.raises(ArgumentError, match=r"offsets must be int32\[3\].*int64"):
        grouped_gemm(torch.randn(4, 64), offsets, weight)


def test_rows_of_another_k():
    offsets = torch.tensor([4, 4, 4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="can't be multiplied by experts"):
        grouped_gemm(torch.randn(4, 32), offsets, torch.randn(3, 8, 64))
