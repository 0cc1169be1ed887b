"""Casts of bfloat16 compiled for sm_90 without a GPU: inline assembly, wide loads and stores."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there"
    ),
]

if os.environ.get("TRITON_INTERPRET") != "1":
    from fulgurite.kernels.quantize import (
        triton_4bit,
        triton_bf16x2,
        triton_quantize,
        triton_transpose,
    )
    from tests.kernels.compile_support import compile_launches

    MODULES = (triton_quantize, triton_4bit, triton_bf16x2, triton_transpose)


def compiled(x, format, monkeypatch):
    """The PTX of each kernel that a cast launches, by name."""
    stubs = [stub for module in MODULES for stub in compile_launches(module, monkeypatch)]
    triton_quantize.quantize(x, format)
    return {stub.function.__name__: stub.kernels[0].asm["ptx"] for stub in stubs if stub.kernels}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4_g128", "int4_g32"])
def test_4bit(format, monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    text = compiled(x, format, monkeypatch)["quantize_4bit_kernel"]
    assert "max.NaN.bf16x2" in text and "ld.global.v4.b32" in text
    assert "st.global.v2.b32" in text or "st.global.v4.b32" in text
    assert ("fma.rn.bf16x2" in text) == (format == "mxfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3_128x128", "fp8_e4m3_tensor"])
def test_other_dtypes(format, dtype, monkeypatch):
    names = compiled(torch.empty(256, 256, dtype=dtype), format, monkeypatch).keys()
    assert not any("bf16x2" in name for name in names)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_128x128(element, monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    text = compiled(x, f"fp8_{element}_128x128", monkeypatch)["quantize_128x128_bf16x2_kernel"]
    assert f"cvt.rn.satfinite.{element}x2.f32" in text and "st.global.v4.b32" in text


def test_amax(monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    text = compiled(x, "fp8_e4m3_tensor", monkeypatch)["amax_bf16x2_kernel"]
    assert "max.NaN.bf16x2" in text and "ld.global.v4.b32" in text


@pytest.mark.parametrize("block", ["row", "1x128", "128x128"])
def test_transposes(block, monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    kernels = compiled(x.t(), f"fp8_e4m3_{block}", monkeypatch)
    text = kernels["quantize_transposed_bf16x2_kernel"]
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    assert ("column_amax_bf16x2_kernel" in kernels) == (block == "row")
