"""Checkpoint layouts of other projects, built from their definitions and read losslessly."""

import pytest
import torch

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant import (
    StoredTensor,
    describe_quantized_weight,
    find_quantized_weights,
    quantize,
    read_quantized_weight,
)
from fulgurite.quant.codecs.minifloat import E2M1_VALUES

E2M1 = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(shape, generator=generator()).mul(50).clamp(-448, 448).to(dtype)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=generator(1), dtype=torch.uint8)


def random_scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator(2)) + 0.5


def dequantize_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Element 2i in the low nibble of byte i, 2i + 1 in the high one."""
    values = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2)
    values[..., 0::2] = E2M1[(packed % 16).long()]
    values[..., 1::2] = E2M1[(packed // 16).long()]
    return values


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_per_tensor(shape):
    weight, scale = random_fp8(96, 160), torch.tensor(0.0173).reshape(shape)
    tensors = {"up.weight": weight, "up.weight_scale": scale, "up.input_scale": torch.tensor(0.5)}
    read = read_quantized_weight(tensors, "up", torch.float32)
    assert read.weight.format.name == "fp8_e4m3_tensor"
    assert torch.equal(read.weight.dequantize(), weight.float() * 0.0173)
    assert read.weight.packed.data_ptr() == weight.data_ptr()
    assert read.input_scale is not None
    assert read.input_scale.item() == 0.5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(96,), (96, 1)])
def test_fp8_per_row(shape, dtype):
    weight, scale = random_fp8(96, 160, dtype=dtype), random_scales(*shape).bfloat16()
    read = read_quantized_weight(
        {"up.weight": weight, "up.weight_scale": scale}, "up", torch.float32
    )
    assert read.weight.format.name.endswith("_row")
    assert torch.equal(read.weight.dequantize(), weight.float() * scale.float().reshape(96, 1))
    assert read.input_scale is None


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (576, 200), (130, 128)])
def test_fp8_in_128x128_blocks(name, rows, columns):
    """DeepSeek-V3: the last block of a row or column may be partial (576 rows are 4.5 blocks)."""
    weight = random_fp8(rows, columns)
    scale = random_scales(-(-rows // 128), -(-columns // 128))
    read = read_quantized_weight({"q.weight": weight, f"q.{name}": scale}, "q", torch.float32)
    assert read.weight.format.name == "fp8_e4m3_128x128"
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            expected = weight.float()[block] * scale[i, j]
            assert torch.equal(read.weight.dequantize()[block], expected)


def test_fp8_in_rows_of_128_and_experts():
    weight, scale = random_fp8(96, 256), random_scales(96, 2)
    read = read_quantized_weight({"a.weight": weight, "a.weight_scale": scale}, "a", torch.float32)
    assert read.weight.format.name == "fp8_e4m3_1x128"
    expected = weight.float().reshape(96, 2, 128) * scale[:, :, None]
    assert torch.equal(read.weight.dequantize(), expected.reshape(96, 256))
    experts, each = random_fp8(4, 96, 160), random_scales(4)
    read = read_quantized_weight({"a.weight": experts, "a.weight_scale": each}, "a", torch.float32)
    assert read.weight.format.name == "fp8_e4m3_tensor"
    assert torch.equal(read.weight.dequantize(), experts.float() * each[:, None, None])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8(dtype):
    weight = random_fp8(96, 128)
    scale = torch.randint(120, 130, (96, 4), generator=generator(), dtype=torch.uint8)
    tensors = {"up.weight": weight, "up.weight_scale": scale.view(dtype)}
    read = read_quantized_weight(tensors, "up", torch.float32)
    assert read.weight.format.name == "mxfp8_e4m3"
    powers = torch.pow(2.0, scale.float() - 127).repeat_interleave(32, dim=1)
    assert torch.equal(read.weight.dequantize(), weight.float() * powers)


@pytest.mark.parametrize("shape", [(96, 1), (96,), (1,)])
def test_int8_per_row(shape):
    weight = torch.randint(-128, 128, (96, 160), generator=generator(), dtype=torch.int8)
    scale = random_scales(*shape)
    read = read_quantized_weight(
        {"up.weight": weight, "up.weight_scale": scale}, "up", torch.float32
    )
    assert torch.equal(read.weight.dequantize(), weight.float() * scale.reshape(-1, 1))


def random_nvfp4() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed, scale = random_bytes(96, 64), random_scales(96, 8).mul(100).to(torch.float8_e4m3fn)
    values = dequantize_fp4(packed) * scale.float().repeat_interleave(16, dim=1)
    return packed, scale, values


def test_modelopt_nvfp4():
    packed, scale, values = random_nvfp4()
    second = torch.tensor(0.00123)
    tensors = {"up.weight": packed, "up.weight_scale": scale, "up.weight_scale_2": second,
               "up.input_scale": torch.tensor(0.004)}  # fmt: skip
    read = read_quantized_weight(tensors, "up", torch.float32)
    assert read.layout == "modelopt nvfp4"
    assert torch.equal(read.weight.dequantize(), values * second)
    assert read.input_scale is not None
    assert read.input_scale.item() == pytest.approx(0.004)


def test_compressed_tensors_nvfp4_has_reciprocal_scales():
    packed, scale, values = random_nvfp4()
    reciprocal = torch.tensor([448 * 6 / 3.3])
    tensors = {"up.weight_packed": packed, "up.weight_scale": scale,
               "up.weight_global_scale": reciprocal,
               "up.input_global_scale": torch.tensor([250.0])}  # fmt: skip
    read = read_quantized_weight(tensors, "up", torch.float32)
    assert read.layout == "compressed-tensors nvfp4"
    assert torch.allclose(read.weight.dequantize(), values / reciprocal, rtol=3e-7, atol=0)
    assert read.input_scale is not None
    assert read.input_scale.item() == pytest.approx(1 / 250)


def test_both_nvfp4_layouts_agree():
    w = torch.randn(64, 128, generator=generator())
    q = quantize(w, "nvfp4")
    scale, second = q.scales["scale"], q.scales["tensor_scale"].reshape(())
    modelopt = {"a.weight": q.packed, "a.weight_scale": scale, "a.weight_scale_2": second}
    compressed = {"a.weight_packed": q.packed, "a.weight_scale": scale,
                  "a.weight_global_scale": 1 / second}  # fmt: skip
    one = read_quantized_weight(modelopt, "a").weight.dequantize(torch.float32)
    two = read_quantized_weight(compressed, "a").weight.dequantize(torch.float32)
    assert torch.equal(one, q.dequantize())
    assert torch.allclose(one, two, rtol=3e-7, atol=0)


def test_compressed_tensors_mxfp4():
    packed = random_bytes(96, 64)
    scale = torch.randint(118, 132, (96, 4), generator=generator(), dtype=torch.uint8)
    tensors = {"up.weight_packed": packed, "up.weight_scale": scale}
    read = read_quantized_weight(tensors, "up", torch.float32)
    powers = torch.pow(2.0, scale.float() - 127).repeat_interleave(32, dim=1)
    assert torch.equal(read.weight.dequantize(), dequantize_fp4(packed) * powers)


def pack_int4_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 along the last dimension, eight in an int32, the first in the lowest bits."""
    groups = codes.reshape(*codes.shape[:-1], -1, 8).to(torch.int64)
    words = (groups << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_int4(groups, symmetric):
    """Groups of 256 or a whole row are read as smaller groups with the same scale."""
    codes = torch.randint(16, (40, 256), generator=generator())
    scale = random_scales(40, groups).half()
    zero = torch.randint(16, (40, groups), generator=generator(3))
    tensors = {"up.weight_packed": pack_int4_words(codes), "up.weight_scale": scale,
               "up.weight_shape": torch.tensor([40, 256])}  # fmt: skip
    offset = torch.full_like(zero, 8)
    if not symmetric:
        tensors["up.weight_zero_point"] = pack_int4_words(zero.t()).t().contiguous()
        offset = zero
    read = read_quantized_weight(tensors, "up", torch.float32)
    assert read.weight.format.name.startswith(f"int4_g{min(256 // groups, 128)}")
    steps = codes - offset.repeat_interleave(256 // groups, dim=1)
    expected = steps.float() * scale.float().repeat_interleave(256 // groups, dim=1)
    assert torch.equal(read.weight.dequantize(), expected)


@pytest.mark.parametrize("form", ["{}_{}", "{}.{}"])
def test_gpt_oss(form):
    blocks = random_bytes(2, 24, 3, 16)
    scales = torch.randint(110, 130, (2, 24, 3), generator=generator(), dtype=torch.uint8)
    base = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {form.format(base, "blocks"): blocks, form.format(base, "scales"): scales}
    read = read_quantized_weight(tensors, base, torch.float32)
    assert read.weight.shape == (2, 24, 96)
    powers = torch.pow(2.0, scales.float() - 127).repeat_interleave(32, dim=-1)
    expected = dequantize_fp4(blocks).reshape(2, 24, 96) * powers
    assert torch.equal(read.weight.dequantize(), expected)
    assert read.weight.packed.data_ptr() == blocks.data_ptr()


def test_gpt_oss_matches_transformers():
    mxfp4 = pytest.importorskip(
        "transformers.integrations.mxfp4", reason="this transformers has no MXFP4 to compare with"
    )
    blocks = random_bytes(2, 24, 3, 16)
    scales = torch.randint(110, 130, (2, 24, 3), generator=generator(), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    actual = read_quantized_weight({"w_blocks": blocks, "w_scales": scales}, "w").weight
    # transformers hands its experts out transposed, [experts, K, rows].
    assert torch.equal(actual.dequantize(torch.float32).transpose(1, 2), expected)


def test_find_quantized_weights():
    fp8, int8, uint8, int32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32
    stored = {
        "embed.weight": StoredTensor((8, 8), torch.bfloat16),
        "norm.weight": StoredTensor((8,), torch.bfloat16),
        "l.0.q.weight": StoredTensor((8, 32), fp8),
        "l.0.q.weight_scale_inv": StoredTensor((1, 1), torch.float32),
        "l.0.k.weight": StoredTensor((8, 32), fp8),
        "l.0.k.weight_scale": StoredTensor((8, 1), torch.float32),
        "l.0.k.input_scale": StoredTensor((), torch.float32),
        "l.0.k.k_scale": StoredTensor((), torch.float32),
        "l.0.v.weight": StoredTensor((8, 16), uint8),
        "l.0.v.weight_scale": StoredTensor((8, 2), fp8),
        "l.0.v.weight_scale_2": StoredTensor((), torch.float32),
        "l.0.o.weight_packed": StoredTensor((8, 16), uint8),
        "l.0.o.weight_scale": StoredTensor((8, 2), fp8),
        "l.0.o.weight_global_scale": StoredTensor((1,), torch.float32),
        "l.0.up.weight_packed": StoredTensor((8, 4), int32),
        "l.0.up.weight_scale": StoredTensor((8, 1), torch.float32),
        "l.0.up.weight_shape": StoredTensor((2,), torch.int64),
        "l.0.gate.weight": StoredTensor((8, 32), int8),
        "l.0.gate.weight_scale": StoredTensor((8, 1), torch.float32),
        "l.0.down.weight_packed": StoredTensor((8, 16), uint8),
        "l.0.down.weight_scale": StoredTensor((8, 1), uint8),
        "l.0.experts.gate_up_proj_blocks": StoredTensor((2, 8, 1, 16), uint8),
        "l.0.experts.gate_up_proj_scales": StoredTensor((2, 8, 1), uint8),
        "l.0.experts.gate_up_proj_bias": StoredTensor((2, 8), torch.bfloat16),
        "block.1.mlp1_weight.blocks": StoredTensor((2, 8, 1, 16), uint8),
        "block.1.mlp1_weight.scales": StoredTensor((2, 8, 1), uint8),
        "l.1.q.qweight": StoredTensor((32, 1), int32),
        "l.1.q.qzeros": StoredTensor((1, 1), int32),
        "l.1.q.scales": StoredTensor((1, 8), torch.float16),
        "l.1.k.qweight": StoredTensor((4, 8), int32),
        "l.1.k.qzeros": StoredTensor((1, 1), int32),
        "l.1.k.scales": StoredTensor((1, 8), torch.float16),
        "l.1.k.g_idx": StoredTensor((32,), int32),
        "l.1.v.weight": StoredTensor((128, 1), uint8),
        "l.1.v.weight.absmax": StoredTensor((4,), torch.float32),
        "l.1.v.weight.quant_map": StoredTensor((16,), torch.float32),
        "l.1.v.weight.quant_state.bitsandbytes__nf4": StoredTensor((80,), uint8),
        "l.1.o.weight": StoredTensor((8, 32), int8),
        "l.1.o.SCB": StoredTensor((8,), torch.float32),
        "l.1.up._weight_qdata": StoredTensor((8, 32), int8),
        "l.1.up._weight_scale": StoredTensor((8, 1), torch.float32),
        "l.1.experts._up_proj_qdata": StoredTensor((2, 8, 32), fp8),
        "l.1.experts._up_proj_scale": StoredTensor((2, 8, 1), torch.float32),
        "l.2.experts.up_proj": StoredTensor((2, 32, 8), fp8),
        "l.2.experts.up_proj_weight_scale": StoredTensor((2,), torch.float32),
    }
    assert find_quantized_weights(stored) == {
        "l.0.q": "deepseek fp8",
        "l.0.k": "weight_scale",
        "l.0.v": "modelopt nvfp4",
        "l.0.o": "compressed-tensors nvfp4",
        "l.0.up": "compressed-tensors packed",
        "l.0.gate": "compressed-tensors int8",
        "l.0.down": "compressed-tensors mxfp4",
        "l.0.experts.gate_up_proj": "gpt-oss mxfp4",
        "block.1.mlp1_weight": "gpt-oss mxfp4, original names",
        "l.1.q": "awq",
        "l.1.k": "gptq",
        "l.1.v": "bitsandbytes nf4",
        "l.1.o": "bitsandbytes int8",
        "l.1.up": "torchao",
        "l.1.experts.up_proj": "torchao",
        "l.2.experts.up_proj": "modelopt experts",
    }
    described = describe_quantized_weight(stored, "l.0.k", None, pytest.fail)
    assert described.name == "l.0.k.weight"
    assert described.shape == (8, 32)
    assert set(described.tensors) == {"l.0.k.weight", "l.0.k.weight_scale", "l.0.k.input_scale"}
    assert describe_quantized_weight(stored, "l.2.experts.up_proj", None, pytest.fail).name == (
        "l.2.experts.up_proj"
    )


def test_missing_scale():
    with pytest.raises(WeightsError, match="'up' has no supported quantized layout") as caught:
        read_quantized_weight({"up.weight": random_fp8(4, 32)}, "up")
    assert "found up.weight" in str(caught.value)
    assert ".weight + .weight_scale" in str(caught.value)
    with pytest.raises(WeightsError, match="no tensor is named down"):
        read_quantized_weight({}, "down")


def test_mismatched_shapes_are_rejected():
    weight = random_fp8(256, 512)
    with pytest.raises(FormatError, match=r"weight_scale \[3, 3\] matches no FP8 format") as caught:
        read_quantized_weight({"a.weight": weight, "a.weight_scale": random_scales(3, 3)}, "a")
    assert "[2, 4] (fp8_e4m3_128x128)" in str(caught.value)
    with pytest.raises(FormatError, match="weight_block_size"):
        read_quantized_weight({"a.weight": weight, "a.weight_scale_inv": random_scales(4, 7)}, "a")
    tensors = {"a_blocks": random_bytes(2, 3, 16), "a_scales": random_bytes(2, 4)}
    with pytest.raises(FormatError, match="do not match"):
        read_quantized_weight(tensors, "a")
    with pytest.raises(FormatError, match="are not supported"):
        read_quantized_weight({"a.weight": weight.half(), "a.weight_scale": random_scales(1)}, "a")
    packed, scale, _ = random_nvfp4()
    tensors = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": random_scales(3)}
    with pytest.raises(FormatError, match="3 tensor scales for 1 matrices"):
        read_quantized_weight(tensors, "a")
    words = torch.zeros(8, 64, dtype=torch.int32)
    tensors = {"a.weight_packed": words, "a.weight_scale": random_scales(8, 1),
               "a.weight_shape": torch.tensor([8, 300])}  # fmt: skip
    with pytest.raises(FormatError, match="do not hold"):
        read_quantized_weight(tensors, "a")


def test_invalid_scales_are_rejected():
    weight, scale = random_fp8(96, 160), random_scales(96, 1)
    scale[7] = float("nan")
    tensors = {"l.3.up.weight": weight, "l.3.up.weight_scale": scale}
    with pytest.raises(WeightsError, match=r"nan at index \[7, 0\]") as caught:
        read_quantized_weight(tensors, "l.3.up")
    assert "l.3.up (weight_scale), 1 of 96 scales" in str(caught.value)
    scale[7] = 0.0
    with pytest.raises(WeightsError, match="is zero over nonzero data"):
        read_quantized_weight(tensors, "l.3.up")
    assert read_quantized_weight(tensors, "l.3.up", check=False).weight.shape == (96, 160)
    packed, block, _ = random_nvfp4()
    tensors = {"a.weight_packed": packed, "a.weight_scale": block,
               "a.weight_global_scale": torch.tensor([0.0])}  # fmt: skip
    with pytest.raises(WeightsError, match="tensor_scale is not finite: inf"):
        read_quantized_weight(tensors, "a")
