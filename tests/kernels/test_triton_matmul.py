"""The Triton matmul kernel in the interpreter (on a GPU where there is one) against float64.

Each result may be off by what float32 sums of that many products allow, given the operands as they
are after quantizing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import NO_GATE
from fulgurite.kernels.gemm.reference import UNQUANTIZED, dequantize_packed
from fulgurite.kernels.grouped_gemm.reference import reference as grouped_gemm_reference
from fulgurite.quant import quantize, resolve_format
from tests.kernels.triton_support import DEVICE, INTERPRETED, on_device

from fulgurite.kernels.gemm import triton_launch, triton_quant_linear  # isort: skip
from fulgurite.kernels.tuning.config import LaunchConfig  # isort: skip
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics  # isort: skip
from fulgurite.kernels.gemm import triton_scaled_mm as scaled  # isort: skip
from fulgurite.kernels.quantize.triton_dequantize import dequantize_weight  # isort: skip

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


def grouped_reference(x, offsets, data, scales, format, bias):
    """Rows sorted by expert, no gate."""
    plain = (UNQUANTIZED, NO_GATE, 0.0, 0.0)
    return grouped_gemm_reference(
        x, None, None, None, offsets, data, scales, format, bias, *plain
    )


def near(ours: Tensor, exact: Tensor, terms: int, float8: bool = False, format: str = "") -> bool:
    """`float8`: a Hopper's tensor cores add products of float8 with 13 bits behind the point. Weights
    of some formats are rounded to 16 bits where rows are many."""
    half = 1 if INTERPRETED else 0.5  # it cuts bits off
    rounding = torch.finfo(ours.dtype).eps * half
    rounding += torch.finfo(torch.bfloat16).eps * half if format in ROUNDED else 0.0
    allowed = rounding + terms**0.5 * 2.0**-22 + (2.0**-11 if float8 and not INTERPRETED else 0.0)
    return bool((ours.cpu().double() - exact.cpu()).norm() <= allowed * exact.norm())


def exact_of(parts) -> Tensor:
    return parts.dequantize(torch.float32).double()


@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("m, n, k", [(1, 40, 256), (17, 33, 128)])
def test_weight_only(format, m, n, k):
    weight = quantize(torch.randn(n, k) * torch.randn(n, 1).exp(), format)
    x, bias = torch.randn(m, k).bfloat16(), torch.randn(n).bfloat16()
    exact = x.double() @ exact_of(weight).t() + bias.double()
    data, *scales = on_device(weight.packed, *weight.scales.values())
    ours = triton_quant_linear.quant_linear(x.to(DEVICE), data, scales, format, bias.to(DEVICE))
    assert ours.shape == (m, n) and ours.dtype == torch.bfloat16
    assert near(ours, exact, k, format=format)


@pytest.mark.parametrize("split", [2, 5])
@pytest.mark.parametrize("format", ["nvfp4", "int4_g128", "fp8_e4m3_row"])
def test_parts_of_k_add_up_again_and_again(format, split):
    entry = resolve_format(format)
    weight = quantize(torch.randn(66, 1024), format)
    x = torch.randn(4, 1024).bfloat16()
    exact = x.double() @ exact_of(weight).t()
    data, *scales = on_device(weight.packed, *weight.scales.values())
    tile = LaunchConfig(16, 64, 128, num_stages=4, split_k=split)
    kind = triton_launch.dequant_scheme(entry)
    results = [
        triton_launch.launch_gemm(
            x.to(DEVICE), None, None, data, scales, entry, kind, None, torch.float32, tile
        )
        for _ in range(3)
    ]
    assert near(results[0], exact, 1024)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("format", WEIGHTS)
def test_few_and_many_rows_by_either_kernel(format):
    entry = resolve_format(format)
    kind = triton_launch.dequant_scheme(entry)
    weight = quantize(torch.randn(20, 384) * torch.randn(20, 1).exp(), format)
    data, *scales = on_device(weight.packed, *weight.scales.values())
    depth = min(kind.group_size, 128) if kind.scaling == "mainloop" else 128
    for m in (1, 3, 18):
        x = torch.randn(m, 384).bfloat16()
        exact = x.double() @ exact_of(weight).t()
        for tile in (
            LaunchConfig(16, 16, depth, num_stages=2, small_m=True),
            LaunchConfig(16, 32, depth, num_stages=4),
        ):
            ours = triton_launch.launch_gemm(
                x.to(DEVICE), None, None, data, scales, entry, kind, None, torch.float32, tile
            )
            rounded = format if not tile.small_m else ""
            assert near(ours, exact, 384, format=rounded), (m, tile)


@pytest.mark.parametrize("left, right", PAIRS)
@pytest.mark.parametrize("m, n, k", [(1, 48, 256), (19, 40, 128)])
def test_both_operands_packed(left, right, m, n, k):
    a, b = (
        quantize(torch.randn(m, k) * torch.randn(m, 1).exp(), left),
        quantize(torch.randn(n, k), right),
    )
    bias = torch.randn(n)
    exact = exact_of(a) @ exact_of(b).t() + bias.double()
    a_data, *a_scales = on_device(a.packed, *a.scales.values())
    b_data, *b_scales = on_device(b.packed, *b.scales.values())
    ours = scaled.scaled_mm(
        a_data, a_scales, left, b_data, b_scales, right, bias.to(DEVICE), torch.float32
    )
    assert near(ours, exact, k, float8=left.startswith("fp8"))


@pytest.mark.parametrize("k", [129, 200])
def test_a_k_that_fills_no_step(k):
    a, b = quantize(torch.randn(5, k), "fp8_e4m3_row"), quantize(torch.randn(40, k), "fp8_e4m3_row")
    ours = scaled.scaled_mm(
        *(a.packed.to(DEVICE), [a.scale.to(DEVICE)], "fp8_e4m3_row"),
        *(b.packed.to(DEVICE), [b.scale.to(DEVICE)], "fp8_e4m3_row", None, torch.float32),
    )
    assert near(ours, exact_of(a) @ exact_of(b).t(), k, float8=True)


@pytest.mark.parametrize("ends", [[3, 3, 20, 37], [0, 0, 0, 0], [40, 40, 40, 40], [0, 40, 40, 40]])
@pytest.mark.parametrize(
    "format", ["nvfp4", "int4_g64_asym", "int4_g32_min", "fp8_e4m3_128x128", "int8"]
)
def test_experts(format, ends):
    weight = quantize(torch.randn(4, 20, 128), format)
    x, bias = torch.randn(40, 128).bfloat16(), torch.randn(4, 20).bfloat16()
    offsets = torch.tensor(ends, dtype=torch.int32)
    parts = (weight.packed, list(weight.scales.values()))
    exact = grouped_reference(x.double().float(), offsets, *parts, format, bias).double()
    data, *scales = on_device(weight.packed, *weight.scales.values())
    ours = triton_quant_linear.grouped_quant_linear(
        x.to(DEVICE), offsets.to(DEVICE), data, scales, format, bias.to(DEVICE)
    )
    assert near(ours, exact, 128)
    assert not ours[ends[-1] :].any()


def test_experts_packed_rows():
    weight = quantize(torch.randn(3, 48, 256), "fp8_e4m3_128x128")
    a = quantize(torch.randn(21, 256), "fp8_e4m3_1x128")
    offsets = torch.tensor([7, 8, 20], dtype=torch.int32)
    parts = (weight.packed, list(weight.scales.values()))
    rows = dequantize_packed(a.packed, [a.scale], a.format)
    exact = grouped_reference(rows, offsets, *parts, "fp8_e4m3_128x128", None).double()
    ours = scaled.grouped_scaled_mm(
        *(a.packed.to(DEVICE), [a.scale.to(DEVICE)], "fp8_e4m3_1x128", offsets.to(DEVICE)),
        *(weight.packed.to(DEVICE), [weight.scale.to(DEVICE)], "fp8_e4m3_128x128"),
        *(None, torch.float32),
    )
    assert near(ours, exact, 256, float8=True)


@pytest.mark.parametrize("format", WEIGHTS)
def test_a_weight_decoded_first(format):
    entry = resolve_format(format)
    weight = quantize(torch.randn(33, 384) * torch.randn(33, 1).exp(), format)
    data, *scales = on_device(weight.packed, *weight.scales.values())
    kind = triton_launch.dequant_scheme(entry)
    ours = dequantize_weight(
        torch.float32, kind, triton_launch.make_operand(data, scales, entry, kind), entry
    )
    assert torch.equal(ours.cpu(), weight.dequantize(torch.float32))


def test_many_rows():
    weight = quantize(torch.randn(20, 256), "nvfp4")
    data, *scales = on_device(weight.packed, *weight.scales.values())
    x, bias = torch.randn(Sm90Heuristics.gemm_dequantize_first_m, 256).bfloat16(), torch.randn(20)
    ours = triton_quant_linear.quant_linear(x.to(DEVICE), data, scales, "nvfp4", bias.to(DEVICE))
    exact = x.double() @ exact_of(weight).t() + bias.double()
    assert (ours.cpu().double() - exact).norm() <= 2.0**-7 * exact.norm()


SLICED = ["int4_g32_min", "nvfp4", "fp8_e4m3_128x128", "int8_g16"]


@pytest.mark.parametrize("format", SLICED)
def test_a_part_of_a_weight(format):
    """Columns and rows of a larger one, as they lie: by all three kernels."""
    whole = quantize(torch.randn(256, 768), format)
    weight, exact = whole.to(DEVICE)[128:, 256:512], exact_of(whole)[128:, 256:512]
    for m in (3, 40, Sm90Heuristics.gemm_dequantize_first_m):
        x = torch.randn(m, 256).bfloat16()
        ours = triton_quant_linear.quant_linear(
            x.to(DEVICE), weight.packed, list(weight.scales.values()), format
        )
        wanted = x.double() @ exact.t()
        assert (ours.cpu().double() - wanted).norm() <= 2.0**-6 * wanted.norm(), m


def test_a_nan_weight_and_a_nan_scale():
    weight = torch.randn(20, 128)
    weight[3, 40] = torch.nan
    read_wrong = () if not INTERPRETED else ("nvfp4", "fp8_e4m3_row")  # NaN of float8 as a number
    for format in {"nvfp4", "mxfp4", "fp8_e4m3_row", "int4_g128"}.difference(read_wrong):
        packed = quantize(weight, format)
        data, *scales = on_device(packed.packed, *packed.scales.values())
        x = torch.randn(2, 128).bfloat16().to(DEVICE)
        bad = triton_quant_linear.quant_linear(x, data, scales, format).isnan().cpu()
        assert bad[:, 3].all() and bad.sum() == 2, format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "format",
    ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "int4_g32", "int4_g32_asym", "int4_g64_asym"],
)
def test_weights_in_blocks(format, dtype):
    """GGUF's blocks as they lie in a file, and groups of 32 integers."""
    for m, n, k in ((1, 40, 256), (19, 33, 512)):
        weight = quantize(torch.randn(n, k) * torch.randn(n, 1).exp(), format)
        x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
        exact = x.double() @ exact_of(weight).t() + bias.double()
        data, *scales = on_device(weight.packed, *weight.scales.values())
        ours = triton_quant_linear.quant_linear(x.to(DEVICE), data, scales, format, bias.to(DEVICE))
        assert ours.shape == (m, n) and ours.dtype == dtype
        assert near(ours, exact, k, format=format)


def test_what_only_the_reference_takes():
    packed = quantize(torch.randn(2, 16, 256), "q4_k")
    x = torch.randn(2, 256)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    grouped = triton_quant_linear.grouped_quant_linear(
        x.bfloat16(), ends, packed.packed, [], "q4_k"
    )
    assert grouped is NotImplemented
    other = quantize(torch.randn(16, 256), "nvfp4")
    parts = (other.packed, list(other.scales.values()), "nvfp4")
    assert triton_quant_linear.quant_linear(x, *parts) is NotImplemented
