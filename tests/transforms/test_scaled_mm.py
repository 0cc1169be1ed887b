"""Scaled and grouped matmuls of user code: which operator runs them, and the same results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

import fulgurite
from fulgurite.quant import quantize
from fulgurite.quant.swizzle import swizzle_scales
from fulgurite.transforms.scaled_mm import route_scaled_mm

FP8 = torch.float8_e4m3fn
OURS = "fulgurite.scaled_mm.default"
needs_scaled_mm_on_cpus = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch captures F.scaled_mm on GPUs only",
)


def matrices(m: int, n: int, k: int, seed: int = 0):
    torch.manual_seed(seed)
    return torch.randn(m, k), torch.randn(n, k)


def is_close(actual, expected, k: int) -> bool:
    """Within a rounding to bfloat16, and float32 sums of k products in any order."""
    bound = (2.0**-8 + k**0.5 * 2.0**-22) * expected.float().norm()
    return bool((actual.float() - expected.float()).norm() <= bound)


def test_the_private_form_per_tensor():
    a, b = (x.to(FP8) for x in matrices(16, 32, 64))
    scales = torch.tensor(0.5), torch.tensor(0.25)

    def function(a, b, scale_a, scale_b):
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16).relu()

    compiled = fulgurite.compile(function)
    assert is_close(compiled(a, b, *scales), function(a, b, *scales), 64)
    assert OURS in str(compiled.last_trace())
    assert any(trace.stage == "route_scaled_mm" for trace in compiled.history)


@needs_scaled_mm_on_cpus
@pytest.mark.parametrize("m", [1, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rowwise(m, with_bias):
    a, b = (x.to(FP8) for x in matrices(m, 48, 64))
    scales, bias = (torch.rand(m, 1), torch.rand(1, 48)), torch.randn(48, dtype=torch.bfloat16)

    def function(a, b, scale_a, scale_b, bias):
        return F.scaled_mm(
            a, b.t(), scale_a, ScalingType.RowWise, scale_b, ScalingType.RowWise,
            bias=bias if with_bias else None, output_dtype=torch.bfloat16,
        )  # fmt: skip

    compiled = fulgurite.compile(function)
    assert is_close(compiled(a, b, *scales, bias), function(a, b, *scales, bias), 64)
    assert OURS in str(compiled.last_trace())


@needs_scaled_mm_on_cpus
@pytest.mark.parametrize("right", ["fp8_e4m3_128x128", "fp8_e4m3_1x128"])
def test_blocks_that_torch_has_no_cpu_kernel_for(right):
    x, weight = matrices(16, 256, 384)
    a, b = quantize(x, "fp8_e4m3_1x128"), quantize(weight, right)
    scale_a, scale_b = a.scales["scale"], b.scales["scale"]
    scale_a = scale_a.t().contiguous().t()
    if right.endswith("128x128"):
        scale_b, kind = F.pad(scale_b, (0, 1)).t(), ScalingType.BlockWise128x128
    else:
        scale_b, kind = scale_b.t().contiguous().t(), ScalingType.BlockWise1x128

    def function(a, b, scale_a, scale_b):
        return F.scaled_mm(a, b.t(), scale_a, ScalingType.BlockWise1x128, scale_b, kind)

    compiled = fulgurite.compile(function)
    actual = compiled(a.packed, b.packed, scale_a, scale_b)
    assert is_close(actual, a.dequantize() @ b.dequantize().t(), 384)


@needs_scaled_mm_on_cpus
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("shape", [(16, 32, 128), (130, 48, 192)], ids=str)
def test_swizzled_scales(format, shape):
    torch._dynamo.reset()
    a, b = (quantize(x, format) for x in matrices(*shape))
    kinds, swizzles = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    if format == "nvfp4":
        kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]

    def arguments(x):
        scales = list(x.scales.values())
        data = x.packed.view(torch.float4_e2m1fn_x2) if format == "nvfp4" else x.packed
        return data, [swizzle_scales(scales[0]), *(scale.reshape(1) for scale in scales[1:])]

    def function(a, b, scale_a, scale_b):
        return F.scaled_mm(a, b.t(), scale_a, kinds, scale_b, kinds, swizzles, swizzles)

    (left, left_scales), (right, right_scales) = arguments(a), arguments(b)
    compiled = fulgurite.compile(function, dynamic=False)
    actual = compiled(left, right, left_scales, right_scales)
    assert is_close(actual, a.dequantize() @ b.dequantize().t(), shape[2])


def test_other_calls_stay_with_torch():
    a, b = (x.to(FP8) for x in matrices(16, 32, 64))

    def function(a, b, scale):
        return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=FP8)

    compiled = fulgurite.compile(function)
    scale = torch.tensor(1.0)
    assert torch.equal(compiled(a, b, scale).float(), function(a, b, scale).float())
    assert OURS not in str(compiled.last_trace())
    assert route_scaled_mm.phase == "after_autograd"


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("m", [4, 64, 1024])
@pytest.mark.parametrize("format", ["fp8_e4m3_row", "fp8_e4m3_tensor"])
def test_float8_on_a_gpu(format, m):
    """Small and large M: our kernel or torch's, with a bias and an activation after it."""
    a, b = (quantize(x.cuda(), format) for x in matrices(m, 256, 512))
    scale_a, scale_b = a.scales["scale"], b.scales["scale"]
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16)

    def function(a, b, scale_a, scale_b, bias):
        y = torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), bias, out_dtype=torch.bfloat16)
        return F.silu(y)

    actual = fulgurite.compile(function)(a.packed, b.packed, scale_a, scale_b, bias)
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t() + bias.double()
    assert is_close(actual, F.silu(exact), 512)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="F.scaled_mm runs in eager mode there, which has no such kernel on Hopper",
)
@pytest.mark.parametrize("m", [16, 300])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
def test_block_scaled_formats_on_a_gpu(format, m):
    """Dequantized in our kernel where the GPU has no such MMA."""
    a, b = (quantize(x.cuda(), format) for x in matrices(m, 256, 512))
    kinds, swizzles = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    if format == "nvfp4":
        kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]

    def arguments(x):
        scales = list(x.scales.values())
        data = x.packed.view(torch.float4_e2m1fn_x2) if format == "nvfp4" else x.packed
        return data, [swizzle_scales(scales[0]), *(scale.reshape(1) for scale in scales[1:])]

    def function(a, b, scale_a, scale_b):
        return F.scaled_mm(a, b.t(), scale_a, kinds, scale_b, kinds, swizzles, swizzles).relu()

    (left, left_scales), (right, right_scales) = arguments(a), arguments(b)
    actual = fulgurite.compile(function, dynamic=False)(left, right, left_scales, right_scales)
    exact = (a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()).relu()
    assert is_close(actual, exact, 512)


