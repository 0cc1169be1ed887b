"""GEMM kernels with integers in groups, compiled for a GPU without having one."""

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
    from fulgurite.determinism import deterministic
    from fulgurite.kernels.common.triton_operands import (
        dequant_scheme,
        dequantize_first_scheme,
        make_operand,
    )
    from fulgurite.kernels.gemm import triton_launch, triton_small_m
    from fulgurite.kernels.gemm.triton_launch import GemmInputs, launch_gemm
    from fulgurite.kernels.quantize import triton_dequantize
    from fulgurite.kernels.tuning import heuristics_for
    from fulgurite.quant import resolve_format
    from fulgurite.quant.shapes import data_shape, scale_shape
    from tests.kernels.compile_support import IS_HOPPER, compile_launches, stack_bytes

FORMATS = ["int4_g32", "int4_g32_asym", "int4_g32_min", "int4_g128_asym", "int8_g16", "int8_g32"]
N, K = 4096, 4096


def make_weight(format: str):
    entry = resolve_format(format)
    data = torch.empty(data_shape(entry, (N, K)), dtype=entry.data_dtype, device="meta")
    scales = [
        torch.empty(scale_shape(scale, (N, K)), dtype=scale.dtype, device="meta")
        for scale in entry.separate_scales
    ]
    scheme = dequant_scheme(entry) or dequantize_first_scheme(entry)
    assert scheme is not None
    return make_operand(data, scales, entry, scheme), scheme


def run_gemm(format: str, m: int) -> None:
    weight, scheme = make_weight(format)
    x = torch.empty(m, K, dtype=torch.bfloat16, device="meta")
    config = heuristics_for(torch.device("cpu")).weight_only_gemm(m, N, K, scheme)
    launch_gemm(GemmInputs(x, weight, scheme, x.dtype), config)


@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize("format", FORMATS)
def test_small_m(format: str, m: int, monkeypatch, tmp_path: Path) -> None:
    """Dequantized values go from registers into the MMA: nothing is stored in shared memory
    between, and rows of x come by asynchronous copies."""
    (stub,) = compile_launches(triton_small_m, monkeypatch)
    run_gemm(format, m)
    (kernel,) = stub.kernels
    loop = kernel.asm["ptx"].split("cp.async.wait_group")[1]
    assert "mma.sync" in loop
    assert "asym" in format or "ld.global" not in loop
    assert loop.count("st.shared") <= (4 if "asym" in format else 0)  # zero points are bytes
    assert stack_bytes(kernel, tmp_path) <= 16 or not IS_HOPPER


def compile_tiled(format: str, m: int, monkeypatch):
    """The kernel that `gemm_kernel` is compiled to for a GEMM of m rows."""
    stubs = compile_launches(triton_launch, monkeypatch)
    (stub,) = (one for one in stubs if one.function.__name__ == "gemm_kernel")
    monkeypatch.setattr(
        triton_launch,
        "acquire_counters",
        lambda device, count: torch.empty(count, dtype=torch.int32, device="meta"),
    )
    run_gemm(format, m)
    (kernel,) = stub.kernels
    return kernel


@pytest.mark.parametrize("m", [17, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_tiled(format: str, m: int, monkeypatch, tmp_path: Path) -> None:
    kernel = compile_tiled(format, m, monkeypatch)
    if IS_HOPPER:
        assert "wgmma" in kernel.asm["ptx"] and stack_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("m", [1, 64, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_deterministic(format: str, m: int, monkeypatch, tmp_path: Path) -> None:
    """One instruction for any number of rows: another one need not add in the same order."""
    with deterministic():
        kernel = compile_tiled(format, m, monkeypatch)
    ptx = kernel.asm["ptx"]
    if IS_HOPPER:
        assert "wgmma" in ptx and "mma.sync" not in ptx
        # tiles of 128 rows with zero points and two accumulators spill some registers
        assert stack_bytes(kernel, tmp_path) <= (128 if m > 64 else 0)


@pytest.mark.parametrize("format", [*FORMATS, "nf4", "int8_asym", "int8_g16_asym"])
def test_dequantize_first(format: str, monkeypatch) -> None:
    compile_launches(triton_dequantize, monkeypatch)
    weight, scheme = make_weight(format)
    triton_dequantize.dequantize_weight(torch.bfloat16, scheme, weight)
