"""AWQ: the packing of AutoAWQ, written here from its definition."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import read_quantized_weight
from tests.quant.files.layouts.support import random_codes, random_scales, read_checked

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, from low to high


def pack_gemm(codes: torch.Tensor) -> torch.Tensor:
    """[R, N] -> [R, N / 8] words."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate(ORDER):
        words |= codes[:, column::8].long() << (4 * nibble)
    return words.to(torch.int32)


def gemm_tensors(rows, columns, group, base="up"):
    groups = columns // group
    codes, zeros = random_codes((columns, rows), 4), random_codes((groups, rows), 4, seed=5)
    scales = random_scales(groups, rows, dtype=torch.float16)
    tensors = {
        f"{base}.qweight": pack_gemm(codes),
        f"{base}.qzeros": pack_gemm(zeros),
        f"{base}.scales": scales,
    }
    expand = lambda t: t.repeat_interleave(group, dim=0).float()  # noqa: E731
    return tensors, ((codes - expand(zeros)) * expand(scales)).T


@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [(64, 128, 32), (8, 256, 64), (24, 384, 128), (40, 96, 96), (16, 160, 160), (16, 64, 16)],
)
def test_gemm(rows, columns, group):
    tensors, expected = gemm_tensors(rows, columns, group)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    width = next((size for size in (128, 64, 32) if group % size == 0), None)
    format = f"int4_g{width}_asym" if width else "int8_g16_asym"
    assert torch.equal(read_checked(tensors, "up", config, format=format), expected)
    # Without config.json the shapes tell.
    assert torch.equal(read_checked(tensors, "up", format=format), expected)


def test_one_group_for_all_columns():
    tensors, expected = gemm_tensors(16, 256, 256)
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}
    assert torch.equal(read_checked(tensors, "up", config, format="int4_g128_asym"), expected)


def test_without_zero_points():
    tensors, _ = gemm_tensors(16, 128, 64)
    codes = random_codes((128, 16), 4)
    del tensors["up.qzeros"]
    expected = (codes - 8) * tensors["up.scales"].repeat_interleave(64, dim=0).float()
    assert torch.equal(read_checked(tensors, "up", format="int4_g64"), expected.T)


@pytest.mark.parametrize(("columns", "group"), [(256, 64), (512, 128), (128, 32)])
def test_gemv(columns, group):
    """Nibbles in order along K; groups are padded with zeros."""
    rows, groups = 12, columns // group
    codes, zeros = random_codes((rows, columns), 4), random_codes((rows, groups), 4, seed=5)
    scales = random_scales(rows, groups, dtype=torch.float16)

    def pack(values, width):
        values = torch.nn.functional.pad(values, (0, width * 8 - values.shape[1]))
        shifts = 4 * torch.arange(8)
        return (values.reshape(rows, width, 8).long() << shifts).sum(-1).to(torch.int32)

    tensors = {
        "up.qweight": pack(codes, columns // 8),
        "up.qzeros": pack(zeros, 4),
        "up.scales": torch.nn.functional.pad(scales, (0, 32 - groups)),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv"}
    expand = lambda t: t.repeat_interleave(group, dim=1).float()  # noqa: E731
    expected = (codes - expand(zeros)) * expand(scales)
    assert torch.equal(read_checked(tensors, "up", config, format=f"int4_g{group}_asym"), expected)


def test_errors_name_the_tensor_and_the_field():
    tensors, _ = gemm_tensors(16, 128, 64)
    with pytest.raises(FormatError, match="AWQ weights of 3 bits"):
        read_quantized_weight(tensors, "up", config={"bits": 3})
    with pytest.raises(FormatError, match="AWQ version marlin is not supported") as caught:
        read_quantized_weight(tensors, "up", config={"version": "marlin"})
    assert "`version` in quantization_config" in str(caught.value)
    with pytest.raises(FormatError, match="2 groups of 32 columns do not make K = 128"):
        read_quantized_weight(tensors, "up", config={"group_size": 32})
    truncated = tensors | {"up.qzeros": tensors["up.qzeros"][:1]}
    with pytest.raises(FormatError, match=r"qzeros has shape \[1, 2\]; it must be \[2, 2\]"):
        read_quantized_weight(truncated, "up")
    wrong = tensors | {"up.qweight": tensors["up.qweight"].float()}
    with pytest.raises(FormatError, match="qweight has dtype float32; it must be int32"):
        read_quantized_weight(wrong, "up")
