"""Pooling and its gradients as generated kernels, against eager and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.fuser.frontend.pooling_windows import AdaptiveWindows
from tests.fuser import support
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True
aten = torch.ops.aten

# kernel, stride, padding, ceil_mode
AVERAGES = [
    ([2, 2], [2, 2], [0, 0], False),
    ([3, 3], [2, 2], [1, 1], False),
    ([3, 4], [2, 3], [1, 2], True),
    ([3, 3], [1, 1], [1, 1], False),
    ([9, 9], [2, 2], [4, 4], False),  # a reduction
    ([2, 1], [3, 5], [0, 0], True),  # positions that no window reads
]
# kernel, stride, padding, dilation, ceil_mode
MAXIMA = [
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([2, 3], [3, 2], [1, 1], [3, 2], True),
    ([3, 3], [1, 1], [1, 1], [2, 2], False),
    ([9, 9], [2, 2], [4, 4], [1, 1], False),
]


def odd_image(last: bool = False) -> torch.Tensor:
    """An image with ties, NaN, and a channel of -inf.

    Eager's GPU kernel for channels last gives index 0 for such a channel, whatever the window.
    """
    torch.manual_seed(0)
    x = torch.randint(0, 9, (2, 5, 11, 13)).float()
    x[0, 0, 3, 3:6] = torch.nan
    if not (last and torch.cuda.is_available()):
        x[0, 1] = -torch.inf
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.covering
@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("window", AVERAGES, ids=str)
def test_averages(window, include_pad):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 11, 13)
    region = check_fused(lambda x: aten.avg_pool2d.default(x, *window, include_pad), x)
    assert len(region.kernels) == 1
    grad = torch.randn_like(aten.avg_pool2d.default(x, *window, include_pad))
    region = check_fused(
        lambda g, x: aten.avg_pool2d_backward.default(g, x, *window, include_pad, None), grad, x
    )
    assert len(region.kernels) == 1


def test_divisor_override():
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, 7, 9), torch.randn(2, 3, 4, 5)
    window = ([3, 3], [2, 2], [1, 1], False, True, 5)
    check_fused(lambda x: aten.avg_pool2d.default(x, *window), x)
    check_fused(lambda g, x: aten.avg_pool2d_backward.default(g, x, *window), grad, x)


@pytest.mark.covering
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("window", MAXIMA, ids=str)
def test_maxima_and_their_indices(window, last):
    x = odd_image(last)
    region = check_fused(lambda x: aten.max_pool2d_with_indices.default(x, *window), x)
    assert len(region.kernels) == 1
    values, indices = aten.max_pool2d_with_indices.default(x, *window)
    grad = torch.randn_like(values)
    region = check_fused(
        lambda g, x, i: aten.max_pool2d_with_indices_backward.default(g, x, *window, i),
        grad,
        x,
        indices,
    )
    # C++ adds planes up at the saved indices, on top of zeros
    assert len(region.kernels) == (2 if support.TARGET == "cpp" and not last else 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="eager has no such GPU kernel")
def test_maxima_of_integers():
    x = torch.randint(-9, 9, (2, 3, 7, 8), dtype=torch.int32)
    window = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    check_fused(lambda x: aten.max_pool2d_with_indices.default(x, *window), x)


@pytest.mark.parametrize("sizes", [(4, 5), (11, 1), (17, 13), (7, 7)], ids=str)
def test_adaptive_windows(sizes):
    x = odd_image()
    region = check_fused(lambda x: aten.adaptive_max_pool2d.default(x, sizes), x)
    assert len(region.kernels) == 1
    values, indices = aten.adaptive_max_pool2d.default(x, sizes)
    grad = torch.randn(values.shape)
    check_fused(
        lambda g, x, i: aten.adaptive_max_pool2d_backward.default(g, x, i), grad, x, indices
    )
    x = torch.randn(2, 3, 11, 13)
    region = check_fused(lambda x: aten._adaptive_avg_pool2d.default(x, sizes), x)
    assert len(region.kernels) == 1
    grad = torch.randn(2, 3, *sizes)
    region = check_fused(lambda g, x: aten._adaptive_avg_pool2d_backward.default(g, x), grad, x)
    assert len(region.kernels) == 1


def test_longest_adaptive_windows():
    """The longest window and the most windows of a position may be anywhere."""
    for n in range(1, 13):
        for m in range(1, 13):
            spans = [range(o * n // m, -(-(o + 1) * n // m)) for o in range(m)]
            windows = AdaptiveWindows(n, m)
            assert windows.count == max(map(len, spans)), (n, m)
            readers = [sum(i in span for span in spans) for i in range(n)]
            assert windows.num_readers >= max(readers), (n, m)


def test_more_adaptive_results_than_positions():
    def function(x, y):
        return (
            F.adaptive_avg_pool2d(x, (5, 7)),
            F.adaptive_max_pool2d(x, (5, 7)),
            F.adaptive_avg_pool2d(y, (3, 5)),
        )

    check_fused(function, torch.randn(1, 2, 2, 2), torch.randn(1, 2, 4, 2))


def test_three_dimensions():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 6, 7)
    check_fused(lambda x: aten.avg_pool3d.default(x, [2, 3, 2], [2, 2, 1], [1, 1, 0]), x)
    check_fused(
        lambda x: aten.max_pool3d_with_indices.default(x, [2, 2, 3], [2, 1, 2], [1, 0, 1]), x
    )
    check_fused(lambda x: aten._adaptive_avg_pool3d.default(x, [2, 3, 7]), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 8).to(dtype)
    check_fused(lambda x: aten.avg_pool2d.default(x, [3, 3], [2, 2], [1, 1]), x)
    check_fused(lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1]), x)


def test_no_images_and_one_pixel():
    for x in (torch.randn(0, 3, 4, 4), torch.randn(2, 3, 1, 1)):
        check_fused(lambda x: aten.avg_pool2d.default(x, [3, 3], [2, 2], [1, 1]), x)
        check_fused(lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1]), x)


POOLINGS = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[:, 0], 3, 2, 1),
    "max_pool1d": lambda x: F.max_pool1d(x[:, 0], 3, 2, 1),
    "avg_pool2d": lambda x: F.relu(F.avg_pool2d(x * 2, 3, 2, 1)),
    "max_pool2d": lambda x: F.max_pool2d(F.relu(x), 3, 2, 1),
    "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 1, 2, 3),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_with_dynamic_sizes_and_gradients(target, name):
    pool = POOLINGS[name]
    f = fulgurite.fuse(pool, dynamic=True)
    for sizes in ((9, 8), (5, 11)):
        x = torch.randn(2, 3, *sizes, requires_grad=True)
        result, expected = f(x), pool(x)
        torch.testing.assert_close(result, expected)
        grad = torch.randn_like(expected)
        (got,) = torch.autograd.grad(result, x, grad)
        (want,) = torch.autograd.grad(expected, x, grad)
        torch.testing.assert_close(got, want)
