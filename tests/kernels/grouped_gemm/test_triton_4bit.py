"""Grouped GEMM with 4-bit weights and more than a few rows of each expert, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fulgurite.kernels.elementwise.gated_activation import UNGATED
from fulgurite.kernels.grouped_gemm import triton_4bit, triton_grouped_gemm
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.tuning import LaunchConfig, override_heuristics
from fulgurite.quant import quantize
from tests.kernels.grouped_gemm.cases import (
    FixedConfig,
    Problem,
    Shape,
    assert_near,
    make_problem,
    to_device,
    with_quantized_weight,
)
from tests.kernels.triton_support import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = [
    (1, 1, 1, 128, 16, "silu"),
    (37, 3, 2, 256, 48, "silu"),
    (20, 1, 1, 128, 200, "none"),
    (50, 5, 2, 384, 272, "clamped"),
]
FORMATS = ["nvfp4", "mxfp4", "int4_g128", "int4_g64", "int4_g128_asym", "int4_g32", "int4_g32_asym",
           "int4_g32_min"]  # fmt: skip


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `try_grouped_gemm_4bit` returned, call after call; the small-M kernel is off."""
    results: list[bool] = []
    function = triton_4bit.try_grouped_gemm_4bit

    def record(*args) -> bool:
        results.append(function(*args))
        return results[-1]

    monkeypatch.setattr(triton_grouped_gemm, "try_small_m_grouped_gemm", lambda *_: False)
    monkeypatch.setattr(triton_grouped_gemm, "try_grouped_gemm_4bit", record)
    return results


def check(shape: Shape, format: str, with_epilogue: bool, is_gathered: bool = True) -> None:
    problem = make_problem(shape, torch.bfloat16, with_epilogue, is_gathered)
    weight = quantize(problem.args.data.float(), format)
    args = to_device(with_quantized_weight(problem.args, weight), DEVICE)
    actual = triton_grouped_gemm.grouped_gemm(args).cpu()
    dequantized = replace(problem.args, data=weight.dequantize(torch.float32))
    assert_near(actual, Problem(dequantized, problem.order).expected(), problem.order)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_gathered_and_gated(shape: Shape, format: str, results: list[bool]) -> None:
    check(shape, format, with_epilogue=shape[0] % 2 == 1)
    assert results == [True]


@pytest.mark.parametrize("block_m, block_k", [(16, 256), (32, 128), (64, 128), (128, 128)])
def test_other_configs(block_m: int, block_k: int, results: list[bool]) -> None:
    is_large = (
        block_m > 64
    )  # as in `grouped_gemm_4bit`: Triton 3.6 miscompiles 128 rows with 4 warps
    config = LaunchConfig(block_m, 128 if is_large else 64, block_k, 8 if is_large else 4, 3)
    with override_heuristics(FixedConfig(config)):
        check((70, 2, 1, 256, 80, "silu"), "nvfp4", with_epilogue=True)
        check((70, 2, 1, 256, 72, "none"), "mxfp4", with_epilogue=False, is_gathered=False)
    assert results == [True, True]


@pytest.mark.parametrize("power", [-100, 0, 100])
def test_scales_of_all_magnitudes(power: int, results: list[bool]) -> None:
    """Some e8m0 scales are no bfloat16 when they are biased: values up to 2^100, and down to
    2^-100."""
    weight = quantize(torch.randn(2, 64, 128) * 2.0**power, "mxfp4")
    x, offsets = torch.randn(40, 128).bfloat16(), torch.tensor([25, 40], dtype=torch.int32)
    args = GroupedGemmArgs(x, None, None, offsets, x, [], "", None, "none", UNGATED)
    args = to_device(with_quantized_weight(args, weight), DEVICE)
    actual = triton_grouped_gemm.grouped_gemm(args).cpu()
    exact = weight.dequantize(torch.float32).double()
    expected = torch.cat((x[:25].double() @ exact[0].mT, x[25:].double() @ exact[1].mT))
    assert (actual.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert results == [True]


def test_sizes_that_tensor_descriptors_do_not_support(results: list[bool]) -> None:
    """K that steps don't divide, and rows of the weight that are no multiple of eight."""
    check((20, 2, 1, 96, 32, "silu"), "mxfp4", with_epilogue=False)
    check((20, 2, 1, 128, 20, "none"), "nvfp4", with_epilogue=False)
    assert results == [False, False]
