"""Grouped matmuls of user code: which operator runs them, and the same results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

import fulgurite
from fulgurite.kernels.grouped_gemm.scaled import scaled_grouped_mm_op, scaled_grouped_mm_reference
from fulgurite.quant import quantize
from fulgurite.quant.swizzle import swizzle_grouped_scales, swizzle_scales
from tests.transforms.test_scaled_mm import is_close

FP8 = torch.float8_e4m3fn
OURS = "fulgurite.scaled_grouped_mm.default"


def grouped(rows: int, experts: int, seed: int = 0):
    torch.manual_seed(seed)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    weight = torch.randn(experts, 32, 64, dtype=torch.bfloat16)
    ends = torch.randint(0, rows + 1, (experts,)).sort().values
    ends[-1] = rows
    return x, weight, ends.int()


@pytest.mark.parametrize("rows, is_ours", [(24, True), (600, False)])
def test_few_rows_of_an_expert_go_to_our_kernel(rows, is_ours):
    x, weight, offsets = grouped(rows, 8)

    def function(x, weight, offsets):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    compiled = fulgurite.compile(function)
    assert is_close(compiled(x, weight, offsets), function(x, weight, offsets), 64)
    assert ("fulgurite.grouped_gemm.default" in str(compiled.last_trace())) == is_ours


def test_scaled_grouped_mm_on_the_cpu():
    x, weight, offsets = grouped(40, 4)
    a, b = x.to(FP8), weight.to(FP8)
    scale_a, scale_b = torch.rand(40), torch.rand(4, 32)

    def function(a, b, scale_a, scale_b, offsets):
        return torch._scaled_grouped_mm(a, b.transpose(1, 2), scale_a, scale_b, offsets)

    actual = fulgurite.compile(function)(a, b, scale_a, scale_b, offsets)
    dense = (a.float() * scale_a[:, None]), (b.float() * scale_b[:, :, None])
    expected = torch.zeros(40, 32)
    for expert, (start, end) in enumerate(
        zip([0, *offsets.tolist()], offsets.tolist(), strict=False)
    ):
        expected[start:end] = dense[0][start:end] @ dense[1][expert].t()
    assert is_close(actual, expected, 64)


@pytest.mark.parametrize("formats", [
    ("fp8_e4m3_row", "fp8_e4m3_row"), ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("nvfp4", "nvfp4"),
])  # fmt: skip
def test_scaled_grouped_mm_matches_its_reference(formats):
    x, weight, offsets = grouped(40, 4)
    x, weight = torch.cat([x] * 4, 1), torch.cat([weight] * 4, 2)
    offsets = torch.tensor([3, 3, 20, 30], dtype=torch.int32)  # rows without an expert at the end
    a, b = quantize(x, formats[0]), quantize(weight, formats[1])
    arguments = (
        a.packed, list(a.scales.values()), formats[0], offsets,
        b.packed, list(b.scales.values()), formats[1], torch.float32,
    )  # fmt: skip
    actual, expected = scaled_grouped_mm_op(*arguments), scaled_grouped_mm_reference(*arguments)
    assert is_close(actual, expected, 256) and not actual[30:].any()


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """x [S, K] times weight [E, N, K] in float64, expert by expert."""
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        out[start:end] = x[start:end].double() @ weight[expert].double().t()
    return out


ENDS = [[24, 24, 24], [0, 0, 24], [5, 5, 24], [3, 9, 15], [0, 0, 0]]


@pytest.mark.parametrize(
    "dtype, columns", [(torch.float16, 24), (torch.float32, 24), (torch.float32, 20)]
)
def test_dtypes_that_torch_does_not_trace(dtype, columns):
    """torch's FakeTensor rule takes bfloat16 only; its op and ours take these."""
    torch.manual_seed(1)
    x = torch.randn(24, 40, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, columns, 40, dtype=dtype, requires_grad=True)
    offsets = torch.tensor([5, 5, 24], dtype=torch.int32)

    def function(x, weight):
        return F.silu(F.grouped_mm(x, weight.transpose(1, 2), offs=offsets))

    actual = fulgurite.compile(function, fullgraph=True)(x, weight)
    torch.testing.assert_close(actual, function(x, weight))
    grad = torch.randn_like(actual)
    torch.testing.assert_close(
        torch.autograd.grad(actual, [x, weight], grad),
        torch.autograd.grad(function(x, weight), [x, weight], grad),
    )


