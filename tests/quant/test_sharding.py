"""Cutting at block boundaries: a shard's values are the whole's, and bad cuts say so."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import FORMATS, quantize
from fulgurite.quant.sharding import boundary

NAMES = list(FORMATS)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_shards_are_the_whole(name, dim):
    x = gaussian(4, 256, 512)
    q, values = quantize(x, name), quantize(x, name).dequantize()
    parts = [q.shard(dim, index, 2) for index in range(2)]
    for part, expected in zip(parts, values.chunk(2, dim), strict=True):
        assert part.shape == expected.shape
        assert torch.equal(part.dequantize(), expected)
        assert part.nbytes < q.nbytes
    assert torch.equal(torch.cat(parts, dim), q)


@pytest.mark.parametrize("name", NAMES)
def test_slices_share_memory_and_match(name):
    q = quantize(gaussian(256, 1024), name)
    values = q.dequantize()
    down, across = boundary(q.format, 0, 2), boundary(q.format, 1, 2)
    part = q[down : 2 * down, across:]
    assert torch.equal(part.dequantize(), values[down : 2 * down, across:])
    assert part.packed.untyped_storage().data_ptr() == q.packed.untyped_storage().data_ptr()
    assert torch.equal(q[:, -across:].dequantize(), values[:, -across:])
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


def test_a_boundary_inside_a_block():
    q = quantize(gaussian(256, 512), "nvfp4")
    with pytest.raises(FormatError, match="can't be cut at 24") as caught:
        q[:, 24:]
    assert "inside a block of 16" in str(caught.value)
    assert "dimension 1 of [256, 512], range 24:512" in str(caught.value)
    assert "near: 16 or 32" in str(caught.value)
    tiles = quantize(gaussian(256, 512), "fp8_e4m3_128x128")
    with pytest.raises(FormatError, match="can't be cut at 64"):
        tiles[:64]
    with pytest.raises(FormatError, match="can't be cut at 96"):
        tiles[:, 0:96]


def test_shard_counts_that_work_are_listed():
    q = quantize(gaussian(256, 768), "q4_k")
    with pytest.raises(
        FormatError, match="2 shards of 384 would cut q4_k inside a block of 256"
    ) as e:
        q.shard(-1, 0, 2)
    assert "fall on blocks here: 1, 3;" in str(e.value)
    with pytest.raises(FormatError, match="doesn't divide into 5 equal shards"):
        q.shard(0, 0, 5)
    with pytest.raises(FormatError, match="no shard 2 of 2"):
        q.shard(0, 2, 2)
    with pytest.raises(FormatError, match="no dimension 2"):
        q.shard(2, 0, 2)


def test_partial_blocks_at_the_end_may_be_cut_off_and_joined():
    x = gaussian(300, 200)
    q = quantize(x, "fp8_e4m3_128x128")
    head, tail = q[:256], q[256:]
    assert tail.shape == (44, 200)
    assert torch.equal(torch.cat([head, tail]), q)
    assert torch.equal(tail[:, 128:].dequantize(), q.dequantize()[256:, 128:])
    with pytest.raises(FormatError, match="part 0 ends inside a block of 128"):
        torch.cat([tail, head])


def test_joins_that_would_need_new_scales_are_refused():
    a, b = quantize(gaussian(4, 32), "nvfp4"), quantize(gaussian(4, 32) * 2, "nvfp4")
    with pytest.raises(FormatError, match="each has its own tensor_scale"):
        torch.cat([a, b])
    shared = quantize(gaussian(4, 32) * 2, "nvfp4", tensor_scale=a.scales["tensor_scale"])
    joined = torch.cat([a, shared]).dequantize()
    assert torch.equal(joined, torch.cat([a.dequantize(), shared.dequantize()]))
    with pytest.raises(FormatError, match="of one format"):
        torch.cat([a, quantize(gaussian(4, 32), "mxfp4")])


def test_steps_and_single_columns_are_refused():
    q = quantize(gaussian(8, 32), "int8")
    with pytest.raises(FormatError, match="step 2"):
        q[::2]
    with pytest.raises(FormatError, match="one element of K"):
        q[:, 3]
