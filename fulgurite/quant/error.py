"""How much a format loses: the ratio of signal to noise, in decibels.

In: the original and what was read back. Out: 10 * log10(sum(x^2) / sum((x - y)^2)), in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulgurite.quant.tensor import QuantTensor


def signal_to_noise(original: Tensor, stored: Tensor) -> float:
    """Decibels; infinite where nothing was lost, NaN where a value is NaN."""
    if isinstance(stored, QuantTensor):
        stored = stored.dequantize(torch.float32)
    x, y = original.double(), stored.double()
    signal, noise = x.square().sum().item(), (x - y).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
