"""Slicing at block boundaries: shards have the values of the whole tensor; other slices raise."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import FORMATS, quantize
from fulgurite.quant.sharding import shard_alignment

NAMES = list(FORMATS)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.covering
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_shards_match_the_whole_tensor(name, dim):
    x = gaussian(4, 256, 512)
    q, values = quantize(x, name), quantize(x, name).dequantize()
    parts = [q.shard(dim, index, 2) for index in range(2)]
    for part, expected in zip(parts, values.chunk(2, dim), strict=True):
        assert part.shape == expected.shape
        assert torch.equal(part.dequantize(), expected)
        assert part.nbytes < q.nbytes
    assert torch.equal(torch.cat(parts, dim), q)


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_views_with_the_same_values(name):
    q = quantize(gaussian(256, 1024), name)
    values = q.dequantize()
    row_align, column_align = shard_alignment(q.format, 0, 2), shard_alignment(q.format, 1, 2)
    part = q[row_align : 2 * row_align, column_align:]
    assert torch.equal(part.dequantize(), values[row_align : 2 * row_align, column_align:])
    assert part.packed.untyped_storage().data_ptr() == q.packed.untyped_storage().data_ptr()
    assert torch.equal(q[:, -column_align:].dequantize(), values[:, -column_align:])
    assert torch.equal(q[3].dequantize(), values[3])
    assert torch.equal(q[-1].dequantize(), values[-1])
    assert q[0:0].dequantize().shape == (0, 1024)


@pytest.mark.parametrize("name", NAMES)
def test_split_and_chunk(name):
    q = quantize(gaussian(384, 512), name)
    values = q.dequantize()
    for part, expected in zip(q.split(128), values.split(128), strict=True):
        assert torch.equal(part.dequantize(), expected)
    for part, expected in zip(q.chunk(3), values.chunk(3), strict=True):
        assert torch.equal(part.dequantize(), expected)
    for part, expected in zip(q.split([256, 256], 1), values.split([256, 256], 1), strict=True):
        assert torch.equal(part.dequantize(), expected)


def test_slices_inside_a_block_are_rejected():
    q = quantize(gaussian(256, 512), "nvfp4")
    with pytest.raises(FormatError, match="cannot slice nvfp4 at 24") as caught:
        q[:, 24:]
    assert "inside a block of 16" in str(caught.value)
    assert "dimension 1 of [256, 512], range 24:512" in str(caught.value)
    assert "nearest: 16 or 32" in str(caught.value)
    blockwise = quantize(gaussian(256, 512), "fp8_e4m3_128x128")
    with pytest.raises(FormatError, match="cannot slice fp8_e4m3_128x128 at 64"):
        blockwise[:64]
    with pytest.raises(FormatError, match="cannot slice fp8_e4m3_128x128 at 96"):
        blockwise[:, 0:96]


def test_shard_errors_list_valid_counts():
    q = quantize(gaussian(256, 768), "q4_k")
    with pytest.raises(FormatError, match="2 shards of 384 would split a q4_k block of 256") as e:
        q.shard(-1, 0, 2)
    assert "use 1, 3 shards" in str(e.value)
    with pytest.raises(FormatError, match="not divisible into 5 equal shards"):
        q.shard(0, 0, 5)
    with pytest.raises(FormatError, match="shard 2 of 2 does not exist"):
        q.shard(0, 2, 2)
    with pytest.raises(FormatError, match="dimension 2 is out of range"):
        q.shard(2, 0, 2)


def test_partial_blocks_at_the_end_can_be_sliced_and_concatenated():
    x = gaussian(300, 200)
    q = quantize(x, "fp8_e4m3_128x128")
    head, tail = q[:256], q[256:]
    assert tail.shape == (44, 200)
    assert torch.equal(torch.cat([head, tail]), q)
    assert torch.equal(tail[:, 128:].dequantize(), q.dequantize()[256:, 128:])
    with pytest.raises(FormatError, match="part 0 ends inside a block of 128"):
        torch.cat([tail, head])


def test_concatenation_that_needs_new_scales_is_rejected():
    a, b = quantize(gaussian(4, 32), "nvfp4"), quantize(gaussian(4, 32) * 2, "nvfp4")
    with pytest.raises(FormatError, match="their tensor_scale values differ"):
        torch.cat([a, b])
    shared = quantize(gaussian(4, 32) * 2, "nvfp4", tensor_scale=a.scales["tensor_scale"])
    concatenated = torch.cat([a, shared]).dequantize()
    assert torch.equal(concatenated, torch.cat([a.dequantize(), shared.dequantize()]))
    with pytest.raises(FormatError, match="different formats"):
        torch.cat([a, quantize(gaussian(4, 32), "mxfp4")])


def test_steps_and_single_columns_are_rejected():
    q = quantize(gaussian(8, 32), "int8")
    with pytest.raises(FormatError, match="step 2"):
        q[::2]
    with pytest.raises(FormatError, match="single element of K"):
        q[:, 3]
