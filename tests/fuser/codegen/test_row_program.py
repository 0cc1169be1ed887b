"""Row programs as Triton: kernels that compile for a Hopper GPU within its shared memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fulgurite.fuser.codegen.triton.kernel import TritonKernelSource, write_kernels
from fulgurite.fuser.codegen.triton.module import write_module
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.lowering import INTERPRETER_DEVICE
from fulgurite.fuser.runtime import compile_triton
from fulgurite.fuser.runtime.reduction_layouts import check_reductions
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, make_row_limit
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from tests.fuser.support import trace

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="compiles with Triton",
)
MAX_SHARED_BYTES = 227 << 10  # of a program on an H200


def write(function: Callable[..., Any], *arguments: torch.Tensor) -> list[TritonKernelSource]:
    """The Triton kernels of a function, as for an H200."""
    region = split_axes(lower_graph(trace(function, arguments)))
    segments = segment_region(region, make_row_limit(INTERPRETER_DEVICE))
    nests = [build_loop_nest(region, segment) for segment in segments]
    schedules = [choose_gpu_schedule(nest, INTERPRETER_DEVICE) for nest in nests]
    return [s for k, each in enumerate(schedules) for s in write_kernels(f"k{k}", each, False)]


def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = logits.softmax(-1).topk(8, -1)
    return weights / weights.sum(-1, keepdim=True), experts


@needs_triton
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (route, torch.randn(64, 256)),
        (lambda x: x.topk(8), torch.randn(8, 4096)),
        (lambda x: x.sort(dim=0, descending=True), torch.randn(60, 40).bfloat16()),
        (lambda x: x.nanmedian(-1), torch.randn(8, 60)),
    ],
    ids=["router", "topk", "sort", "nanmedian"],
)
def test_kernels_compile_for_hopper(function: Callable[..., Any], x: torch.Tensor) -> None:
    from triton.backends.compiler import GPUTarget

    (source,) = write(function, x)
    module = compile_triton.load_module(write_module([source]))
    target = GPUTarget("cuda", 90, 32)
    kernel = compile_triton.compile_for_target(getattr(module, source.name), source, 0, target)
    assert kernel.metadata.shared <= MAX_SHARED_BYTES


def quantile(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`x.quantile(q, -1)`; NaN if there is one."""
    ordered, last = x.sort()[0], x.shape[-1] - 1
    rank = (q * last).expand(*x.shape[:-1], 1).masked_fill(ordered.isnan().any(-1, True), last)
    below, above = ordered.gather(-1, rank.long()), ordered.gather(-1, rank.ceil().long())
    return below.lerp(above, rank - rank.long())


@needs_triton
@pytest.mark.parametrize("shape", [(3, 5, 2), (2, 3, 3)])
def test_reductions_are_over_consecutive_lanes(shape: tuple[int, ...]) -> None:
    """Triton 3.6 computes wrong sums of small blocks that were reshaped."""
    from triton.backends.compiler import GPUTarget

    def quantiles(x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantile(torch.logit(x, 0).flatten(), q), quantile(torch.logit(x, 0), q)

    (source,) = write(quantiles, torch.rand(shape), torch.ones(()))
    module = compile_triton.load_module(write_module([source]))
    function, target = getattr(module, source.name), GPUTarget("cuda", 90, 32)
    kernel = compile_triton.compile_for_target(function, source, compile_triton.ALIGNED, target)
    check_reductions(kernel.asm["ttgir"])


def test_few_ranks_need_no_sort() -> None:
    (source,) = write(lambda x: x.topk(8), torch.randn(8, 4096))
    assert "smallest_keys" in source.functions and "tl.sort" not in source.text


def test_sorted_values_are_loaded_from_memory() -> None:
    (source,) = write(lambda x: x.sort(-1), torch.randn(8, 100))
    assert "tl.sort" in source.text and "select_along_rows" not in source.functions
