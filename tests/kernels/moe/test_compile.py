"""The Triton kernels of experts compiled for a GPU at the sizes of real models, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, and not its interpreter", allow_module_level=True)

from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.gemm import triton_launch, triton_quant_linear, triton_small_m
from fulgurite.kernels.grouped_gemm import (
    triton_4bit,
    triton_dense,
    triton_fp8,
    triton_grouped_gemm,
    triton_tile_scheduler,
    triton_wgrad,
)
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.moe import triton_moe, triton_routing, triton_small_batch_quantized
from fulgurite.kernels.moe.router_config import RouterConfig, Routes
from fulgurite.kernels.moe.small_batch import SmallBatchArgs
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.kernels.tuning import LaunchConfig, override_heuristics
from fulgurite.quant import quantize
from tests.kernels.compile_support import IS_HOPPER, compile_launches, stack_bytes
from tests.kernels.grouped_gemm.cases import FixedConfig, with_quantized_weight

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
SILU = GatedActivation("silu")


def test_sorting_and_combining(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = compile_launches(triton_moe, monkeypatch)
    for tokens in (1, 4096):
        triton_moe.sort_by_expert(torch.zeros(tokens, 8, dtype=torch.int64), 256)
    positions = torch.zeros(8, 8, dtype=torch.int32)
    y = torch.empty(64, 7168, dtype=BF16)
    triton_moe.combine(y, positions, positions, positions, torch.ones(8, 8))
    assert all(stub.kernels for stub in stubs)


@pytest.mark.parametrize("tokens", [1, 8192])
def test_routing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = compile_launches(triton_routing, monkeypatch)
    grouped = RouterConfig(8, "sigmoid", False, True, 2.5, 8, 4, "top2_sum")
    triton_routing.route(torch.empty(tokens, 256), torch.empty(256), grouped)
    x, weight = torch.empty(tokens, 2048, dtype=BF16), torch.empty(128, 2048, dtype=BF16)
    triton_routing.route_tokens(x, weight, None, None, RouterConfig(8, renormalize=True))
    bias = weight[:, 0].contiguous()
    triton_routing.route_tokens(x, weight.float(), bias, torch.empty(128), grouped)
    assert all(stub.kernels for stub in stubs)


def make_args(
    tokens: int, format: str, gate: GatedActivation, with_epilogue: bool = False
) -> GroupedGemmArgs:
    experts, hidden, intermediate = 8, 1024, 512
    weight = torch.ones(experts, 2 * intermediate, hidden)
    row_weights = torch.empty(2 * tokens) if with_epilogue else None
    bias = torch.empty(experts, 2 * intermediate, dtype=BF16) if with_epilogue else None
    args = GroupedGemmArgs(
        torch.empty(tokens, hidden, dtype=BF16), torch.zeros(2 * tokens, dtype=torch.int32),
        row_weights, torch.zeros(experts, dtype=torch.int32), weight.to(BF16), [], "dense", bias,
        "none", gate,
    )  # fmt: skip
    return args if format == "dense" else with_quantized_weight(args, quantize(weight, format))


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize(
    "format",
    ["dense", "fp8_e4m3_row", "fp8_e4m3_128x128", "nvfp4", "mxfp4", "int8", "int4_g128", "int4_g32",
     "int4_g32_min", "int8_g32"],
)  # fmt: skip
def test_grouped_gemm(format: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (triton_grouped_gemm, triton_dense, triton_small_m, triton_4bit)
    stubs = [stub for module in modules for stub in compile_launches(module, monkeypatch)]
    compile_launches(triton_tile_scheduler, monkeypatch)
    for gate, with_epilogue in ((SILU, False), (GatedActivation("clamped", 1.7, 7.0), True)):
        triton_grouped_gemm.grouped_gemm(make_args(tokens, format, gate, with_epilogue))
    kernels = [k for stub in stubs for k in stub.kernels if "permute" not in k.metadata.name]
    assert len(kernels) == 2
    if (
        IS_HOPPER and tokens >= 64 and format.startswith(("nvfp4", "mxfp4", "int4"))
    ):  # from registers
        assert all(kernel.metadata.name == "grouped_gemm_4bit_kernel" for kernel in kernels)
        from_registers = r"wgmma\.mma_async[^;]*\}, *\{"
        assert all(re.search(from_registers, kernel.asm["ptx"]) for kernel in kernels)


def test_transposed_weights_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of x: both operands go from shared memory to the tensor cores."""
    stubs = compile_launches(triton_dense, monkeypatch)
    compile_launches(triton_tile_scheduler, monkeypatch)
    x, weight = torch.empty(16384, 2048, dtype=BF16), torch.empty(8, 2048, 1024, dtype=BF16)
    offsets = torch.zeros(8, dtype=torch.int32)
    args = GroupedGemmArgs(
        x, None, None, offsets, weight.transpose(1, 2), [], "dense", None, "none", UNGATED
    )
    triton_grouped_gemm.grouped_gemm(args)
    (kernel,) = (kernel for stub in stubs for kernel in stub.kernels)
    assert not IS_HOPPER or not re.search(r"wgmma\.mma_async[^;]*\}, *\{", kernel.asm["ptx"])