@needs_scaled_mm_on_cpus
def test_what_reads_a_cpu_matmul_is_one_kernel():
    """Rounding, activation, residual and the amax for the next cast, of sums in float32."""
    a, b = (x.to(FP8) for x in matrices(16, 32, 64))
    scales, residual = (torch.rand(16, 1), torch.rand(1, 32)), torch.randn(16, 32).bfloat16()

    def function(a, b, scale_a, scale_b, residual):
        y = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)
        h = F.silu(y) + residual
        return h, h.float().abs().amax(-1)

    compiled = fulgurite.compile(function)
    actual, amax = compiled(a, b, *scales, residual)
    exact = (a.double() * scales[0]) @ (b.double() * scales[1].t()).t()
    exact = F.silu(exact) + residual.double()
    assert is_close(actual, exact, 64) and is_close(amax, exact.abs().amax(-1), 64)
    calls = str(compiled.last_trace()).split("def forward")[1]
    assert calls.count("# fuser") == 1


def blockwise(m: int, n: int, k: int):
    x, weight = matrices(m, n, k, seed=m)
    a, b = quantize(x, "fp8_e4m3_1x128"), quantize(weight, "fp8_e4m3_128x128")
    scale_b = F.pad(b.scales["scale"], (0, -b.scales["scale"].shape[1] % 4)).t()
    arguments = a.packed, b.packed, a.scales["scale"].t().contiguous().t(), scale_b
    return arguments, a.dequantize() @ b.dequantize().t()


def mx(m: int, n: int, k: int):
    a, b = (quantize(x, "mxfp8_e4m3") for x in matrices(m, n, k, seed=m))
    scales = (swizzle_scales(x.scales["scale"]) for x in (a, b))
    return (a.packed, b.packed, *scales), a.dequantize() @ b.dequantize().t()


def rowwise(m: int, n: int, k: int):
    a, b = (quantize(x, "fp8_e4m3_row") for x in matrices(m, n, k, seed=m))
    scale_a, scale_b = a.scales["scale"], b.scales["scale"].t()
    return (a.packed, b.packed, scale_a, scale_b), a.dequantize() @ b.dequantize().t()


SWIZZLED = (SwizzleType.SWIZZLE_32_4_4, SwizzleType.SWIZZLE_32_4_4)
FORMS = {
    "rowwise": (rowwise, ScalingType.RowWise, ScalingType.RowWise, ()),
    "blockwise": (blockwise, ScalingType.BlockWise1x128, ScalingType.BlockWise128x128, ()),
    "mx": (mx, ScalingType.BlockWise1x32, ScalingType.BlockWise1x32, SWIZZLED),
}


@needs_scaled_mm_on_cpus
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", FORMS)
def test_other_numbers_of_rows(form, dynamic):
    """The second batch size makes the rows a symbol; torch has no CPU kernel for two of the forms."""
    torch._dynamo.reset()
    make, kind_a, kind_b, swizzles = FORMS[form]

    def function(a, b, scale_a, scale_b):
        return F.scaled_mm(a, b.t(), scale_a, kind_a, scale_b, kind_b, *swizzles).relu()

    compiled = fulgurite.compile(function, dynamic=dynamic)
    for m in (16, 20, 37):
        arguments, expected = make(m, 256, 384)
        assert is_close(compiled(*arguments), expected.relu(), 384)
        assert OURS in str(compiled.last_trace())
    if dynamic is None:
        assert len(compiled.graphs) == 2


def test_matrices_that_do_not_fit_raise_the_error_of_eager(recwarn):
    a, b = torch.randn(9, 64).to(FP8), torch.randn(32, 48).to(FP8)

    def function(a, b, scale):
        return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)

    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(9x64 and 48x32\)"):
        fulgurite.compile(function)(a, b, torch.tensor(1.0))
    assert not any("route_scaled_mm" in str(warning.message) for warning in recwarn)
