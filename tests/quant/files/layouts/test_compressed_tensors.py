"""compressed-tensors: what its compressors write, read back to its own dequantized values."""

import pytest
import torch

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant import quantize, read_quantized_weight
from tests.quant.files.layouts.support import random_codes, random_scales, read_checked, seeded


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes [R, C] as one string of bits along C, in int32 words."""
    rows, columns = codes.shape
    words = [[0] * -(-columns * bits // 32) for _ in range(rows)]
    for row, values in enumerate(codes.tolist()):
        for column, value in enumerate(values):
            word, shift = divmod(column * bits, 32)
            field = value << shift
            words[row][word] |= field & 0xFFFFFFFF
            if field >> 32:
                words[row][word + 1] |= field >> 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def packed_tensors(shape, bits, group, zero_points=False):
    rows, columns = shape
    groups = -(-columns // group)
    codes, zero = random_codes(shape, bits), random_codes((rows, groups), bits, seed=5)
    scale = random_scales(rows, groups, dtype=torch.bfloat16)
    tensors = {
        "up.weight_packed": pack_bits(codes, bits),
        "up.weight_scale": scale,
        "up.weight_shape": torch.tensor(shape),
    }
    middle = torch.full_like(zero, 2 ** (bits - 1))
    if zero_points:
        tensors["up.weight_zero_point"] = pack_bits(zero.T, bits).T.contiguous()
    expand = lambda t: t.repeat_interleave(group, dim=1)[:, :columns]  # noqa: E731
    values = (codes - expand(zero if zero_points else middle)).float() * expand(scale).float()
    return tensors, values


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_packed_bits(bits, zero_points):
    tensors, expected = packed_tensors((40, 128), bits, 64, zero_points)
    kind = "_asym" if zero_points else ""
    format = f"int4_g64{kind}" if bits <= 4 else f"int8_g32{kind}"
    assert torch.equal(read_checked(tensors, "up", format=format), expected)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    ("shape", "group", "format"),
    [
        ((24, 256), 256, "int4_g128"),
        ((24, 100), 100, "int8"),  # K is not divisible by 32
        ((7, 33), 33, "int8"),
        ((24, 80), 16, "int8_g16"),
        ((24, 192), 128, "int4_g64"),  # the last group is partial
        ((24, 100), 20, None),
        ((5, 1), 1, "int8"),
    ],
)
def test_odd_shapes(shape, group, format, zero_points):
    tensors, expected = packed_tensors(shape, 4, group, zero_points)
    if format is not None and zero_points:
        format += "_asym"
    config = {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": group}}}}
    assert torch.equal(read_checked(tensors, "up", config, format=format), expected)


def test_stacked_experts_and_scale_per_tensor():
    parts = [packed_tensors((24, 64), 4, 32) for _ in range(3)]
    tensors = {name: torch.stack([part[0][name] for part in parts]) for name in parts[0][0]}
    tensors["up.weight_shape"] = torch.tensor([3, 24, 64])
    expected = torch.stack([part[1] for part in parts])
    assert torch.equal(read_checked(tensors, "up", format="int4_g32"), expected)
    tensors, _ = packed_tensors((24, 64), 8, 64)
    tensors["up.weight_scale"] = torch.tensor([0.25])
    codes = random_codes((24, 64), 8)
    assert torch.equal(read_checked(tensors, "up", format="int8"), (codes - 128) * 0.25)


@pytest.mark.parametrize("bits", [4, 8])
def test_activation_order(bits):
    tensors, _ = packed_tensors((24, 128), bits, 32, zero_points=True)
    order = torch.arange(128)[torch.randperm(128, generator=seeded())] // 32
    codes, zero = random_codes((24, 128), bits), random_codes((24, 4), bits, seed=5)
    expected = (codes - zero[:, order]).float() * tensors["up.weight_scale"].float()[:, order]
    tensors["up.weight_g_idx"] = order.int()
    assert torch.equal(read_checked(tensors, "up", format=None), expected)
    tensors["up.weight_g_idx"] = torch.arange(128).int() // 32
    format = "int4_g32_asym" if bits == 4 else "int8_g32_asym"
    read_checked(tensors, "up", format=format)


@pytest.mark.parametrize("shape", [(24, 1), (24,), (1,), (), (24, 4)])
def test_int8_with_zero_points(shape):
    codes = torch.randint(-128, 128, (24, 128), generator=seeded(), dtype=torch.int8)
    zero = torch.randint(-128, 128, shape, generator=seeded(1), dtype=torch.int8)
    scale = random_scales(*shape)
    tensors = {"up.weight": codes, "up.weight_scale": scale, "up.weight_zero_point": zero}
    tensors["up.input_scale"] = torch.tensor([0.5])
    is_group = shape == (24, 4)

    def expand(part):
        part = part.float().reshape(-1, 4 if is_group else 1)
        return part.repeat_interleave(32, dim=1) if is_group else part

    expected = (codes.float() - expand(zero)) * expand(scale)
    format = "int8_g32_asym" if is_group else "int8_asym"
    assert torch.equal(read_checked(tensors, "up", format=format), expected)
    tensors["up.weight_zero_point"] = torch.zeros_like(zero)  # symmetric
    format = format.removesuffix("_asym")
    assert torch.equal(read_checked(tensors, "up", format=format), codes * expand(scale))


def test_input_scale_with_a_zero_point_is_left_out():
    """It covers an asymmetric range, so it is not the scale of symmetric codes."""
    tensors = {
        "up.weight": torch.ones(8, 32, dtype=torch.int8),
        "up.weight_scale": torch.ones(8, 1),
        "up.input_scale": torch.tensor([0.5]),
        "up.input_zero_point": torch.tensor([3], dtype=torch.int8),
    }
    read_checked(tensors, "up", format="int8")
    assert read_quantized_weight(tensors, "up").input_scale is None
    tensors["up.input_zero_point"] = torch.tensor([0], dtype=torch.int8)
    assert read_quantized_weight(tensors, "up").input_scale is not None


def test_errors_name_the_tensor():
    tensors, _ = packed_tensors((24, 128), 4, 32, zero_points=True)
    for shape in ((23, 4), (24, 3), (24, 0), (2,)):
        with pytest.raises(FormatError, match="weight_scale .* is neither") as caught:
            read_quantized_weight(tensors | {"up.weight_scale": torch.ones(shape)}, "up")
        assert "up.weight_scale" in str(caught.value)
    with pytest.raises(FormatError, match=r"weight_zero_point has shape \[2, 4\]; it must be"):
        short = {"up.weight_zero_point": tensors["up.weight_zero_point"][:2]}
        read_quantized_weight(tensors | short, "up")
    with pytest.raises(FormatError, match="do not hold"):
        read_quantized_weight(tensors | {"up.weight_shape": torch.tensor([24, 300])}, "up")
    with pytest.raises(FormatError, match="weight_packed has dtype int64; it must be int32"):
        wide = {"up.weight_packed": tensors["up.weight_packed"].long()}
        read_quantized_weight(tensors | wide, "up")
    bad = tensors["up.weight_scale"].clone()
    bad[3, 1] = 0
    with pytest.raises(
        WeightsError, match=r"scale is zero over nonzero data: 0.0 at index \[3, 1\]"
    ):
        read_quantized_weight(tensors | {"up.weight_scale": bad}, "up")
    floats = {"up.weight": torch.ones(8, 32, dtype=torch.int8), "up.weight_scale": torch.ones(8)}
    with pytest.raises(FormatError, match="weight_zero_point has dtype float32"):
        read_quantized_weight(floats | {"up.weight_zero_point": torch.ones(8)}, "up")


SCHEMES = [
    ("pack-quantized", {"num_bits": 4, "group_size": 32}, "int4_g32"),
    ("pack-quantized", {"num_bits": 4, "group_size": 64, "symmetric": False}, "int4_g64_asym"),
    ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, "int8"),
    ("pack-quantized", {"num_bits": 8, "group_size": 64, "symmetric": False}, "int8_g32_asym"),
    ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}, "int4_g64_asym"),
    ("pack-quantized", {"num_bits": 3, "group_size": 64}, "int4_g64"),
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}, "int8"),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, "int8_asym"),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, "int8"),
    ("naive-quantized", {"num_bits": 8, "group_size": 64}, "int8_g32"),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8_e4m3_tensor"),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8_e4m3_row"),
    (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "fp8_e4m3_128x128",
    ),
    (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 32]},
        None,
    ),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16,
                              "strategy": "tensor_group"}, "nvfp4"),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}, "mxfp4"),
    ("mxfp6-pack-quantized", {"num_bits": 6, "type": "float", "group_size": 32}, None),
    ("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32,
                         "scale_dtype": torch.uint8}, "mxfp8_e4m3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "format"), SCHEMES, ids=[f"{s[0]}-{i}" for i, s in enumerate(SCHEMES)]
)
def test_values_of_compressed_tensors(name, options, format):
    """The library's own compressor writes, and its decompressor dequantizes."""
    package = pytest.importorskip(
        "compressed_tensors.compressors", reason="compares with compressed_tensors's own output"
    )
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compares with compressed_tensors's own output"
    )
    args = quantization.QuantizationArgs(**options)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(40, 192, generator=seeded())
    state = {"weight": weight} | make_parameters(weight, args)
    compressor = package.BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(state, scheme)
    config = {"quant_method": "compressed-tensors"}
    if args.block_structure:
        config |= {"config_groups": {"a": {"weights": {"block_structure": args.block_structure}}}}
    tensors = {f"up.{part}": value for part, value in stored.items()}
    actual = read_checked(tensors, "up", config, format=format)
    expected = compressor.decompress(dict(stored), scheme)["weight"].float()
    if format in ("nvfp4", "mxfp4") or format is None:  # the library dequantizes in bfloat16
        torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=0)
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-7, atol=0)


