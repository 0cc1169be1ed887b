"""The casts of bfloat16 compiled for an H200 on whatever machine this is: assembly, wide loads and stores."""

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
        triton_transpose_bf16,
    )
    from tests.kernels.compile_support import compile_launches

    MODULES = (triton_quantize, triton_transpose_bf16, triton_4bit, triton_bf16x2, triton_transpose)


def compiled(x, format, monkeypatch):
    """The PTX of each kernel that a cast launches, by name."""
    stands = [stand for module in MODULES for stand in compile_launches(module, monkeypatch)]
    triton_quantize.quantize(x, format)
    return {
        stand.function.__name__: stand.kernels[0].asm["ptx"] for stand in stands if stand.kernels
    }


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4_g128", "int4_g32"])
def test_nibbles(format, monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    text = compiled(x, format, monkeypatch)["nibbles_kernel"]
    assert "max.NaN.bf16x2" in text and "ld.global.v4.b32" in text
    assert "st.global.v2.b32" in text or "st.global.v4.b32" in text
    assert ("fma.rn.bf16x2" in text) == (format == "mxfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3_128x128", "fp8_e4m3_tensor"])
def test_other_dtypes(format, dtype, monkeypatch):
    names = compiled(torch.empty(256, 256, dtype=dtype), format, monkeypatch).keys()
    assert not any("pairs" in name for name in names)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_tiles(element, monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    text = compiled(x, f"fp8_{element}_128x128", monkeypatch)["tile_pairs_kernel"]
    assert f"cvt.rn.satfinite.{element}x2.f32" in text and "st.global.v4.b32" in text


def test_maxima(monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    text = compiled(x, "fp8_e4m3_tensor", monkeypatch)["amax_pairs_kernel"]
    assert "max.NaN.bf16x2" in text and "ld.global.v4.b32" in text


@pytest.mark.parametrize("block", ["row", "1x128", "128x128"])
def test_transposes(block, monkeypatch):
    x = torch.empty(256, 4096, dtype=torch.bfloat16)
    made = compiled(x.t(), f"fp8_e4m3_{block}", monkeypatch)
    assert (
        "ld.global.v4.b32" in made["columns_kernel"]
        and "st.global.v4.b32" in made["columns_kernel"]
    )
    assert ("column_maxima_kernel" in made) == (block == "row")
