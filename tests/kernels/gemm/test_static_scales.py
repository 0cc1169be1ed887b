"""A `QuantLinear` uses the static scale of its checkpoint where the device multiplies its format."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.gemm import modules
from fulgurite.kernels.gemm.modules import QuantLinear, compute_logits
from fulgurite.quant import quantize

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
SCALE = torch.tensor(0.01)


def test_cpus_leave_activations_unquantized() -> None:
    linear = QuantLinear(quantize(WEIGHT, "fp8_e4m3_tensor"), None, None, SCALE)
    assert linear.static_scale is None and linear.activations == "none"
    expected = X @ linear.weight.dequantize().T
    assert torch.allclose(linear(X), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(compute_logits(X, linear), linear(X))


@pytest.mark.parametrize(
    ("weights", "dynamic", "static"),
    [
        ("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_tensor"),
        ("fp8_e4m3_row", "fp8_e4m3_row", "fp8_e4m3_tensor"),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("nvfp4", "none", None),  # weight-only on this device
        ("fp8_e4m3_128x128", "fp8_e4m3_1x128", None),  # blocks have no static scale
    ],
)
def test_devices_that_multiply_the_format(monkeypatch, weights, dynamic, static) -> None:
    monkeypatch.setattr(modules, "default_activation_format", lambda weight: dynamic)
    linear = QuantLinear(quantize(WEIGHT, weights), None, None, SCALE)
    assert linear.activations == (static or dynamic)
    assert (linear.static_scale is None) == (static is None)
    rows = quantize(X, "fp8_e4m3_tensor", scale=SCALE).dequantize()
    if static == "fp8_e4m3_tensor":
        expected = rows @ linear.weight.dequantize().T
        assert torch.allclose(linear(X), expected, rtol=1e-4, atol=1e-4)
    assert QuantLinear(quantize(WEIGHT, weights), None, "none", SCALE).static_scale is None
    monkeypatch.undo()
    assert linear.to("cpu").static_scale is None  # activations follow the device
