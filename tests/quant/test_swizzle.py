"""The swizzled scale layout: by hand, against torch's own conversion, and in compiled functions."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_quantized import to_blocked

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.quant.swizzle import (
    padded_scale_shape,
    swizzle_grouped_scales,
    swizzle_scales,
    unswizzle_grouped_scales,
    unswizzle_scales,
)

SHAPES = [(128, 4), (1, 1), (127, 3), (130, 5), (256, 64), (0, 4), (33, 0)]


def random_scales(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)


def swizzle_by_hand(scales: torch.Tensor) -> torch.Tensor:
    """The formula of the module's docstring, byte by byte."""
    rows, columns = scales.shape
    padded_rows, padded_columns = padded_scale_shape(rows, columns)
    flat = torch.zeros(padded_rows * padded_columns, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            block = r // 128 * (padded_columns // 4) + c // 4
            flat[block * 512 + (r % 32) * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    return flat


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swizzled_scales_match_the_formula_and_torch(shape):
    scales = random_scales(*shape)
    swizzled = swizzle_scales(scales)
    assert swizzled.shape == padded_scale_shape(*shape)
    assert torch.equal(swizzled.flatten(), swizzle_by_hand(scales))
    if scales.numel():
        assert torch.equal(swizzled.flatten(), to_blocked(scales).flatten())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 130, 5), (2, 0, 128, 4)], ids=str)
def test_swizzle_and_back(shape, dtype):
    scales = random_scales(*shape).view(dtype)
    swizzled = swizzle_scales(scales)
    assert swizzled.dtype == dtype
    for form in (swizzled, swizzled.flatten(-2)):
        back = unswizzle_scales(form, *shape[-2:])
        assert back.dtype == dtype and back.shape == scales.shape
        assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_transposed_scales_are_swizzled_by_value():
    scales = random_scales(5, 200).t()
    assert torch.equal(swizzle_scales(scales), swizzle_scales(scales.contiguous()))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "ends", [[300], [5, 5, 133, 300], [0, 0, 300], [128, 256, 300], [0, 0]], ids=str
)
def test_groups_are_swizzled_one_by_one(ends, dim):
    rows, columns = (ends[-1], 6) if dim == 0 else (130, ends[-1])
    scales = random_scales(rows, columns, seed=len(ends))
    offsets = torch.tensor(ends, dtype=torch.int32)
    swizzled = swizzle_grouped_scales(scales, offsets, dim)
    starts = [0, *ends[:-1]]
    groups = [
        scales.narrow(dim, start, end - start) for start, end in zip(starts, ends, strict=True)
    ]
    expected = torch.cat([swizzle_by_hand(group.contiguous()) for group in groups])
    assert torch.equal(swizzled[: len(expected)], expected)
    assert not swizzled[len(expected) :].any()
    back = unswizzle_grouped_scales(swizzled, offsets, rows, columns, dim)
    assert torch.equal(back, scales)


@pytest.mark.parametrize("dim", [0, 1])
def test_scales_outside_of_all_groups_are_zero(dim):
    scales = random_scales(140, 9).view(torch.float8_e8m0fnu)
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    swizzled = swizzle_grouped_scales(scales, offsets, dim)
    back = unswizzle_grouped_scales(swizzled.reshape(-1, 4), offsets, 140, 9, dim)
    inside, outside = back.view(torch.uint8).split([7, back.shape[dim] - 7], dim)
    assert back.dtype == scales.dtype and not outside.any()
    assert torch.equal(inside, scales.view(torch.uint8).narrow(dim, 0, 7))


def test_compiled_swizzle_is_one_kernel():
    scales = random_scales(130, 5)
    fused = fulgurite.fuse(lambda s: swizzle_scales(s))
    assert torch.equal(fused(scales), swizzle_scales(scales))
    assert len(fused.kernels) == 1
    offsets = torch.tensor([7, 130], dtype=torch.int32)
    compiled = fulgurite.compile(swizzle_grouped_scales, fullgraph=True)
    swizzled = compiled(scales, offsets)
    assert torch.equal(swizzled, swizzle_grouped_scales(scales, offsets))
    compiled = fulgurite.compile(unswizzle_grouped_scales, fullgraph=True)
    assert torch.equal(compiled(swizzled, offsets, 130, 5), scales)


def test_wrong_scales_are_refused():
    with pytest.raises(ArgumentError, match="float32 scales"):
        swizzle_scales(torch.ones(4, 4))
    with pytest.raises(ArgumentError, match="4 swizzled scales, and 1x1 need 512"):
        unswizzle_scales(torch.ones(4, dtype=torch.uint8), 1, 1)
    with pytest.raises(ArgumentError, match="at least one offset"):
        swizzle_grouped_scales(random_scales(4, 4), torch.zeros(0, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="groups along dim 2"):
        unswizzle_grouped_scales(random_scales(4), torch.ones(1, dtype=torch.int32), 1, 1, 2)
