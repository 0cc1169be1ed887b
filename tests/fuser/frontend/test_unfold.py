"""`F.unfold`, `F.fold` and their gradients against eager: one kernel each, without atomics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite.fuse import fuse
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True
aten = torch.ops.aten
# kernel, dilation, padding, stride
WINDOWS = [
    ((3, 2), (1, 1), (1, 1), (2, 1)),
    ((2, 3), (2, 1), (0, 2), (1, 3)),
    ((1, 1), (1, 1), (0, 0), (1, 1)),
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((4, 5), (1, 2), (3, 4), (5, 2)),
]


def images(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 11, 13).to(dtype)
    x[0, 0, 0, 0], x[1, 2, 5, 7] = float("nan"), float("inf")
    return [
        x,
        x.contiguous(memory_format=torch.channels_last),
        x[0],
        x.transpose(2, 3),
        torch.randn(3, 5, 11, 26).to(dtype)[1:, ::2, :, ::2],
        torch.randn(1, 1, 9, 10).to(dtype),
    ]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_unfold(window):
    for x in images():
        region = check_fused(lambda x: aten.im2col.default(x, *window), x)
        assert len(region.kernels) == 1


@pytest.mark.covering
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fold(window, dtype):
    for x in images(dtype):
        columns, size = aten.im2col.default(x, *window), x.shape[-2:]

        def fold(c):
            return aten.col2im.default(c, size, *window)

        assert len(check_fused(fold, columns).kernels) == 1


def test_many_taps_are_a_reduction():
    x = torch.randn(1, 2, 21, 22)
    window = ((9, 10), (1, 1), (4, 5), (3, 2))
    columns = aten.im2col.default(x, *window)
    check_fused(lambda c: aten.col2im.default(c, (21, 22), *window), columns)


def test_empty_batches():
    x = torch.randn(0, 3, 7, 8)
    check_fused(lambda x: aten.im2col.default(x, (2, 2), (1, 1), (0, 0), (1, 1)), x)


def test_patches_with_what_comes_before_and_after_them():
    """A gate, patches and their mean: `fuse` takes each."""
    patches = fuse(lambda x: F.unfold(x * x.sigmoid(), 3, padding=1).mean(1))
    x = torch.randn(2, 3, 8, 9)
    torch.testing.assert_close(patches(x), F.unfold(x * x.sigmoid(), 3, padding=1).mean(1))
    folded = fuse(lambda c: F.fold(c.relu(), (8, 9), 3, padding=1) * 2)
    columns = F.unfold(x, 3, padding=1)
    torch.testing.assert_close(folded(columns), F.fold(columns.relu(), (8, 9), 3, padding=1) * 2)


def test_image_sizes_may_be_dynamic():
    def function(x):
        return aten.im2col.default(x, (3, 3), (1, 1), (1, 1), (2, 2))

    check_fused(function, torch.randn(2, 3, 11, 13), mode="symbolic")
