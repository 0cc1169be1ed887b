"""Reductions of a row and of blocks of its columns in one kernel: norms with quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.quantize.decompositions import decompose_quantize
from fulgurite.quant import quantize, resolve_format
from tests.fuser import support
from tests.fuser.support import check_fused, lower_for_target, to_target

RUNS_ON_TRITON = True
ONE_KERNEL = ["fp8_e4m3_row", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "int8"]


def exact_norm_inputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows whose RMS is a power of two, so that a norm without epsilon is exact in any order."""
    torch.manual_seed(rows + columns)
    signs = torch.randint(0, 2, (rows, columns)) * 2.0 - 1.0
    weight = torch.randn(columns) * torch.exp(torch.randn(columns) * 3)
    return signs * 2.0 ** torch.randint(-4, 5, (rows, 1)), weight


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True)) * weight


def relu_gate(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(x) * weight


def cast(x: Tensor, format: str) -> tuple[Tensor, ...]:
    """Codes and scales; e8m0 scales as bytes, because GPUs leave views of them to torch."""
    found = decompose_quantize(x, resolve_format(format))
    return tuple(t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for t in found)


def run(function: Callable[..., Any], *arguments: Tensor) -> tuple[Any, list[Tensor]]:
    with support.target_device():
        given = tuple(map(to_target, arguments))
        region = lower_for_target(function, given)
        return region, [t.cpu() for t in region(*given)]


def assert_same_codes(actual: list[Tensor], expected: Any) -> None:
    wanted = [expected.packed, *expected.scales.values()]
    for ours, theirs in zip(actual, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype.itemsize == theirs.dtype.itemsize
        assert torch.equal(
            ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
        )


@pytest.mark.covering
@pytest.mark.parametrize("shape", [(9, 256), (3, 384), (33, 1024)], ids=str)
@pytest.mark.parametrize("format", [*ONE_KERNEL, "nvfp4"])
@pytest.mark.parametrize("producer", [rms_norm, relu_gate])
def test_a_cast_shares_the_kernel_of_what_comes_before_it(producer, format, shape):
    """Bit for bit the codes of `fulgurite.quant`. NVFP4 needs the amax of the whole matrix first."""
    x, weight = exact_norm_inputs(*shape)
    region, actual = run(lambda x, weight: cast(producer(x, weight), format), x, weight)
    assert_same_codes(actual, quantize(producer(x, weight), format))
    names = [kernel.name for kernel in region.kernels if "combine" not in kernel.name]
    if format in ONE_KERNEL:
        assert len(names) == 1
    else:
        assert len(names) <= 3  # on GPUs, the partial amax of each program is combined


def test_a_residual_and_a_norm_in_front_of_a_cast():
    def function(x, residual, weight):
        total = x + residual
        return (total, *cast(rms_norm(total, weight), "mxfp8_e4m3"))

    x, weight = exact_norm_inputs(17, 512)
    region, (total, *codes) = run(function, x / 2, x / 2, weight)
    assert torch.equal(total, x)
    assert_same_codes(codes, quantize(rms_norm(x, weight), "mxfp8_e4m3"))
    assert len(region.kernels) == 1


def block_softmax_of_a_norm(x: Tensor) -> Tensor:
    y = F.layer_norm(x, (x.shape[-1],))
    return y.unflatten(-1, (-1, 16)).softmax(-1).flatten(-2)


def row_sum_of_block_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 8)).amax(-1)
    return blocks, blocks.sum(-1)


def three_levels(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    pairs = x.unflatten(-1, (-1, 4, 2))
    scale = pairs.abs().amax((-1, -2), keepdim=True) + 1
    return (pairs / scale).sum(-1)


@pytest.mark.covering
@pytest.mark.parametrize("columns", [16, 48, 240, 1008])
@pytest.mark.parametrize(
    "function", [block_softmax_of_a_norm, row_sum_of_block_maxima, three_levels]
)
def test_other_nested_reductions(function, columns):
    torch.manual_seed(columns)
    x = torch.randn(35, columns)
    x[3, 5], x[4, 6], x[5, 7] = float("nan"), float("inf"), -0.0
    check_fused(function, x)
    check_fused(function, x.to(torch.bfloat16))
    check_fused(function, torch.randn(columns, 35).t())


def test_long_blocks_and_rows_have_kernels_of_their_own():
    """A reduction of much of a row, and a row that no program can hold, are not nested."""
    region = check_fused(lambda x: (x - x.mean(-1, keepdim=True)).view(4, 2, 1024).amax(-1),
                         torch.randn(4, 2048))  # fmt: skip
    assert len(region.kernels) == 2
    if support.TARGET != "cpp":
        x = torch.randn(4, 16384)
        region = check_fused(lambda x: (x - x.mean(-1, True)).view(4, 512, 32).amax(-1), x)
        assert len(region.kernels) == 2
