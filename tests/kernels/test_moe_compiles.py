"""The experts' Triton kernels compile for an H200 at the sizes of real models, without one."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, and not its interpreter", allow_module_level=True)

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm import triton_launch, triton_quant_linear, triton_small_m
from fulgurite.kernels.grouped_gemm import (
    triton_4bit,
    triton_dense,
    triton_fp8,
    triton_grouped_gemm,
    triton_tile_scheduler,
)
from fulgurite.kernels.moe import triton_moe, triton_routing, triton_small_batch_quantized
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.quant import quantize
from tests.kernels.compile_support import compile_launches, stack_bytes

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16


def test_sorting_and_summing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_launches(triton_moe, monkeypatch)
    for tokens in (1, 4096):
        triton_moe.sort_by_expert(torch.zeros(tokens, 8, dtype=torch.int64), 256)
    places = torch.zeros(8, 8, dtype=torch.int32)
    triton_moe.combine(torch.empty(64, 7168, dtype=BF16), places, places, places, torch.ones(8, 8))
    assert all(kernel.kernels for kernel in kernels)


@pytest.mark.parametrize("tokens", [1, 8192])
def test_routing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_launches(triton_routing, monkeypatch)
    groups = (8, "sigmoid", False, True, 2.5, 8, 4, "two")
    triton_routing.route(torch.empty(tokens, 256), torch.empty(256), *groups)
    x, weight = torch.empty(tokens, 2048, dtype=BF16), torch.empty(128, 2048, dtype=BF16)
    triton_routing.route_tokens(x, weight, None, None, 8, "softmax", False, True, 1.0, 1, 1, "max")
    triton_routing.route_tokens(
        x, weight.float(), weight[:, 0].contiguous(), torch.empty(128), *groups
    )
    assert all(kernel.kernels for kernel in kernels)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize(
    "format",
    ["dense", "fp8_e4m3_row", "fp8_e4m3_128x128", "nvfp4", "mxfp4", "int8", "int4_g128", "int4_g32",
     "int4_g32_min", "int8_g32"],
)  # fmt: skip
def test_grouped_matmul(format: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        *compile_launches(triton_grouped_gemm, monkeypatch),
        *compile_launches(triton_dense, monkeypatch),
        *compile_launches(triton_small_m, monkeypatch),
        *compile_launches(triton_4bit, monkeypatch),
    ]
    compile_launches(triton_tile_scheduler, monkeypatch)
    experts, hidden, inner = 8, 1024, 512
    weight = torch.ones(experts, 2 * inner, hidden)
    data, scales = weight.to(BF16), []
    if format != "dense":
        packed = quantize(weight, format)
        data, scales = packed.packed, list(packed.scales.values())
    rows, ends = torch.zeros(2 * tokens, dtype=torch.int32), torch.zeros(experts, dtype=torch.int32)
    x = torch.empty(tokens, hidden, dtype=BF16)
    for gate, factors, bias in (("silu", None, None), ("clamped", torch.empty(2 * tokens), data)):
        bias = None if bias is None else torch.empty(experts, 2 * inner, dtype=BF16)
        triton_grouped_gemm.grouped_gemm(
            x, rows, None, factors, ends, data, scales, format, bias, "none", gate, 1.7, 7.0
        )
    made = [m for kernel in kernels for m in kernel.kernels if "arrange" not in m.metadata.name]
    assert len(made) == 2
    if tokens >= 64 and format.startswith(("nvfp4", "mxfp4", "int4")):  # from registers
        assert all(m.metadata.name == "grouped_packed_kernel" for m in made)
        assert all(re.search(r"wgmma\.mma_async[^;]*\}, *\{", m.asm["ptx"]) for m in made)


@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
def test_nibbles_stay_in_registers(
    rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each tile of rows that there may be: nothing is decoded by way of memory, nothing spilled."""
    compile_launches(triton_tile_scheduler, monkeypatch)
    kernels = compile_launches(triton_4bit, monkeypatch)
    tile = LaunchConfig(rows, 128, 128, num_warps=8 if rows > 64 else 4, num_stages=3)
    monkeypatch.setattr(Sm90Heuristics, "grouped_4bit_config", lambda *_: tile)
    packed = quantize(torch.ones(8, 1024, 512), "nvfp4")
    order, ends = torch.zeros(2048, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    data, scales = packed.packed, list(packed.scales.values())
    x = torch.empty(256, 512, dtype=BF16)
    triton_grouped_gemm.grouped_gemm(
        x, order, None, None, ends, data, scales, "nvfp4", None, "none", "silu", 0.0, 0.0
    )
    (made,) = (m for k in kernels for m in k.kernels if m.metadata.name == "grouped_packed_kernel")
    loop = made.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    assert "local_store" not in loop and "local_alloc %" not in loop
    assert stack_bytes(made, tmp_path) == 0


@pytest.mark.parametrize(
    "format, activations",
    [
        *(
            (format, "none")
            for format in ("nvfp4", "mxfp4", "int4_g128", "int4_g32_min", "int8_g16", "int8")
        ),
        ("fp8_e4m3_128x128", "none"),
        ("fp8_e4m3_128x128", "fp8_e4m3_1x128"),
    ],
)
def test_few_tokens(format: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        *compile_launches(triton_small_batch_quantized, monkeypatch),
        *compile_launches(triton_small_m, monkeypatch),
    ]
    monkeypatch.setattr(
        triton_small_batch_quantized, "quantize", lambda x, format: quantize_op(x, format, None)
    )
    up, down = (quantize(torch.ones(8, n, 512), format) for n in (1024, 768))
    x, chosen = torch.ones(1, 512, dtype=BF16), torch.zeros(1, 2, dtype=torch.int64)
    out = triton_small_batch_quantized.run_quantized_experts(
        x, chosen, torch.ones(1, 2), up, down, "silu", 0.0, 0.0, None, None, (activations,) * 2
    )
    assert out.shape == (1, 768) and [len(kernel.kernels) for kernel in kernels] == [1, 1]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4_g128", "fp8_e4m3_row", "int8"])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_few_rows(format: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_launches(triton_small_m, monkeypatch) + compile_launches(
        triton_launch, monkeypatch
    )
    packed = quantize(torch.ones(64, 4096), format)
    x = torch.empty(m, 4096, dtype=BF16)
    triton_quant_linear.quant_linear(x, packed.packed, list(packed.scales.values()), format)
    (made,) = (made for kernel in kernels for made in kernel.kernels)
    assert "mma" in made.asm["ptx"]


