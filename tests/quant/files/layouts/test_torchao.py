"""torchao: flattened tensor subclasses; its own output where it is installed."""

import pytest
import torch
from torch import nn

from fulgurite.errors import FormatError
from fulgurite.quant import QuantTensor, quantize, read_quantized_weight
from fulgurite.quant.swizzle import swizzle_scales
from tests.quant.files.layouts.support import random_scales, read_checked, seeded


@pytest.mark.parametrize("shape", [(24, 1), (1, 1)])
def test_float8(shape):
    weight = torch.randn(24, 96, generator=seeded()).to(torch.float8_e4m3fn)
    scale = random_scales(*shape)
    tensors = {"up._weight_qdata": weight, "up._weight_scale": scale}
    format = "fp8_e4m3_row" if shape[0] > 1 else "fp8_e4m3_tensor"
    assert torch.equal(read_checked(tensors, "up", format=format), weight.float() * scale)


@pytest.mark.parametrize(("groups", "format"), [(1, "int8_asym"), (4, "int8_g32_asym")])
def test_int8(groups, format):
    codes = torch.randint(-128, 128, (24, 128), generator=seeded(), dtype=torch.int8)
    zero = torch.randint(-128, 128, (24, groups), generator=seeded(1), dtype=torch.int8)
    scale = random_scales(24, groups)
    tensors = {
        "up._weight_qdata": codes,
        "up._weight_scale": scale,
        "up._weight_zero_point": zero,
    }
    width = 128 // groups
    expand = lambda t: t.float().repeat_interleave(width, dim=1)  # noqa: E731
    expected = (codes.float() - expand(zero)) * expand(scale)
    assert torch.equal(read_checked(tensors, "up", format=format), expected)


