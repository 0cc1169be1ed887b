"""FP8 layouts: static and dynamic, per tensor, row and block; fbgemm and transformers."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import read_quantized_weight
from tests.quant.files.layouts.support import random_scales, read_checked, seeded


def random_fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(shape, generator=seeded()).mul(20).to(dtype)


def expand(scale, block, shape):
    wide = scale.repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return wide[..., : shape[-2], : shape[-1]]


@pytest.mark.parametrize("block", [(64, 64), (32, 128), (16, 48), (128, 256), (256, 384)])
def test_other_block_sizes(block):
    weight = random_fp8(300, 500)
    scale = random_scales(-(-300 // block[0]), -(-500 // block[1]))
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    tensors = {"up.weight": weight, "up.weight_scale_inv": scale}
    is_coarse = block[0] % 128 == 0 and block[1] % 128 == 0
    format = "fp8_e4m3_128x128" if is_coarse else None
    expected = weight.float() * expand(scale, block, weight.shape)
    assert torch.equal(read_checked(tensors, "up", config, format=format), expected)


def test_one_scale_inv_and_activation_scale():
    """transformers' static "fp8": one scale, and `activation_scale`."""
    weight = random_fp8(24, 100)
    tensors = {
        "up.weight": weight,
        "up.weight_scale_inv": torch.tensor(0.02),
        "up.activation_scale": torch.tensor(0.3),
    }
    actual = read_checked(tensors, "up", format="fp8_e4m3_tensor")
    assert torch.equal(actual, weight.float() * 0.02)
    loaded = read_quantized_weight(tensors, "up")
    assert loaded.input_scale is not None
    assert loaded.input_scale.item() == pytest.approx(0.3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fbgemm(dtype):
    weight, scale = random_fp8(24, 96, dtype=dtype), random_scales(24, 1)
    tensors = {
        "up.weight": weight,
        "up.weight_scale": scale,
        "up.input_scale_ub": torch.tensor([1200.0]),
    }
    format = "fp8_e4m3_row" if dtype == torch.float8_e4m3fn else "fp8_e5m2_row"
    assert torch.equal(read_checked(tensors, "up", format=format), weight.float() * scale)
    assert read_quantized_weight(tensors, "up").input_scale is None


def test_stacked_blocks():
    weight, scale = random_fp8(3, 200, 256), random_scales(3, 2, 2)
    tensors = {"experts.up_proj": weight, "experts.up_proj_scale_inv": scale}
    expected = weight.float() * expand(scale, (128, 128), weight.shape)
    actual = read_checked(tensors, "experts.up_proj", format="fp8_e4m3_128x128")
    assert torch.equal(actual, expected)


def test_modelopt_block_scales():
    """Scales with dimensions of size 1 in between."""
    weight, scale = random_fp8(256, 384), random_scales(2, 1, 3, 1)
    tensors = {"up.weight": weight, "up.weight_scale": scale}
    expected = weight.float() * expand(scale.reshape(2, 3), (128, 128), weight.shape)
    assert torch.equal(read_checked(tensors, "up", format="fp8_e4m3_128x128"), expected)


def test_power_of_two_scales_of_blocks():
    weight = random_fp8(256, 384)
    codes = torch.randint(120, 130, (2, 3), generator=seeded(), dtype=torch.uint8)
    tensors = {"up.weight": weight, "up.weight_scale_inv": codes.view(torch.float8_e8m0fnu)}
    expected = weight.float() * expand(torch.exp2(codes.float() - 127), (128, 128), weight.shape)
    assert torch.equal(read_checked(tensors, "up", format="fp8_e4m3_128x128"), expected)


def test_fnuz_is_dequantized():
    weight = torch.randn(24, 32, generator=seeded()).to(torch.float8_e4m3fnuz)
    tensors = {"up.weight": weight, "up.weight_scale": torch.tensor([[0.5]])}
    assert torch.equal(read_checked(tensors, "up", format=None), weight.float() * 0.5)


def test_errors_name_the_field():
    tensors = {"up.weight": random_fp8(200, 300), "up.weight_scale_inv": random_scales(3, 3)}
    with pytest.raises(FormatError, match="weight_scale_inv .* matches no FP8 format") as caught:
        read_quantized_weight(tensors, "up", config={"weight_block_size": [128, 128]})
    assert "weight_block_size in config.json" in str(caught.value)
    assert "up.weight_scale_inv" in str(caught.value)