@pytest.mark.parametrize("tokens", [128, 8192])
def test_fp8(tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spilled registers made this kernel four times slower: sums stay where they are."""
    compile_launches(triton_tile_scheduler, monkeypatch)
    kernels = compile_launches(triton_fp8, monkeypatch)
    rows, tiles = triton_fp8.ACTIVATION_FORMAT, triton_fp8.WEIGHT_FORMAT
    experts, hidden, inner = 8, 1024, 512
    gate_up, down = (
        quantize(torch.ones(experts, *shape), tiles)
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    monkeypatch.setattr(triton_fp8, "quantize", lambda x, format: quantize_op(x, format, None))
    order, ends = (torch.zeros(size, dtype=torch.int32) for size in (2 * tokens, experts))
    x = torch.ones(tokens, hidden, dtype=BF16)
    out = triton_fp8.run_experts_fp8(
        x, order, None, ends, gate_up, down, (None, None), GatedActivation(), (rows, rows)
    )
    (both,) = (kernel.kernels for kernel in kernels if kernel.kernels)
    assert out.shape == (2 * tokens, hidden) and len(both) == 2
    assert all(stack_bytes(made, tmp_path) <= 16 for made in both)


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    (outer,) = (
        k
        for k in compile_launches(triton_grouped_gemm, monkeypatch)
        if "outer" in k.function.__name__
    )
    ends = torch.zeros(8, dtype=torch.int32)
    for dtype, columns in ((BF16, 2048), (torch.float32, 1)):
        a, b = torch.empty(512, 1536, dtype=dtype), torch.empty(512, columns, dtype=dtype)
        triton_grouped_gemm.grouped_wgrad(a, b, ends)
    assert len(outer.kernels) == 2