@pytest.mark.parametrize("group", [32, 128, 16])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_int4_plain(batch, group):
    """Signed nibbles, transposed scales and floating-point zero points."""
    codes = torch.randint(-8, 8, (*batch, 24, 128), generator=seeded(), dtype=torch.int8)
    scale = random_scales(*batch, 128 // group, 24, dtype=torch.bfloat16)
    zero = torch.randn(scale.shape, generator=seeded(2)).mul(0.05).bfloat16()
    name = "up._weight_" if not batch else "experts._up_proj_"
    base = "up" if not batch else "experts.up_proj"
    tensors = {
        f"{name}qdata": (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4),
        f"{name}scale": scale,
        f"{name}zero_point": zero,
    }
    expand = lambda t: t.float().transpose(-1, -2).repeat_interleave(group, dim=-1)  # noqa: E731
    expected = codes.float() * expand(scale) + expand(zero)
    format = "int4_g32_min" if group % 32 == 0 else None
    actual = read_checked(tensors, base, format=format)
    # (code + 8) * scale + (zero - 8 * scale) rounds otherwise.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8_e4m3"])
def test_block_scaled(format, swizzled):
    weight = quantize(torch.randn(40, 160, generator=seeded()), format)
    scale = weight.scales["scale"]
    if swizzled:
        rows, columns = -(-40 // 128) * 32, -(-scale.shape[1] // 4) * 16
        scale = swizzle_scales(scale).view(torch.uint8).reshape(rows, columns).view(scale.dtype)
    tensors = {"up._weight_qdata": weight.packed, "up._weight_scale": scale}
    if format == "nvfp4":
        tensors["up._weight_per_tensor_scale"] = weight.scales["tensor_scale"].reshape(())
    assert torch.equal(read_checked(tensors, "up", format=format), weight.dequantize())


def test_input_factor_is_folded():
    codes = torch.randint(-128, 128, (24, 64), generator=seeded(), dtype=torch.int8)
    scale, factor = random_scales(24, 1), random_scales(64, seed=4)
    tensors = {
        "up._weight_qdata": codes,
        "up._weight_scale": scale,
        "up._weight_act_pre_scale": factor,
    }
    assert torch.equal(read_checked(tensors, "up", format=None), codes * scale * factor)


def pack_tiles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] as each lane of a warp loads them: [N / 8, K / 128, 32, 4] words."""
    rows, columns = codes.shape
    words = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64)
    for tile in range(rows // 8):
        for outer in range(columns // 128):
            for lane in range(32):
                for inner in range(4):
                    first = (outer * 8 + 2 * inner) * 16 + 2 * (lane % 4)
                    row = codes[tile * 8 + lane // 4].tolist()
                    # The even columns of four pairs, then the odd ones.
                    values = [row[first + 8 * i + odd] for odd in (0, 1) for i in range(4)]
                    word = sum(value << (4 * i) for i, value in enumerate(values))
                    words[tile, outer, lane, inner] = word
    return words.to(torch.int32)


@pytest.mark.parametrize(("batch", "group"), [((), 128), ((), 32), ((2,), 64)])
def test_int4_tile_packed(batch, group):
    shape = (*batch, 16, 1024)
    codes = torch.randint(16, shape, generator=seeded())
    both = torch.randn(*batch, 1024 // group, 16, 2, generator=seeded(1)).mul(0.1).bfloat16()
    words = pack_tiles(codes) if not batch else torch.stack([pack_tiles(c) for c in codes])
    name, base = ("up._weight_", "up") if not batch else ("experts._up_proj_", "experts.up_proj")
    tensors = {f"{name}qdata": words, f"{name}scale_and_zero": both}
    wide = both.float().transpose(-2, -3).repeat_interleave(group, dim=-2)
    expected = (codes - 8) * wide[..., 0] + wide[..., 1]
    actual = read_checked(tensors, base, format="int4_g32_min")
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(FormatError, match="scale_and_zero .* does not match") as caught:
        read_quantized_weight(tensors | {f"{name}scale_and_zero": both[..., :-1, :]}, base)
    assert f"{name}scale_and_zero" in str(caught.value)


CONFIGS = [
    ("Float8WeightOnlyConfig", {}, "fp8_e4m3_row"),
    ("Int8WeightOnlyConfig", {}, "int8"),
    ("IntxWeightOnlyConfig", {}, "int8"),
]


@pytest.mark.parametrize(("config", "options", "format"), CONFIGS)
def test_values_of_torchao(config, options, format):
    quantization = pytest.importorskip(
        "torchao.quantization", reason="compares with torchao's own output"
    )
    support = pytest.importorskip(
        "torchao.prototype.safetensors.safetensors_support",
        reason="compares with torchao's own output",
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 24, bias=False))
    quantization.quantize_(model, getattr(quantization, config)(**options))
    weight = model[0].weight
    flat, _ = support.flatten_tensor_state_dict({"up.weight": weight.data})
    values = read_checked(flat, "up", format=format)
    assert torch.equal(values, weight.data.dequantize().float())


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
def test_values_of_torchao_block_scaled(kind):
    support = pytest.importorskip(
        "torchao.prototype.safetensors.safetensors_support",
        reason="compares with torchao's own output",
    )
    weight = torch.randn(24, 128, generator=seeded())
    if kind == "nvfp4":
        nvfp4 = pytest.importorskip(
            "torchao.prototype.mx_formats.nvfp4_tensor", reason="compares with torchao's own output"
        )
        tensor = nvfp4.NVFP4Tensor.to_nvfp4(
            weight, per_tensor_scale=torch.tensor(0.01), is_swizzled_scales=True
        )
    else:
        mx = pytest.importorskip(
            "torchao.prototype.mx_formats.mx_tensor", reason="compares with torchao's own output"
        )
        dtype = torch.float8_e4m3fn if kind == "mxfp8" else torch.float4_e2m1fn_x2
        tensor = mx.MXTensor.to_mx(weight, dtype, 32)
    flat, _ = support.flatten_tensor_state_dict({"up.weight": tensor})
    values = read_checked(flat, "up", format="mxfp8_e4m3" if kind == "mxfp8" else kind)
    torch.testing.assert_close(values, tensor.dequantize(torch.float32), rtol=2e-7, atol=0)


def test_weights_are_quant_tensors():
    tensors = {
        "up._weight_qdata": torch.ones(8, 32, dtype=torch.int8),
        "up._weight_scale": torch.ones(8, 1),
    }
    assert isinstance(read_quantized_weight(tensors, "up").weight, QuantTensor)
