"""`F.grid_sample` of images against eager: modes, paddings, positions outside, NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite.compile import compile
from fulgurite.fuse import fuse
from tests.fuser import support
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True


def inputs(height: int = 7, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    image = torch.randn(2, 3, height, width)
    grid = torch.rand(2, 5, 6, 2) * 5 - 2.5  # half of it is outside
    grid[0, 0, 0] = torch.tensor([-1.0, 1.0])  # corners
    grid[0, 0, 1] = torch.tensor([1.0, -1.0])
    grid[0, 0, 2], grid[0, 1, 2, 0], grid[0, 1, 3, 1] = 0.0, 40.0, -37.5
    grid[1, 0, 0, 0] = float("nan")
    return image, grid


@pytest.mark.covering
@pytest.mark.parametrize("align", [False, True], ids=["borders", "corners"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_modes_and_paddings(mode, padding, align):
    def sample(image, grid):
        return F.grid_sample(image, grid, mode, padding, align)

    for size in ((7, 9), (1, 4), (2, 1)):
        image, grid = inputs(*size)
        if support.TARGET != "cpp":
            grid[1, 0, 0, 0] = 0.25  # NaN is what eager's kernel of the device makes of it
        region = check_fused(sample, image, grid)
        assert len(region.kernels) <= 2
    check_fused(sample, image.transpose(2, 3), grid.flip(1))
    check_fused(sample, torch.randn(0, 3, 4, 5), torch.randn(0, 2, 2, 2))


def test_what_comes_before_and_after_is_fused():
    def warp(image, flow):
        return F.grid_sample(image, torch.tanh(flow), align_corners=False).relu()

    image, flow = torch.randn(1, 2, 8, 8), torch.randn(1, 4, 4, 2)
    torch.testing.assert_close(fuse(warp)(image, flow), warp(image, flow))


def test_gradients_and_other_modes_run_by_torch():
    def sample(image, grid):
        return F.grid_sample(image, grid, "bicubic", align_corners=True)

    image, grid = inputs()
    grid = grid.nan_to_num()
    torch.testing.assert_close(compile(sample)(image, grid), sample(image, grid))
    leaves = image.requires_grad_(), grid.requires_grad_()

    def bilinear(image, grid):
        return F.grid_sample(image, grid, align_corners=False)

    ours = torch.autograd.grad(compile(bilinear)(*leaves).square().sum(), leaves)
    theirs = torch.autograd.grad(bilinear(*leaves).square().sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_infinity_next_to_the_border_is_not_read(mode, dtype):
    def sample(image, grid):
        return F.grid_sample(image, grid, mode, align_corners=False)

    image = torch.full((1, 1, 1, 13), float("inf"), dtype=dtype)
    image[..., 8:] = 1.75
    grid = torch.ones(1, 1, 3, 2, dtype=dtype)  # the last corner: half of the weights are outside
    expected = sample(image, grid)
    assert expected.isfinite().all()
    torch.testing.assert_close(compile(sample)(image, grid), expected)
