"""Scans of every kind, with NaN and infinities, against eager and the interpreter."""

from __future__ import annotations

import pytest
import torch

from fulgurite.compile import compile
from tests.fuser.support import check_fused, check_interpreted

RUNS_ON_TRITON = True

INF, NAN = float("inf"), float("nan")


def scan_along(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return (
        x.cumsum(dim),
        (x * 0.9).cumprod(dim),
        torch.logcumsumexp(x, dim),
        *torch.cummax(x, dim),
        *torch.cummin(x, dim),
        (x * 2).cumsum(dim) * 3 + 1,
    )


def scan_all_dims(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(result for x in xs for dim in range(x.dim()) for result in scan_along(x, dim))


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    special = torch.randn(9, 13)
    special[3, 4], special[5, 5], special[6, 5], special[7, 2:9] = NAN, INF, -INF, 1.0
    return [
        torch.randn(7),
        torch.randn(1),
        torch.randn(0),
        torch.randn(5, 1, 9),
        torch.randn(3, 0),
        special,
        special.t(),
        torch.randn(4, 1, 6).expand(4, 5, 6),
        torch.randn(20).as_strided((6, 5), (2, 1)),
        torch.randn(300)[17:157].view(10, 14).flip(1),
    ]


def test_shapes_strides_and_special_values() -> None:
    check_fused(scan_all_dims, *inputs())


@pytest.mark.parametrize("k", range(10))
def test_in_the_interpreter(k: int) -> None:
    check_interpreted(scan_all_dims, inputs()[k])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_floats(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check_fused(scan_all_dims, torch.randn(6, 37).to(dtype))


def test_integers_and_bools() -> None:
    torch.manual_seed(2)
    whole, small = torch.randint(-9, 9, (7, 11)), torch.randint(-9, 9, (11,), dtype=torch.int8)

    def function(a, b, c):
        sums = [t.cumsum(0) for t in (a, b, c)]
        wide = (a.cumsum(1, dtype=torch.float32), a.cumprod(1))
        return *sums, *wide, *torch.cummax(a, 1), *torch.cummin(b, 0), *torch.cummax(c, 0)

    check_fused(function, whole, small, whole[0] > 0)


def test_threads_split_few_long_rows() -> None:
    torch.manual_seed(3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        region = check_fused(
            lambda x: (x.cumsum(0), torch.logcumsumexp(x, 0), (x * 1e-3 + 1).cumprod(0) - x),
            torch.randn(100_003),
        )
    finally:
        torch.set_num_threads(before)
    assert len(region.kernels) == 1


def test_fusion_with_a_scan() -> None:
    """Elementwise ops before and after are in its kernel; readers at other indices are not."""
    torch.manual_seed(4)
    x = torch.randn(12, 10)
    assert len(check_fused(lambda x: (x.exp().cumsum(1) * 2).sigmoid() + x, x).kernels) == 1
    assert len(check_fused(lambda x: x.cumsum(1).flip(1) * 2, x).kernels) == 2
    cases = {
        "softmax": lambda x: torch.softmax(x, 1).cumsum(1),
        "suffix": lambda x: x.flip(1).cumsum(1).flip(1),
        "summed": lambda x: x.cumsum(1).sum(1) + x.cumsum(1).amax(0).sum(),
        "crossed": lambda x: (x.cumsum(0) * x.cumsum(1)).cumsum(0),
        "sliced": lambda x: x.cumsum(1)[:, 1:] - x.cumsum(1)[:, :-1],
        "viewed": lambda x: x.cumsum(1).view(-1).exp() + x.view(-1).cumsum(0),
        "split": lambda x: x.view(6, 2, 5, 2).cumsum(2).exp().view(12, 10).cumsum(0),
        "of_nothing_read": lambda x: torch.ones(10).cumsum(0) * x,
    }
    for case in cases.values():
        check_interpreted(case, x)
    check_fused(lambda x: tuple(case(x) for case in cases.values()), x)


def test_gradients() -> None:
    torch.manual_seed(5)

    def loss(x):
        best = x.cummax(1).values.sum()
        return x.cumsum(1).square().sum() + torch.logcumsumexp(x, 0).sum() + best

    x = torch.randn(6, 7, requires_grad=True)
    compile(loss, executors=["fuser", "torch"])(x).backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(loss(x), x)[0])