@pytest.mark.parametrize(
    "shapes", [((4, 6, 64), (4, 64, 20)), ((32, 24), (24, 20)), ((3, 8, 64), (64, 24))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_forms_have_the_strides_of_eager(shapes, dtype):
    torch.manual_seed(2)
    a, b = (torch.randn(shape, dtype=dtype) for shape in shapes)
    if b.stride(-2) * b.element_size() % 16:
        b = b.transpose(-1, -2).contiguous().transpose(-1, -2)
    is_batched = a.dim() == b.dim() == 3
    offsets = None if is_batched else torch.tensor([4, 4, 24], dtype=torch.int32)

    def function(a, b):
        return F.grouped_mm(a, b, offs=offsets)

    actual, expected = fulgurite.compile(function, fullgraph=True)(a, b), function(a, b)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected)


@pytest.mark.covering
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [32, 20])
def test_the_public_scaled_form_per_row(ends, dtype, columns):
    torch.manual_seed(3)
    a, b = torch.randn(24, 64).to(FP8), torch.randn(3, columns, 64).to(FP8)
    scale_a, scale_b = torch.rand(24) + 0.1, torch.rand(3, columns) + 0.1
    offsets, rows = torch.tensor(ends, dtype=torch.int32), ends[-1]

    def function(a, b, scale_a, scale_b, offsets):
        y = F.scaled_grouped_mm(
            a, b.transpose(1, 2), scale_a, ScalingType.RowWise, scale_b, ScalingType.RowWise,
            offs=offsets, output_dtype=dtype,
        )  # fmt: skip
        return F.silu(y)[:rows]

    compiled = fulgurite.compile(function, fullgraph=True)
    actual = compiled(a, b, scale_a, scale_b, offsets)
    dense = a.double() * scale_a[:, None], b.double() * scale_b[:, :, None]
    assert OURS in str(compiled.last_trace()) and actual.dtype == dtype
    assert is_close(actual, F.silu(grouped_product(*dense, ends))[:rows], 64)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_swizzled_scales_of_groups(format, ends):
    """Each group's scales are padded to whole 128x4 blocks, each expert's are one row of bytes."""
    torch.manual_seed(4)
    x, weight = torch.randn(24, 96), torch.randn(3, 32, 96)
    offsets, rows = torch.tensor(ends, dtype=torch.int32), ends[-1]
    a, b = quantize(x, format), quantize(weight, format)
    left = [swizzle_grouped_scales(a.scales["scale"], offsets).reshape(-1, 4)]
    right = [swizzle_scales(b.scales["scale"]).flatten(1)]
    kinds, swizzles = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    if format == "nvfp4":
        kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        left.append(list(a.scales.values())[1].reshape(-1).expand(3))
        right.append(list(b.scales.values())[1].reshape(-1))
    data = [t.packed if "fp8" in format else t.packed.view(torch.float4_e2m1fn_x2) for t in (a, b)]

    def function(a, b, scale_a, scale_b, offsets):
        return F.scaled_grouped_mm(
            a, b.transpose(1, 2), scale_a, kinds, scale_b, kinds, swizzles, swizzles, offs=offsets
        ).relu()[:rows]  # fmt: skip

    compiled = fulgurite.compile(function, fullgraph=True)
    actual = compiled(*data, left, right, offsets)
    exact = grouped_product(a.dequantize(torch.float64), b.dequantize(torch.float64), ends)
    assert OURS in str(compiled.last_trace())
    assert is_close(actual, exact.relu()[:rows], 96)


# ---- on a GPU


def on_gpu(*tensors):
    return tuple(t.cuda() for t in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 4000])
def test_grouped_mm_on_a_gpu(rows):
    x, weight, offsets = on_gpu(*grouped(rows, 8))

    def function(x, weight, offsets):
        return F.silu(F.grouped_mm(x, weight.transpose(1, 2), offs=offsets))

    compiled = fulgurite.compile(function)
    assert is_close(compiled(x, weight, offsets), function(x, weight, offsets), 64)
    is_ours = "fulgurite.grouped_gemm.default" in str(compiled.last_trace())
    assert is_ours == (rows == 24)
