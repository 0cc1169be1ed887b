"""GPTQ: the packing of AutoGPTQ and GPTQModel, written here from its definition."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import read_quantized_weight
from tests.quant.files.layouts.support import random_codes, random_scales, read_checked, seeded


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, C] as one string of bits along R, in int32 words."""
    rows, columns = codes.shape
    words = [[0] * columns for _ in range(-(-rows * bits // 32))]
    for row, values in enumerate(codes.tolist()):
        for column, value in enumerate(values):
            word, shift = divmod(row * bits, 32)
            field = value << shift
            words[word][column] |= field & 0xFFFFFFFF
            if field >> 32:
                words[word + 1][column] |= field >> 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def gptq_tensors(rows, columns, group, bits, *, version=2, symmetric=False, order=None):
    groups = -(-columns // group)
    codes, zeros = random_codes((columns, rows), bits), random_codes((groups, rows), bits, seed=5)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    elif version == 1:
        zeros = zeros.clamp_min(1)
    scales = random_scales(groups, rows, dtype=torch.float16)
    g_idx = torch.arange(columns, dtype=torch.int32) // group if order is None else order
    stored_zeros = zeros - 1 if version == 1 else zeros
    tensors = {
        "up.qweight": pack_bits(codes, bits),
        "up.qzeros": pack_bits(stored_zeros.T, bits).T.contiguous(),
        "up.scales": scales,
        "up.g_idx": g_idx,
    }
    values = (codes - zeros[g_idx.long()]).float() * scales[g_idx.long()].float()
    return tensors, values.T


def gptq_config(bits, group, version=2, symmetric=False, desc_act=False):
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": desc_act,
        "checkpoint_format": "gptq_v2" if version == 2 else "gptq",
    }


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_and_versions(bits, version, symmetric):
    tensors, expected = gptq_tensors(32, 128, 64, bits, version=version, symmetric=symmetric)
    config = gptq_config(bits, 64, version, symmetric)
    kind = "" if symmetric else "_asym"
    format = f"int8_g32{kind}" if bits == 8 else f"int4_g64{kind}"
    assert torch.equal(read_checked(tensors, "up", config, format=format), expected)


@pytest.mark.parametrize(
    ("rows", "columns", "group", "format"),
    [
        (32, 256, 128, "int4_g128_asym"),
        (64, 96, 32, "int4_g32_asym"),
        (32, 160, -1, "int4_g32_asym"),
        (32, 192, 128, "int4_g64_asym"),  # the last group has 64 columns
        (32, 80, 16, "int8_g16_asym"),
    ],
)
def test_groups(rows, columns, group, format):
    width = columns if group == -1 else group
    tensors, expected = gptq_tensors(rows, columns, width, 4)
    actual = read_checked(tensors, "up", gptq_config(4, group), format=format)
    assert torch.equal(actual, expected)


def test_borrowed_zero_points():
    """GPTQModel subtracts one from each field as one subtraction of the word: zero points of 0
    borrow from their neighbour, and adding restores them."""
    tensors, expected = gptq_tensors(32, 128, 64, 4)
    words = tensors["up.qzeros"].long() & 0xFFFFFFFF
    tensors["up.qzeros"] = (words - 0x11111111).to(torch.int32)
    actual = read_checked(tensors, "up", gptq_config(4, 64, version=1), format="int4_g64_asym")
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_activation_order_is_dequantized(bits):
    order = torch.arange(128, dtype=torch.int32)[torch.randperm(128, generator=seeded())] // 32
    tensors, expected = gptq_tensors(32, 128, 32, bits, order=order)
    config = gptq_config(bits, 32, desc_act=True)
    assert torch.equal(read_checked(tensors, "up", config, format=None), expected)
    trivial, expected = gptq_tensors(32, 128, 32, 4)
    config = gptq_config(4, 32, desc_act=True)
    assert torch.equal(read_checked(trivial, "up", config, format="int4_g32_asym"), expected)


def test_overrides_of_single_modules():
    """GPTQModel's `dynamic`: the shapes of a module tell its bits and groups."""
    tensors, expected = gptq_tensors(32, 128, 64, 8)
    config = gptq_config(4, 32, symmetric=True) | {"dynamic": {"+:up": {"bits": 8}}}
    assert torch.equal(read_checked(tensors, "up", config, format="int8_g32_asym"), expected)


def test_format_field_of_new_versions():
    tensors, expected = gptq_tensors(32, 128, 64, 4)
    config = gptq_config(4, 64)
    config["format"] = config.pop("checkpoint_format")
    assert torch.equal(read_checked(tensors, "up", config, format="int4_g64_asym"), expected)
    with pytest.raises(FormatError, match="checkpoint_format 'gptq_p' is not supported"):
        read_quantized_weight(tensors, "up", config=config | {"format": "gptq_p"})


def test_errors_name_the_tensor_and_the_field():
    tensors, _ = gptq_tensors(32, 128, 64, 4)
    with pytest.raises(FormatError, match="GPTQ weights of 5 bits"):
        read_quantized_weight(tensors, "up", config={"bits": 5})
    with pytest.raises(FormatError, match="sym is true, and the zero points are not all 8"):
        read_quantized_weight(tensors, "up", config=gptq_config(4, 64, symmetric=True))
    with pytest.raises(FormatError, match="checkpoint_format 'marlin'") as caught:
        read_quantized_weight(tensors, "up", config={"checkpoint_format": "marlin"})
    assert "up.qzeros" in str(caught.value)
    with pytest.raises(FormatError, match="2 groups of 32 columns do not make K = 128"):
        read_quantized_weight(tensors, "up", config=gptq_config(4, 32))
    wrong = tensors | {"up.g_idx": tensors["up.g_idx"] + 1}
    with pytest.raises(FormatError, match="g_idx has values from 1 to 2, and there are 2 groups"):
        read_quantized_weight(wrong, "up", config=gptq_config(4, 64))
    short = tensors | {"up.qweight": tensors["up.qweight"][:-1]}
    with pytest.raises(FormatError, match=r"qweight has shape \[15, 32\]; it must be \[16, 32\]"):
        read_quantized_weight(short, "up", config=gptq_config(4, 64))
