"""Reflecting, replicating and circular pads and their gradients as generated kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True
aten = torch.ops.aten

PADS = [
    ((11,), [3, 2]),
    ((5, 7), [1, 1, 1, 1]),
    ((5, 7), [0, 3, 4, 0]),
    ((6, 7), [-1, 2, 1, -2]),
    ((1, 9), [4, 8, 0, 0]),
    ((3, 4, 5), [1, 2, 2, 0, 1, 1]),
]


def shape_of(sizes: tuple[int, ...], pad: list[int]) -> list[int]:
    pairs = [(pad[k], pad[k + 1]) for k in reversed(range(0, len(pad), 2))]
    return [n + a + b for n, (a, b) in zip(sizes, pairs, strict=True)]


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize(("sizes", "pad"), PADS, ids=str)
def test_forward_and_gradient_are_one_kernel_each(kind, sizes, pad):
    torch.manual_seed(0)
    op = getattr(aten, f"{kind}_pad{len(sizes)}d").default
    gradient = getattr(aten, f"{kind}_pad{len(sizes)}d_backward").default
    x = torch.randn(2, 3, *sizes)
    region = check_fused(lambda x: op(x, pad), x)
    assert len(region.kernels) == 1
    grad = torch.randn(2, 3, *shape_of(sizes, pad))
    region = check_fused(lambda g, x: gradient(g, x, pad), grad, x)
    assert len(region.kernels) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_short_images_are_replicated_on_both_sides(size):
    torch.manual_seed(0)
    x, grad = torch.randn(1, 2, size), torch.randn(1, 2, size + 7)
    check_fused(lambda x: aten.replication_pad1d.default(x, [3, 4]), x)
    check_fused(lambda g, x: aten.replication_pad1d_backward.default(g, x, [3, 4]), grad, x)


def test_long_pads_are_a_reduction():
    torch.manual_seed(0)
    x, grad = torch.randn(1, 2, 5), torch.randn(1, 2, 305)
    region = check_fused(
        lambda g, x: aten.replication_pad1d_backward.default(g, x, [100, 200]), grad, x
    )
    assert len(region.kernels) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_dtypes(dtype):
    x = torch.randint(0, 100, (2, 3, 5, 6)).to(dtype)
    check_fused(lambda x: aten.replication_pad2d.default(x, [1, 2, 3, 1]), x)
    if dtype.is_floating_point:
        check_fused(lambda x: aten.reflection_pad2d.default(x, [1, 2, 3, 1]), x)


def test_infinite_gradients_stay_where_they_are():
    grad, x = torch.ones(1, 1, 8), torch.randn(1, 1, 5)
    grad[0, 0, 4] = torch.inf
    check_fused(lambda g, x: aten.reflection_pad1d_backward.default(g, x, [1, 2]), grad, x)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_dynamic_sizes(target, mode):
    f = fulgurite.fuse(lambda x: F.relu(F.pad(x, (1, 2, 2, 1), mode=mode)) * 2, dynamic=True)
    for sizes in ((4, 5), (7, 3)):
        x = torch.randn(2, 3, *sizes, requires_grad=True)
        result, expected = f(x), F.relu(F.pad(x, (1, 2, 2, 1), mode=mode)) * 2
        torch.testing.assert_close(result, expected)
        grad = torch.randn_like(expected)
        (got,) = torch.autograd.grad(result, x, grad)
        (want,) = torch.autograd.grad(expected, x, grad)
        torch.testing.assert_close(got, want)
