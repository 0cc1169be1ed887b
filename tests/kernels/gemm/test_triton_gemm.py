"""GEMM with quantized operands in the interpreter (on a GPU where there is one) against float64.

Each result may be off by what float32 sums of that many products allow, given the operands as they
are after quantizing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.common.triton_operands import dequantize_first_scheme, make_operand
from fulgurite.kernels.elementwise.gated_activation import UNGATED
from fulgurite.kernels.gemm.triton_launch import GemmInputs, launch_gemm
from fulgurite.kernels.gemm.triton_quant_linear import grouped_quant_linear, quant_linear
from fulgurite.kernels.gemm.triton_scaled_mm import grouped_scaled_mm, scaled_mm
from fulgurite.kernels.grouped_gemm import reference
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.quantize.triton_dequantize import dequantize_weight
from fulgurite.kernels.tuning import LaunchConfig, heuristics_for
from fulgurite.quant import QuantTensor, quantize
from tests.kernels.gemm.cases import exact, operand_of, tensors_of
from tests.kernels.triton_support import DEVICE, INTERPRETED

WEIGHTS = [
    *("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e5m2_row"),
    *("int8", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4"),
    *("int4_g64", "int4_g128", "int4_g64_asym", "int4_g128_asym"),
    *("int4_g32", "int4_g32_asym", "int4_g32_min", "int8_g16", "int8_g32"),
]
ROUNDED = ("int4_g32", "int4_g32_asym", "int4_g32_min", "int8_g16", "int8_g32")
PAIRS = [
    ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    ("fp8_e5m2_tensor", "fp8_e4m3_tensor"),
    ("fp8_e4m3_row", "fp8_e4m3_row"),
    ("fp8_e4m3_row", "fp8_e4m3_tensor"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    ("int8", "int8"),
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("mxfp8_e4m3", "mxfp4"),
]
DEQUANTIZE_FIRST = heuristics_for(torch.device(DEVICE)).dequantize_first_m


def is_near(
    actual: Tensor, expected: Tensor, terms: int, is_fp8: bool = False, format: str = ""
) -> bool:
    """`is_fp8`: a Hopper's tensor cores add float8 products with 13 fraction bits. Weights of some
    formats are rounded to 16 bits if there are many rows."""
    half = 1 if INTERPRETED else 0.5  # the interpreter truncates
    rounding = torch.finfo(actual.dtype).eps * half
    rounding += torch.finfo(torch.bfloat16).eps * half if format in ROUNDED else 0.0
    allowed = rounding + terms**0.5 * 2.0**-22 + (2.0**-11 if is_fp8 and not INTERPRETED else 0.0)
    return bool((actual.cpu().double() - expected.cpu()).norm() <= allowed * expected.norm())


@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("m, n, k", [(1, 40, 256), (17, 33, 128)])
def test_weight_only(format, m, n, k):
    weight = quantize(torch.randn(n, k) * torch.randn(n, 1).exp(), format)
    x, bias = torch.randn(m, k).bfloat16(), torch.randn(n).bfloat16()
    expected = x.double() @ exact(weight).t() + bias.double()
    actual = quant_linear(x.to(DEVICE), *tensors_of(weight), format, bias.to(DEVICE))
    assert actual.shape == (m, n) and actual.dtype == torch.bfloat16
    assert is_near(actual, expected, k, format=format)


def run_gemm(x: Tensor, weight: QuantTensor, config: LaunchConfig) -> Tensor:
    operand, scheme = operand_of(weight)
    return launch_gemm(GemmInputs(x.to(DEVICE), operand, scheme, torch.float32), config)


@pytest.mark.parametrize("split_k", [2, 5])
@pytest.mark.parametrize("format", ["nvfp4", "int4_g128", "fp8_e4m3_row"])
def test_split_k_is_deterministic(format, split_k):
    weight, x = quantize(torch.randn(66, 1024), format), torch.randn(4, 1024).bfloat16()
    config = LaunchConfig(16, 64, 128, num_stages=4, split_k=split_k, group_n=8)
    first, second, third = (run_gemm(x, weight, config) for _ in range(3))
    assert is_near(first, x.double() @ exact(weight).t(), 1024)
    assert torch.equal(first, second) and torch.equal(first, third)


@pytest.mark.parametrize("format", WEIGHTS)
def test_any_number_of_rows_by_either_kernel(format):
    weight = quantize(torch.randn(20, 384) * torch.randn(20, 1).exp(), format)
    _, scheme = operand_of(weight)
    block_k = min(scheme.group_size, 128) if scheme.scaling == "mainloop" else 128
    small_m = LaunchConfig(16, 16, block_k, num_warps=4, num_stages=2, small_m=True)
    tiled = LaunchConfig(16, 32, block_k, num_warps=4, num_stages=4, group_n=8)
    for m in (1, 3, 18):
        x = torch.randn(m, 384).bfloat16()
        expected = x.double() @ exact(weight).t()
        for config in (small_m, tiled):
            actual = run_gemm(x, weight, config)
            rounded = "" if config.small_m else format
            assert is_near(actual, expected, 384, format=rounded), (m, config)


@pytest.mark.parametrize("left, right", PAIRS)
@pytest.mark.parametrize("m, n, k", [(1, 48, 256), (19, 40, 128)])
def test_both_operands_quantized(left, right, m, n, k):
    a = quantize(torch.randn(m, k) * torch.randn(m, 1).exp(), left)
    b, bias = quantize(torch.randn(n, k), right), torch.randn(n)
    expected = exact(a) @ exact(b).t() + bias.double()
    actual = scaled_mm(*tensors_of(a), left, *tensors_of(b), right, bias.to(DEVICE), torch.float32)
    assert is_near(actual, expected, k, is_fp8=left.startswith("fp8"))


@pytest.mark.parametrize("k", [129, 200])
def test_a_k_that_blocks_do_not_divide(k):
    a, b = quantize(torch.randn(5, k), "fp8_e4m3_row"), quantize(torch.randn(40, k), "fp8_e4m3_row")
    actual = scaled_mm(
        *tensors_of(a), "fp8_e4m3_row", *tensors_of(b), "fp8_e4m3_row", None, torch.float32
    )
    assert is_near(actual, exact(a) @ exact(b).t(), k, is_fp8=True)


def grouped_reference(
    rows: Tensor, offsets: Tensor, weight: QuantTensor, bias: Tensor | None
) -> Tensor:
    args = GroupedGemmArgs(
        rows.double(), None, None, offsets, exact(weight), [], "dense", bias, "none", UNGATED
    )
    return reference.grouped_gemm(args)


@pytest.mark.parametrize("ends", [[3, 3, 20, 37], [0, 0, 0, 0], [40, 40, 40, 40], [0, 40, 40, 40]])
@pytest.mark.parametrize(
    "format", ["nvfp4", "int4_g64_asym", "int4_g32_min", "fp8_e4m3_128x128", "int8"]
)
def test_experts(format, ends):
    weight = quantize(torch.randn(4, 20, 128), format)
    x, bias = torch.randn(40, 128).bfloat16(), torch.randn(4, 20).bfloat16()
    offsets = torch.tensor(ends, dtype=torch.int32)
    actual = grouped_quant_linear(
        x.to(DEVICE), offsets.to(DEVICE), *tensors_of(weight), format, bias.to(DEVICE)
    )
    assert is_near(actual, grouped_reference(x, offsets, weight, bias), 128)
    assert not actual[ends[-1] :].any()


def test_experts_with_quantized_rows():
    weight = quantize(torch.randn(3, 48, 256), "fp8_e4m3_128x128")
    a = quantize(torch.randn(21, 256), "fp8_e4m3_1x128")
    offsets = torch.tensor([7, 8, 20], dtype=torch.int32)
    actual = grouped_scaled_mm(
        *tensors_of(a), "fp8_e4m3_1x128", offsets.to(DEVICE), *tensors_of(weight),
        "fp8_e4m3_128x128", None, torch.float32,
    )  # fmt: skip
    expected = grouped_reference(exact(a), offsets, weight, None)
    assert is_near(actual, expected, 256, is_fp8=True)


@pytest.mark.parametrize("format", WEIGHTS)
def test_dequantized_weights(format):
    weight = quantize(torch.randn(33, 384) * torch.randn(33, 1).exp(), format)
    operand, scheme = operand_of(weight)
    actual = dequantize_weight(torch.float32, scheme, operand)
    assert torch.equal(actual.cpu(), weight.dequantize(torch.float32))


@pytest.mark.parametrize("m", [1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["nf4", "fp4", "int8_asym", "int8_g16_asym", "int8_g32_asym"])
def test_formats_that_are_dequantized_first(format, dtype, m):
    weight = quantize(torch.randn(33, 192) * torch.randn(33, 1).exp(), format)
    scheme = dequantize_first_scheme(weight.format)
    assert scheme is not None
    operand = make_operand(*tensors_of(weight), weight.format, scheme)
    actual = dequantize_weight(dtype, scheme, operand).cpu()
    assert torch.equal(actual, weight.dequantize(torch.float32).to(dtype)) or INTERPRETED
    assert torch.allclose(actual.float(), weight.dequantize(torch.float32), rtol=2.0**-7, atol=0)
    x, bias = torch.randn(m, 192).to(dtype), torch.randn(33)
    product = quant_linear(x.to(DEVICE), *tensors_of(weight), format, bias.to(DEVICE))
    expected = x.double() @ exact(weight).t() + bias.double()
    assert (product.cpu().double() - expected).norm() <= 2.0**-7 * expected.norm()


def test_many_rows_dequantize_the_weight_first():
    weight = quantize(torch.randn(20, 256), "nvfp4")
    x, bias = torch.randn(DEQUANTIZE_FIRST, 256).bfloat16(), torch.randn(20)
    actual = quant_linear(x.to(DEVICE), *tensors_of(weight), "nvfp4", bias.to(DEVICE))
    expected = x.double() @ exact(weight).t() + bias.double()
    assert (actual.cpu().double() - expected).norm() <= 2.0**-7 * expected.norm()


@pytest.mark.parametrize("format", ["int4_g32_min", "nvfp4", "fp8_e4m3_128x128", "int8_g16"])
def test_a_slice_of_a_weight(format):
    """Columns and rows of a larger weight, in place: by all three kernels."""
    whole = quantize(torch.randn(256, 768), format)
    weight, values = whole.to(DEVICE)[128:, 256:512], exact(whole)[128:, 256:512]
    for m in (3, 40, DEQUANTIZE_FIRST):
        x = torch.randn(m, 256).bfloat16()
        actual = quant_linear(x.to(DEVICE), weight.packed, list(weight.scales.values()), format)
        expected = x.double() @ values.t()
        assert (actual.cpu().double() - expected).norm() <= 2.0**-6 * expected.norm(), m


def test_a_nan_weight_and_a_nan_scale():
    weight = torch.randn(20, 128)
    weight[3, 40] = torch.nan
    misread = () if not INTERPRETED else ("nvfp4", "fp8_e4m3_row")  # NaN of float8 as a number
    for format in {"nvfp4", "mxfp4", "fp8_e4m3_row", "int4_g128"}.difference(misread):
        x = torch.randn(2, 128).bfloat16().to(DEVICE)
        bad = quant_linear(x, *tensors_of(quantize(weight, format)), format).isnan().cpu()
        assert bad[:, 3].all() and bad.sum() == 2, format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "format",
    ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "int4_g32", "int4_g32_asym", "int4_g64_asym"],
)
def test_gguf_blocks(format, dtype):
    """GGUF blocks in the layout of a file, and groups of 32 integers."""
    for m, n, k in ((1, 40, 256), (19, 33, 512)):
        weight = quantize(torch.randn(n, k) * torch.randn(n, 1).exp(), format)
        x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
        expected = x.double() @ exact(weight).t() + bias.double()
        actual = quant_linear(x.to(DEVICE), *tensors_of(weight), format, bias.to(DEVICE))
        assert actual.shape == (m, n) and actual.dtype == dtype
        assert is_near(actual, expected, k, format=format)


def test_unsupported_calls():
    experts = quantize(torch.randn(2, 16, 256), "q4_k")
    x, offsets = torch.randn(2, 256), torch.tensor([1, 2], dtype=torch.int32)
    grouped = grouped_quant_linear(x.bfloat16(), offsets, experts.packed, [], "q4_k")
    assert grouped is NotImplemented
    weight = quantize(torch.randn(16, 256), "nvfp4")
    tensors = (weight.packed, list(weight.scales.values()), "nvfp4")
    assert quant_linear(x, *tensors) is NotImplemented