def make_parameters(weight: torch.Tensor, args) -> dict[str, torch.Tensor]:
    """Scales and zero points as an observer computes them."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        scale = weight.abs().amax().reshape(1) / 100
    elif args.strategy == "channel":
        scale = weight.abs().amax(1, keepdim=True) / 7
    elif args.strategy == "block":
        height, width = args.block_structure
        scale = random_scales(-(-rows // height), -(-columns // width)) * 0.5
    else:
        scale = weight.abs().reshape(rows, -1, args.group_size).amax(-1) / 7
    parameters = {"weight_scale": scale}
    if args.type == "float" and args.group_size == 32:
        parameters["weight_scale"] = torch.exp2(torch.floor(torch.log2(scale)))
    if args.strategy == "tensor_group":
        parameters["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
        parameters["weight_global_scale"] = torch.tensor([3.0])
    if not args.symmetric:
        zero = torch.randint(-3, 4, scale.shape, generator=seeded(4), dtype=torch.int8)
        parameters["weight_zero_point"] = zero
    return parameters


def test_mxfp4_shapes():
    weight = quantize(torch.randn(24, 64, generator=seeded()), "mxfp4")
    scale = weight.scales["scale"].view(torch.uint8)
    tensors = {"up.weight_packed": weight.packed, "up.weight_scale": scale}
    assert torch.equal(read_checked(tensors, "up", format="mxfp4"), weight.dequantize())
    with pytest.raises(FormatError, match="weight_packed has shape"):
        read_quantized_weight(tensors | {"up.weight_packed": weight.packed[:, :-1]}, "up")
