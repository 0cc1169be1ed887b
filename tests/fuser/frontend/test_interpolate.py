"""`F.interpolate` and its gradients as generated kernels, against eager and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.errors import FusionError
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True
aten = torch.ops.aten

# (op, has align_corners, sizes of the image, sizes of the result)
CASES = [
    ("upsample_nearest1d", False, (11,), (23,)),
    ("upsample_nearest2d", False, (5, 7), (10, 14)),
    ("upsample_nearest2d", False, (7, 11), (3, 29)),
    ("_upsample_nearest_exact2d", False, (7, 11), (3, 29)),
    ("upsample_nearest3d", False, (3, 4, 2), (5, 4, 6)),
    ("upsample_linear1d", True, (11,), (5,)),
    ("upsample_bilinear2d", True, (5, 7), (10, 14)),
    ("upsample_bilinear2d", True, (11, 13), (7, 5)),
    ("upsample_bilinear2d", True, (1, 1), (4, 3)),
    ("upsample_bilinear2d", True, (3, 2), (24, 1)),  # many readers of each position
    ("upsample_trilinear3d", True, (3, 4, 2), (5, 4, 3)),
    ("upsample_bicubic2d", True, (5, 7), (10, 13)),
    ("upsample_bicubic2d", True, (7, 6), (3, 2)),
]


# On GPUs, torch's FakeTensor rule of bilinear gives fewer than 16 channels a contiguous layout; eager does not.
CHANNELS_LAST = 16


def image(
    sizes: tuple[int, ...],
    last: bool = False,
    dtype: torch.dtype = torch.float32,
    channels: int = 3,
):
    x = torch.randn(2, channels, *sizes, dtype=dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.to(memory_format=formats[x.dim()]) if last and x.dim() in formats else x


@pytest.mark.covering
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradient_are_one_kernel_each(case, corners):
    name, has_corners, source, result = case
    if corners and not has_corners:
        pytest.skip("nearest has no align_corners")
    torch.manual_seed(0)
    options = [corners] if has_corners else []
    op, gradient = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    region = check_fused(lambda x: op(x, result, *options), image(source))
    assert len(region.kernels) == 1
    shape = (2, 3, *source)
    region = check_fused(lambda g: gradient(g, result, shape, *options), image(result))
    assert len(region.kernels) == 1


@pytest.mark.parametrize(
    "name", ["upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"]
)
def test_channels_last(name):
    torch.manual_seed(0)
    options = [] if "nearest" in name else [False]
    op, gradient = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    small, large = (image(size, True, channels=CHANNELS_LAST) for size in ((4, 5), (9, 10)))
    check_fused(lambda x: op(x, [9, 10], *options), small)
    check_fused(lambda g: gradient(g, [9, 10], [2, CHANNELS_LAST, 4, 5], *options), large)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    torch.manual_seed(0)
    x = image((5, 6), dtype=dtype)
    check_fused(lambda x: aten.upsample_bilinear2d.default(x, [9, 13], False), x)
    check_fused(lambda x: aten.upsample_nearest2d.default(x, [9, 13]), x)
    g = image((9, 13), dtype=dtype)
    check_fused(
        lambda g: aten.upsample_bilinear2d_backward.default(g, [9, 13], [2, 3, 5, 6], False), g
    )


def test_nearest_of_bytes():
    x = torch.randint(0, 256, (2, 3, 5, 6), dtype=torch.uint8)
    check_fused(lambda x: aten.upsample_nearest2d.default(x, [9, 13]), x)


@pytest.mark.covering
@pytest.mark.parametrize("scale", [1.05, 2.05, 2.5, 0.6])
@pytest.mark.parametrize(
    "name", ["upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"]
)
def test_a_scale_factor_that_the_sizes_do_not_show(name, scale):
    torch.manual_seed(0)
    sizes = [int(10 * scale), int(7 * scale)]
    options = [False] if "linear" in name else []
    op, gradient = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    check_fused(lambda x: op(x, sizes, *options, scale, scale), image((10, 7)))
    check_fused(
        lambda g: gradient(g, sizes, [2, 3, 10, 7], *options, scale, scale), image(tuple(sizes))
    )


def test_no_images():
    check_fused(
        lambda x: aten.upsample_bilinear2d.default(x, [8, 6], False), torch.randn(0, 3, 4, 5)
    )


def test_infinite_and_nan_gradients_stay_where_they_are():
    grad = torch.zeros(1, 1, 8, 8)
    grad[0, 0, 0, 0], grad[0, 0, 7, 7] = torch.inf, torch.nan
    check_fused(
        lambda g: aten.upsample_bilinear2d_backward.default(g, [8, 8], [1, 1, 4, 4], False), grad
    )


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(4, 5), (4, 7), (3, 5), (4, 1)])
def test_infinities_become_nan_where_torch_multiplies_them_by_zero(size, corners):
    torch.manual_seed(0)
    x = image((4, 5))
    x[0, 0, 1, 2], x[1, 2, 3, 4] = torch.inf, -torch.inf
    check_fused(lambda x: aten.upsample_bilinear2d.default(x, list(size), corners), x)


def test_neighbors_are_in_the_same_kernel(target):
    def block(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rectified = F.relu(x + bias[:, None, None])
        return F.interpolate(rectified, scale_factor=2, mode="bilinear") * 2

    x, bias = torch.randn(2, 3, 6, 5), torch.randn(3)
    f = fulgurite.fuse(block)
    torch.testing.assert_close(f(x, bias), block(x, bias))
    assert len(f.kernels) == 1


def test_the_gradient_of_a_block_is_one_kernel(target):
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.interpolate(x, scale_factor=2, mode="bilinear")) * 2

    x = torch.randn(2, 3, 6, 5, requires_grad=True)
    f = fulgurite.fuse(block)
    result, expected = f(x), block(x)
    assert len(f.kernels) == 1
    grad = torch.randn_like(expected)
    (got,) = torch.autograd.grad(result, x, grad)
    (want,) = torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(got, want)
    assert len(f.kernels) == 2


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_dynamic_image_sizes(target, mode):
    f = fulgurite.fuse(lambda x: F.interpolate(x, scale_factor=2, mode=mode), dynamic=True)
    for sizes in ((4, 5), (7, 3), (2, 11)):
        x = torch.randn(2, 3, *sizes)
        torch.testing.assert_close(f(x), F.interpolate(x, scale_factor=2, mode=mode))
    assert len(f.kernels) == 1


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize(
    "options", [{"scale_factor": 1.7, "recompute_scale_factor": True}, {"size": 5}]
)
def test_interpolate_with_dynamic_batches(target, mode, options):
    f = fulgurite.compile(
        lambda x: F.interpolate(x, mode=mode, **options), dynamic=True, autotune=False
    )
    x = torch.randn(3, 2, 7, 8, requires_grad=True)
    result, expected = f(x), F.interpolate(x, mode=mode, **options)
    torch.testing.assert_close(result, expected)
    grad = torch.randn_like(expected)
    (got,) = torch.autograd.grad(result, x, grad)
    (want,) = torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(got, want)


def test_bytes_that_eager_interpolates_with_fixed_point_numbers_stay_with_torch(target):
    x = torch.randint(0, 256, (1, 3, 5, 6), dtype=torch.uint8)

    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    with pytest.raises(FusionError, match="interpolation of torch.uint8"):
        fulgurite.fuse(resize)(x)
    assert torch.equal(fulgurite.compile(resize)(x), resize(x))


def test_cpu_kernels_compute_positions_and_weights_once(target):
    f = fulgurite.fuse(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"))
    f(torch.randn(2, 3, 6, 5))
    tables, loops = f.kernels[0].source.split("#pragma omp simd\n      for", 1)
    assert "floor(" in tables
    assert "floor(" not in loops


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_gradients_of_symbolic_sizes(mode):
    """torch's shape rule of the bicubic gradient takes numbers only."""

    def shrink(x):
        return F.interpolate(x, size=(4, 3), mode=mode, antialias=True).square()

    compiled = fulgurite.compile(shrink, dynamic=True)
    for layout in (torch.contiguous_format, torch.channels_last):
        for size in (5, 7):
            x = torch.randn(2, 3, size, 6).to(memory_format=layout).requires_grad_()
            (found,) = torch.autograd.grad(compiled(x).sum(), x)
            (expected,) = torch.autograd.grad(shrink(x).sum(), x)
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()
