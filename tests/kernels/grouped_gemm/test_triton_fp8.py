"""Grouped GEMM in FP8 on a GPU: against float64, and its own quantization against two kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.gemm.reference import fake_quantize_activations
from fulgurite.kernels.grouped_gemm.triton_fp8 import (
    ACTIVATION_FORMAT,
    WEIGHT_FORMAT,
    Fp8Inputs,
    grouped_gemm_fp8,
    run_experts_fp8,
    select_fp8_config,
)
from fulgurite.kernels.grouped_gemm.triton_grouped_gemm import grouped_gemm
from fulgurite.kernels.quantize.reference import quantize as quantize_reference
from fulgurite.kernels.tuning import LaunchConfig
from fulgurite.quant import QuantTensor, quantize
from tests.kernels.grouped_gemm import cases
from tests.kernels.grouped_gemm.cases import Shape, assert_near, to_device, with_quantized_weight
from tests.kernels.triton_support import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SILU = GatedActivation("silu")


def make_config(is_gated: bool, block_m: int = 64) -> LaunchConfig:
    return LaunchConfig(block_m, 128 if is_gated else 256, 128, 8, 4, group_n=8)


class Problem:
    """Tokens, routes (one of them to no expert) and weights in FP8."""

    def __init__(self, shape: Shape, with_epilogue: bool) -> None:
        problem = cases.make_problem(shape, torch.bfloat16, with_epilogue)
        self.args, self.order = problem.args, problem.order
        self.weight = quantize(self.args.data.float(), WEIGHT_FORMAT)

    def run(
        self, out_format: str | None = None, config: LaunchConfig | None = None
    ) -> list[Tensor]:
        """The kernel's result."""
        args = to_device(with_quantized_weight(self.args, self.weight), DEVICE)
        codes, scale = (t.to(DEVICE) for t in quantize_reference(self.args.x, ACTIVATION_FORMAT))
        inputs = Fp8Inputs(
            codes, scale, args.data, args.scales[0], args.offsets, torch.bfloat16, args.row_indices,
            args.row_weights, args.bias, args.gate, out_format,
        )  # fmt: skip
        config = config or make_config(args.gate.is_gated)
        return [part.cpu() for part in grouped_gemm_fp8(inputs, config)]

    def expected(self) -> Tensor:
        x = fake_quantize_activations(self.args.x, ACTIVATION_FORMAT)
        args = replace(self.args, x=x, data=self.weight.dequantize(torch.float32))
        return cases.Problem(args, self.order).expected()


SHAPES = [
    (1, 1, 1, 128, 256, "silu"),
    (9, 3, 2, 384, 512, "silu"),
    (9, 3, 2, 144, 256, "clamped"),
    (5, 4, 1, 256, 130, "none"),
    (7, 2, 2, 256, 272, "none"),
]


@pytest.mark.parametrize("with_epilogue", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_scaled_and_gated(shape: Shape, with_epilogue: bool) -> None:
    problem = Problem(shape, with_epilogue)
    assert_near(problem.run()[0], problem.expected(), problem.order)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("gate", ["silu", "none"])
def test_every_config(block_m: int, gate: str) -> None:
    problem = Problem((170, 2, 1, 128, 512, gate), with_epilogue=False)
    actual = problem.run(config=make_config(gate == "silu", block_m))[0]
    assert_near(actual, problem.expected(), problem.order)


def test_quantized_output_equals_a_second_kernel() -> None:
    problem = Problem((11, 3, 2, 256, 768, "silu"), with_epilogue=True)
    problem.args.x[3, 7] = math.inf
    problem.args.x[4] = 0.0
    problem.args.x[5, 0] = math.nan
    codes, scales = problem.run(ACTIVATION_FORMAT)
    expected_codes, expected_scales = quantize_reference(problem.run()[0], ACTIVATION_FORMAT)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_a_layer_equals_its_two_gemms() -> None:
    problem = Problem((70, 2, 1, 128, 256, "clamped"), with_epilogue=True)
    down = quantize(torch.randn(2, 144, 128) / 12, WEIGHT_FORMAT).to(DEVICE)
    gate_up, formats = problem.weight.to(DEVICE), (ACTIVATION_FORMAT, ACTIVATION_FORMAT)
    args = to_device(with_quantized_weight(problem.args, problem.weight), DEVICE)
    args = replace(args, activations=ACTIVATION_FORMAT)
    actual = run_experts_fp8(
        args.x, args.row_indices, args.row_weights, args.offsets, gate_up, down, (args.bias, None),
        args.gate, formats,
    )  # fmt: skip
    inner = replace(args, x=grouped_gemm(args), row_indices=None, row_weights=None, bias=None)
    expected = grouped_gemm(replace(with_quantized_weight(inner, down), gate=UNGATED))
    assert torch.equal(actual, expected) and actual.any()
    # Rows that another rank has quantized, with scales in another layout.
    codes, scale = quantize_reference(args.x, ACTIVATION_FORMAT)
    rows = QuantTensor(ACTIVATION_FORMAT, codes, {"scale": scale.contiguous()}, args.x.dtype)
    actual = run_experts_fp8(
        rows, args.row_indices, args.row_weights, args.offsets, gate_up, down, (args.bias, None),
        args.gate, formats,
    )  # fmt: skip
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("format", "activations", "tokens", "columns"),
    [
        ("fp8_e4m3_row", ACTIVATION_FORMAT, 64, 256),
        (WEIGHT_FORMAT, "fp8_e4m3_row", 64, 256),
        (WEIGHT_FORMAT, ACTIVATION_FORMAT, 2, 256),
        (WEIGHT_FORMAT, ACTIVATION_FORMAT, 64, 192),
    ],
)
def test_other_formats_and_few_rows_have_no_config(
    format: str, activations: str, tokens: int, columns: int
) -> None:
    weight = quantize(torch.ones(2, columns, 128), format)
    assert select_fp8_config(tokens, weight.packed, weight.format, activations, SILU, True) is None
    weight = quantize(torch.ones(2, 256, 128), WEIGHT_FORMAT)
    config = select_fp8_config(64, weight.packed, weight.format, ACTIVATION_FORMAT, SILU, True)
    assert config is not None


def test_no_tokens() -> None:
    weight = quantize(torch.ones(2, 256, 128), WEIGHT_FORMAT).to(DEVICE)
    codes, scale = (t.to(DEVICE) for t in quantize_reference(torch.ones(1, 128), ACTIVATION_FORMAT))
    indices = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    offsets = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    inputs = Fp8Inputs(
        codes, scale, weight.packed, weight.scale, offsets, torch.bfloat16, indices, gate=SILU,
        out_format=ACTIVATION_FORMAT,
    )  # fmt: skip
    out, out_scale = grouped_gemm_fp8(inputs, make_config(is_gated=True))
    assert out.shape == (0, 128) and out_scale.shape == (0, 1)