@pytest.mark.parametrize("block_m", [16, 32, 64, 128, 256])
def test_4bit_weights_stay_in_registers(
    block_m: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With every possible block_m nothing is dequantized by way of memory, and nothing is
    spilled."""
    compile_launches(triton_tile_scheduler, monkeypatch)
    stubs = compile_launches(triton_4bit, monkeypatch)
    config = LaunchConfig(block_m, 128, 128, num_warps=8 if block_m > 64 else 4, num_stages=3)
    weight = quantize(torch.ones(8, 1024, 512), "nvfp4")
    args = GroupedGemmArgs(
        torch.empty(256, 512, dtype=BF16), torch.zeros(2048, dtype=torch.int32), None,
        torch.zeros(8, dtype=torch.int32), weight.packed, [], "", None, "none", SILU,
    )  # fmt: skip
    with override_heuristics(FixedConfig(config)):
        triton_grouped_gemm.grouped_gemm(with_quantized_weight(args, weight))
    kernels = [kernel for stub in stubs for kernel in stub.kernels]
    (kernel,) = (k for k in kernels if k.metadata.name == "grouped_gemm_4bit_kernel")
    loop = kernel.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    assert "local_store" not in loop and "local_alloc %" not in loop
    assert stack_bytes(kernel, tmp_path) == 0


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
def test_small_batch(format: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (triton_small_batch_quantized, triton_small_m)
    stubs = [stub for module in modules for stub in compile_launches(module, monkeypatch)]
    monkeypatch.setattr(
        triton_small_batch_quantized, "quantize", lambda x, format: quantize_op(x, format, None)
    )
    up, down = (quantize(torch.ones(8, n, 512), format) for n in (1024, 768))
    routes = Routes(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int64))
    x = torch.ones(1, 512, dtype=BF16)
    args = SmallBatchArgs(x, routes, up, down, SILU, activations=(activations, activations))
    out = triton_small_batch_quantized.run_quantized_experts(args)
    assert out.shape == (1, 768) and [len(stub.kernels) for stub in stubs] == [1, 1]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4_g128", "fp8_e4m3_row", "int8"])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_small_m(format: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (triton_small_m, triton_launch)
    stubs = [stub for module in modules for stub in compile_launches(module, monkeypatch)]
    weight = quantize(torch.ones(64, 4096), format)
    x = torch.empty(m, 4096, dtype=BF16)
    triton_quant_linear.quant_linear(x, weight.packed, list(weight.scales.values()), format)
    (kernel,) = (kernel for stub in stubs for kernel in stub.kernels)
    assert "mma" in kernel.asm["ptx"]


@pytest.mark.parametrize("tokens", [128, 8192])
def test_fp8(tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spilled registers once made this kernel four times slower: accumulators stay in registers."""
    compile_launches(triton_tile_scheduler, monkeypatch)
    stubs = compile_launches(triton_fp8, monkeypatch)
    monkeypatch.setattr(triton_fp8, "quantize", lambda x, format: quantize_op(x, format, None))
    experts, hidden, intermediate = 8, 1024, 512
    gate_up, down = (
        quantize(torch.ones(experts, *shape), triton_fp8.WEIGHT_FORMAT)
        for shape in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    indices, offsets = (torch.zeros(size, dtype=torch.int32) for size in (2 * tokens, experts))
    x, formats = torch.ones(tokens, hidden, dtype=BF16), (triton_fp8.ACTIVATION_FORMAT,) * 2
    out = triton_fp8.run_experts_fp8(
        x, indices, None, offsets, gate_up, down, (None, None), SILU, formats
    )
    (kernels,) = (stub.kernels for stub in stubs if stub.kernels)
    assert out.shape == (2 * tokens, hidden) and len(kernels) == 2
    assert not IS_HOPPER or all(stack_bytes(kernel, tmp_path) <= 16 for kernel in kernels)


def test_wgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    (wgrad,) = compile_launches(triton_wgrad, monkeypatch)
    offsets = torch.zeros(8, dtype=torch.int32)
    for dtype, columns in ((BF16, 2048), (torch.float32, 1)):
        a, b = torch.empty(512, 1536, dtype=dtype), torch.empty(512, columns, dtype=dtype)
        triton_wgrad.grouped_wgrad(a, b, offsets)
    assert len(wgrad.kernels) == 2
