"""A `QuantLinear` uses the static scale of its checkpoint where the device multiplies its format."""

from __future__ import annotations

import pytest
import torch

from fulgurite.determinism import deterministic
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


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("format", ["fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_128x128"])
def test_few_rows_are_not_quantized(format: str, is_static: bool) -> None:
    """By default, outside of deterministic mode; more rows are."""
    torch.manual_seed(0)
    weight = quantize(torch.randn(256, 512, device="cuda", dtype=torch.bfloat16), format)
    scale = torch.tensor(0.02, device="cuda") if is_static else None
    linear = QuantLinear(weight, None, None, scale)
    x = torch.randn(9, 512, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ weight.dequantize().double().T

    def error(rows: int) -> float:
        difference = linear(x[:rows]).double() - exact[:rows]
        return float(difference.norm() / exact[:rows].norm())

    assert max(error(rows) for rows in (1, 3, 8)) < 4e-3
    assert error(9) > 1e-2
    with deterministic():
        assert error(1) > 1e-2
