"""The quantization error of a format: the signal-to-quantization-noise ratio (SQNR) in decibels.

    sqnr = 10 * log10(sum(x^2) / sum((x - y)^2)), in float64

In: the original tensor and its quantized version. Out: the SQNR.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulgurite.quant.tensor import QuantTensor


def compute_sqnr(original: Tensor, quantized: Tensor) -> float:
    """SQNR in dB; infinite if there is no error, NaN if a value is NaN."""
    if isinstance(quantized, QuantTensor):
        quantized = quantized.dequantize(torch.float32)
    x, y = original.double(), quantized.double()
    signal, noise = x.square().sum().item(), (x - y).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
