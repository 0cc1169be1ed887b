"""Reductions and what runs across them in memory are kernels of their own on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite
from fulgurite.device import cpu_info
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.schedule.cpu.choose import choose_cpu_schedule
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from tests.fuser.support import trace

B, C, S = 3, 96, 200


def norm(x: Tensor) -> Tensor:
    """Each row has mean 0 and variance 1."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)


def copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def softmax(x: Tensor) -> Tensor:
    exponentials = (x - x.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


# name → function, sizes of its inputs, kinds of its kernels
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], list[str]]] = {
    "loads across the rows": (
        lambda x: copy(norm(x.transpose(1, 2))),
        [(B, C, S)],
        ["columns", "transpose"],
    ),
    "result across the rows": (
        lambda x: copy(norm(x).transpose(1, 2)),
        [(B, S, C)],
        ["rows", "transpose"],
    ),
    "softmax across the rows": (
        lambda x: copy(softmax(x.transpose(1, 2))),
        [(B, C, S)],
        ["columns", "transpose"],
    ),
    "within the body, groups of channels": (
        lambda x: norm(copy(x.transpose(1, 2)).view(B, 4, -1)).view(B, C, S),
        [(B, S, C)],
        ["rows", "transpose"],
    ),
    "one of two loads": (
        lambda x, y: norm(copy(x.transpose(1, 2) + y)),
        [(B, C, S), (B, S, C)],
        ["transpose", "rows"],
    ),
    "a constant of each row, read across the rows": (
        lambda x: copy((norm(x) * torch.arange(B * S).view(-1, 1)).t()),
        [(B * S, C)],
        ["rows", "transpose"],
    ),
    "all along the rows": (norm, [(B, S, C)], ["rows"]),
    "all across the rows": (
        lambda x: norm(x.transpose(1, 2)).transpose(1, 2),
        [(B, C, S)],
        ["columns"],
    ),
    "small": (lambda x: copy(norm(x).transpose(1, 2)), [(2, 16, 24)], ["columns"]),
}


def schedule(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The kinds of the kernels."""
    region = split_axes(lower_graph(trace(function, inputs)))
    kinds = []
    for segment in segment_region(region, cpu_info().l2_cache_bytes):
        nest = build_loop_nest(region, segment)
        assert isinstance(nest, LoopNest)
        kinds.append(choose_cpu_schedule(nest, cpu_info()).kind)
    return kinds


def make_inputs(sizes: list[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("name", CASES)
def test_each_kernel_has_contiguous_accesses(name: str) -> None:
    function, sizes, kinds = CASES[name]
    assert schedule(function, *make_inputs(sizes)) == kinds


@pytest.mark.parametrize("name", CASES)
def test_split_kernels_equal_eager(name: str) -> None:
    function, sizes, _ = CASES[name]
    inputs = make_inputs(sizes)
    exact = function(*(x.double() for x in inputs))
    eager = function(*inputs)
    actual = fulgurite.compile(function)(*inputs)
    assert actual.stride() == eager.stride()
    bound = 2 * (eager.double() - exact).abs().max()
    assert (actual.double() - exact).abs().max() <= bound + 1e-6


def test_other_results_stay_with_the_reduction() -> None:
    def norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = norm(x)
        return y, copy(y.transpose(1, 2)), x.square().sum(-1)

    (x,) = make_inputs([(B, S, C)])
    for actual, expected in zip(fulgurite.compile(norms)(x), norms(x), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_recomputed_value_is_computed_again_by_the_split_kernel() -> None:
    def scaled_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.exp()
        scale = weight * 2  # in the kernel of the sum first, then in that of the norm
        return weight, copy((norm(x * weight.sum()) * scale[:, None]).t())

    inputs = make_inputs([(B * S, C), (B * S,)])
    assert schedule(scaled_norm, *inputs)[-2:] == ["rows", "transpose"]
    torch.testing.assert_close(
        fulgurite.compile(scaled_norm)(*inputs), scaled_norm(*inputs), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("size", [24, 512])
def test_a_normalized_cat_is_stored_along_its_rows(size: int) -> None:
    """The parts of a cat have axes of their own; zeros of each row are no value in memory."""

    def add_column(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([x * 2, x.new_zeros(len(x), 1)], 1)
        return y, y.logsumexp(1)

    (x,) = make_inputs([(size, size)])
    assert schedule(add_column, x) == ["rows"]
    torch.testing.assert_close(fulgurite.compile(add_column)(x), add_column(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_of_a_norm_across_channels(dynamic: bool) -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        y = F.layer_norm(x.transpose(1, 2), (C,), weight)
        return (F.gelu(y) * y.detach().sigmoid()).transpose(1, 2).square().sum()

    gradients = []
    for run in (loss, fulgurite.compile(loss, dynamic=dynamic)):
        inputs = [x.requires_grad_() for x in make_inputs([(B, C, S), (C,)])]
        run(*inputs).backward()
        gradients.append([x.grad for x in inputs])
    torch.testing.assert_close(gradients[1], gradients[0], atol=2e-3, rtol=1e-3)
