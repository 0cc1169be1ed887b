"""ModelOpt: NVFP4, MXFP4, INT4 AWQ and W4A8, and experts that are stored transposed."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import quantize, read_quantized_weight
from tests.quant.files.layouts.support import random_scales, read_checked, seeded


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Signed codes [.., N, K]: rows 2n and 2n + 1 in the low and the high nibble, [.., N / 2, K]."""
    return ((codes[..., 0::2, :] & 0xF) | ((codes[..., 1::2, :] & 0xF) << 4)).to(torch.uint8)


@pytest.mark.parametrize("group", [128, 64, 96])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_int4(batch, group):
    columns = 2 * group
    codes = torch.randint(-8, 8, (*batch, 24, columns), generator=seeded(), dtype=torch.int8)
    scale = random_scales(*batch, 24, 2, dtype=torch.bfloat16)
    tensors = {"up.weight": pack_rows(codes), "up.weight_scale": scale}
    expected = codes * scale.float().repeat_interleave(group, dim=-1)
    format = f"int4_g{next(g for g in (128, 64, 32) if group % g == 0)}"
    assert torch.equal(read_checked(tensors, "up", format=format), expected)
    # W4A8: a scale for the rounding to FP8, which does not change the weight
    tensors |= {"up.weight_scale_2": torch.tensor(0.01), "up.input_scale": torch.tensor(0.02)}
    assert torch.equal(read_checked(tensors, "up", format=format), expected)


def test_int4_with_input_factor():
    codes = torch.randint(-8, 8, (24, 128), generator=seeded(), dtype=torch.int8)
    scale, factor = random_scales(24, 2), random_scales(128, seed=4)
    tensors = {
        "up.weight": pack_rows(codes),
        "up.weight_scale": scale,
        "up.pre_quant_scale": factor,
    }
    expected = codes * scale.repeat_interleave(64, dim=1) * factor
    assert torch.equal(read_checked(tensors, "up", format=None), expected)
    with pytest.raises(FormatError, match="pre_quant_scale has 64 values for K = 128"):
        read_quantized_weight(tensors | {"up.pre_quant_scale": factor[:64]}, "up")


def test_nvfp4_with_input_factor():
    weight = quantize(torch.randn(24, 64, generator=seeded()), "nvfp4")
    factor = random_scales(64)
    tensors = {
        "up.weight": weight.packed,
        "up.weight_scale": weight.scales["scale"],
        "up.weight_scale_2": weight.scales["tensor_scale"].reshape(()),
        "up.pre_quant_scale": factor,
    }
    assert torch.equal(read_checked(tensors, "up", format=None), weight.dequantize() * factor)


def test_nvfp4_with_scales_of_32_columns():
    """W4A8_NVFP4_FP8: each scale becomes two."""
    weight = quantize(torch.randn(24, 64, generator=seeded()), "nvfp4")
    scale = weight.scales["scale"][:, ::2]
    tensors = {
        "up.weight": weight.packed,
        "up.weight_scale": scale.contiguous(),
        "up.weight_scale_2": weight.scales["tensor_scale"].reshape(()),
    }
    expected = weight.dequantize().unflatten(1, (2, 2, 16))
    ratio = scale.float()[:, :, None, None] / weight.scales["scale"].float().view(24, 2, 2, 1)
    actual = read_checked(tensors, "up", format="nvfp4").unflatten(1, (2, 2, 16))
    torch.testing.assert_close(actual, expected * ratio, rtol=1e-6, atol=0)


def test_mxfp4():
    weight = quantize(torch.randn(24, 96, generator=seeded()), "mxfp4")
    tensors = {
        "up.weight": weight.packed,
        "up.weight_scale": weight.scales["scale"].view(torch.uint8),
    }
    assert torch.equal(read_checked(tensors, "up", format="mxfp4"), weight.dequantize())


@pytest.mark.parametrize("per_expert", [False, True])
def test_transposed_nvfp4_experts(per_expert):
    """Llama-4 and gpt-oss: [E, K / 2, N] and [E, K / 16, N]."""
    weight = quantize(torch.randn(3, 24, 64, generator=seeded()), "nvfp4")
    tensor_scale = torch.tensor([0.5, 0.25, 0.125]) if per_expert else torch.tensor(0.5)
    scale = weight.scales["scale"].view(torch.uint8).transpose(1, 2).contiguous()
    tensors = {
        "experts.gate_up_proj": weight.packed.transpose(1, 2).contiguous(),
        "experts.gate_up_proj_weight_scale": scale.view(torch.float8_e4m3fn),
        "experts.gate_up_proj_weight_scale_2": tensor_scale,
        "experts.gate_up_proj_input_scale": torch.tensor(0.1),
    }
    original = weight.scales["tensor_scale"]
    expected = weight.dequantize() / original * tensor_scale.reshape(-1, 1, 1)
    actual = read_checked(tensors, "experts.gate_up_proj", format="nvfp4")
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(), (3,), (3, 24), (3, 1, 24), (3, 24, 1)])
@pytest.mark.parametrize("suffix", ["weight_scale", "scale"])
def test_transposed_fp8_experts(shape, suffix):
    """ModelOpt and fbgemm: [E, K, N], with a scale per tensor, expert or output."""
    weight = torch.randn(3, 40, 24, generator=seeded()).to(torch.float8_e4m3fn)
    scale = random_scales(*shape)
    tensors = {"experts.down_proj": weight, f"experts.down_proj_{suffix}": scale}
    per_row = scale.numel() == 72
    factor = scale.reshape(3, 24, 1) if per_row else scale.reshape(-1, 1, 1)
    format = "fp8_e4m3_row" if per_row else "fp8_e4m3_tensor"
    actual = read_checked(tensors, "experts.down_proj", format=format)
    assert torch.equal(actual, weight.float().transpose(1, 2) * factor)


def test_errors_name_the_tensor():
    weight = quantize(torch.randn(24, 64, generator=seeded()), "nvfp4")
    tensors = {
        "up.weight": weight.packed,
        "up.weight_scale": weight.scales["scale"],
        "up.weight_scale_2": torch.tensor([0.5, 0.5]),
    }
    with pytest.raises(FormatError, match="2 tensor scales for 1 matrices") as caught:
        read_quantized_weight(tensors, "up")
    assert "up.weight_scale_2" in str(caught.value)
    cut = {"up.weight_scale": weight.scales["scale"][:, :3], "up.weight_scale_2": torch.ones(())}
    with pytest.raises(FormatError, match="does not have one scale for 16 columns"):
        read_quantized_weight(tensors | cut, "up")
    codes = {
        "up.weight": torch.zeros(12, 64, dtype=torch.uint8),
        "up.weight_scale": torch.ones(12, 2),
    }
    with pytest.raises(FormatError, match="does not match INT4 codes packed along N"):
        read_quantized_weight(codes, "up")


def test_values_of_modelopt_int4():
    """The library's own packing."""
    utils = pytest.importorskip(
        "modelopt.torch.export.quant_utils", reason="compares with modelopt's own output"
    )
    weight, scale = torch.randn(24, 128, generator=seeded()), random_scales(24, 2) * 10
    packed = utils.pack_int4_in_uint8(weight, scale, 64)
    wide = scale.repeat_interleave(64, dim=1)
    expected = (weight / wide).round().clamp(-8, 7) * wide
    tensors = {"up.weight": packed, "up.weight_scale": scale}
    assert torch.equal(read_checked(tensors, "up", format="int4_g64"), expected)
