"""Kernels of integers in groups, compiled for an H200 on whatever machine this is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there"),
]
if not INTERPRETED:
    from fulgurite.kernels.gemm import triton_launch, triton_small_m
    from fulgurite.kernels.quantize import triton_dequantize
    from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
    from fulgurite.quant import resolve_format
    from fulgurite.quant.shapes import data_shape, scale_shape
    from tests.kernels.compile_support import compile_launches, stack_bytes

FORMATS = ["int4_g32", "int4_g32_asym", "int4_g32_min", "int4_g128_asym", "int8_g16", "int8_g32"]
N, K = 4096, 4096


def parts_of(format: str):
    entry = resolve_format(format)
    data = torch.empty(data_shape(entry, (N, K)), dtype=entry.data_dtype, device="meta")
    scales = [
        torch.empty(scale_shape(scale, (N, K)), dtype=scale.dtype, device="meta")
        for scale in entry.separate_scales
    ]
    return entry, triton_launch.dequant_scheme(entry), data, scales


@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize("format", FORMATS)
def test_few_rows(format: str, m: int, monkeypatch, tmp_path: Path) -> None:
    """Numbers go from the registers they are decoded in to the tensor cores: nothing is stored between,
    and rows of x come by themselves while others are multiplied."""
    (kernel,) = compile_launches(triton_small_m, monkeypatch)
    monkeypatch.setattr(triton_small_m, "NATIVE", True)
    entry, weight, data, scales = parts_of(format)
    x = torch.empty(m, K, dtype=torch.bfloat16, device="meta")
    tile = Sm90Heuristics().weight_only_config(m, N, K, weight)
    triton_launch.launch_gemm(x, None, None, data, scales, entry, weight, None, x.dtype, tile)
    (made,) = kernel.kernels
    loop = made.asm["ptx"].split("cp.async.wait_group")[1]
    assert "mma.sync" in loop
    assert "asym" in format or "ld.global" not in loop
    assert loop.count("st.shared") <= (4 if "asym" in format else 0)  # zero points are bytes
    assert stack_bytes(made, tmp_path) <= 16


@pytest.mark.parametrize("m", [17, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_more_rows(format: str, m: int, monkeypatch, tmp_path: Path) -> None:
    compiled = compile_launches(triton_launch, monkeypatch)
    (kernel,) = (one for one in compiled if one.function.__name__ == "matmul_kernel")
    monkeypatch.setattr(triton_launch, "NATIVE", True)
    monkeypatch.setattr(
        triton_launch, "acquire_counters", lambda device, count: torch.empty(count, dtype=torch.int32, device="meta")
    )  # fmt: skip
    entry, weight, data, scales = parts_of(format)
    x = torch.empty(m, K, dtype=torch.bfloat16, device="meta")
    tile = Sm90Heuristics().weight_only_config(m, N, K, weight)
    triton_launch.launch_gemm(x, None, None, data, scales, entry, weight, None, x.dtype, tile)
    (made,) = kernel.kernels
    assert "wgmma" in made.asm["ptx"] and stack_bytes(made, tmp_path) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_decoded_first(format: str, monkeypatch) -> None:
    compile_launches(triton_dequantize, monkeypatch)
    entry, weight, data, scales = parts_of(format)
    parts = triton_launch.make_operand(data, scales, entry, weight)
    triton_dequantize.dequantize_weight(torch.bfloat16, weight, parts, entry)
