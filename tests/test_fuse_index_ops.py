"""`fuse` takes the ops that index, order and count, with static and with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.fuse import fuse


def make(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    index = torch.randint(0, 9, (rows,), generator=generator)
    return index, torch.randn(9, 5, generator=generator), torch.randn(rows, 5, generator=generator)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "linspace": lambda i, x, y: x + torch.linspace(-1, x.shape[0], 5),
    "one_hot": lambda i, x, y: F.one_hot(i, 9) * 2,
    "one_hot of a matrix": lambda i, x, y: F.one_hot(i[:, None] % 4, 4).float(),
    "bincount": lambda i, x, y: torch.bincount(i) * 2,
    "bincount with weights": lambda i, x, y: torch.bincount(i, y[:, 0], minlength=12).cumsum(0),
    "embedding_bag": lambda i, x, y: F.embedding_bag(i, x, torch.arange(0, 6, 2)) + 1,
    "index_put": lambda i, x, y: x.index_put((i,), y * 2, accumulate=True),
    "index_put of pairs": lambda i, x, y: x.index_put(
        (i[:, None], i % 5), y[0, 0], accumulate=True
    ),
    "index_put of a row": lambda i, x, y: x.index_put((i[: i.shape[0] // 2],), y[0], True),
    "index_reduce": lambda i, x, y: x.index_reduce(0, i, y, "amax") + 1,
    "index_reduce mean": lambda i, x, y: x.index_reduce(0, i, y, "mean", include_self=False),
    "area": lambda i, x, y: F.interpolate(y[None], (3,), mode="area") * 2,
    "area of images": lambda i, x, y: F.interpolate(y[None, None], (4, 3), mode="area") * 2,
    "searchsorted": lambda i, x, y: torch.searchsorted(x[0].sort().values, y[:, 0]) + 1,
    "histc": lambda i, x, y: torch.histc(x, 4, -1, 1) * 2,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_every_size_is_right(name: str, dynamic: bool) -> None:
    fused = fuse(PROGRAMS[name], dynamic=dynamic)
    for rows in (40, 13, 7):
        expected, found = PROGRAMS[name](*make(rows)), fused(*make(rows))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
    assert fused.kernels


def test_sizes_that_no_longer_broadcast_are_an_error() -> None:
    """The FakeTensor rule of `index_put` does not compare them: a guard does."""
    fused = fuse(lambda x, i, row: x.index_put((i,), row, accumulate=True), dynamic=True)
    x, index = torch.zeros(4, 6), torch.tensor([1, 1, 2])
    assert fused(x, index, torch.ones(6)).sum() == 18
    assert fused(torch.zeros(4, 5), index, torch.ones(5)).sum() == 15
    with pytest.raises((RuntimeError, fulgurite.errors.FusionError)):
        fused(x, index, torch.ones(5))


@pytest.mark.parametrize("mode", ["area", "bilinear", "nearest"])
def test_gradients_of_interpolation(mode: str) -> None:
    x = torch.randn(2, 3, 10, 11, requires_grad=True)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, (4, 7), mode=mode) * 2

    gradients = [
        torch.autograd.grad(f(x).square().sum(), x)[0] for f in (scaled, fuse(scaled), fuse(scaled))
    ]
    torch.testing.assert_close(gradients[1], gradients[0])


BINS = [
    torch.tensor([3, 0, 3, 1]),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([7], dtype=torch.uint8),
    torch.tensor([2, 9], dtype=torch.int32),
]


@pytest.mark.parametrize("minlength", [0, 5])
@pytest.mark.parametrize("values", BINS, ids=str)
def test_bins_of_any_number(values: torch.Tensor, minlength: int) -> None:
    def count(x: torch.Tensor) -> torch.Tensor:
        return torch.bincount(x, minlength=minlength)

    found = fuse(count)(values)
    assert torch.equal(found, count(values)) and found.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.bfloat16])
def test_weighted_bins_have_eager_dtypes(dtype: torch.dtype) -> None:
    index, _, values = make(30)
    weights = (values[:, 0] * 4).to(dtype)
    found, expected = fuse(torch.bincount)(index, weights), torch.bincount(index, weights)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


ERRORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "negative class": (lambda i: F.one_hot(i, 4) * 2, (torch.tensor([1, -1]),)),
    "large class": (lambda i: F.one_hot(i, 4) * 2, (torch.tensor([1, 4]),)),
    "negative bin": (lambda i: torch.bincount(i) * 2, (torch.tensor([1, -1]),)),
    "matrix": (lambda i: torch.bincount(i) * 2, (torch.ones(2, 2, dtype=torch.int64),)),
    "floats": (lambda i: torch.bincount(i) * 2, (torch.ones(2),)),
    "weights": (torch.bincount, (torch.ones(2, dtype=torch.int64), torch.ones(3))),
    "minlength": (lambda i: torch.bincount(i, minlength=-1), (torch.tensor([1]),)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_eager(name: str) -> None:
    function, inputs = ERRORS[name]
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        function(*inputs)
    with pytest.raises((RuntimeError, NotImplementedError)) as found:
        fulgurite.compile(function, fullgraph=True)(*inputs)
    assert str(expected.value).splitlines()[0] in str(found.value)
