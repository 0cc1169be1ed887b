"""Number formats of the matmuls: `config.precision` in, transforms for `fulgurite.compile` out.

    fp8_tensorwise, fp8_rowwise, fp8_blockwise   `fp8_training`: linears and experts in FP8
    mxfp8                                        the same; emulated where the hardware lacks it
    nvfp4                                        `nvfp4.py`, always emulated

A matmul stays in the model's dtype if its module matches `skip`, if its sizes don't fit, or if it is
inside another op (attention scores, the LM head of the fused cross entropy). `list_unchanged` names
every one of them and why; so do the header of the trace and `explain()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm.fp8_linear import fp8_linear
from fulgurite.kernels.grouped_gemm.fp8_grouped import apply_grouped
from fulgurite.trace import Trace
from fulgurite.trace.cost import format_count
from fulgurite.trace.trace import copy_module
from fulgurite.train.config import PrecisionSection
from fulgurite.train.nvfp4 import nvfp4_grouped_mm, nvfp4_linear
from fulgurite.transforms import fp8, fp8_matmuls
from fulgurite.transforms.base import Transform

# config.precision.matmul -> recipe of `fp8_training`
FP8_RECIPES = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_blockwise": "blockwise",
    "mxfp8": "mxfp8",
}
NVFP4 = "nvfp4"
FORMATS = ("none", *FP8_RECIPES, NVFP4)


def precision_transforms(
    section: PrecisionSection, device: torch.device | str = "cpu"
) -> list[Transform]:
    """The transforms of a run. `device` may emulate a format that it has no matmul for."""
    if section.matmul not in FORMATS:
        raise ArgumentError(
            f"precision.matmul={section.matmul!r}", next=f"use one of {', '.join(FORMATS)}"
        )
    if section.matmul == "none":
        return []
    if section.matmul == NVFP4:
        return [nvfp4_training(section.skip)]
    recipe = FP8_RECIPES[section.matmul]
    return [fp8.fp8_training(recipe, skip=section.skip)]


def nvfp4_training(skip: tuple[str, ...] = ()) -> Transform:
    """A transform that trains linear layers and experts with emulated NVFP4."""

    def change(trace: Trace) -> Trace:
        module = copy_module(trace.module)
        replaced, skipped = fp8.replace_matmuls(module, "tensorwise", "recompute", tuple(skip))
        _use_nvfp4(module)
        note = f"nvfp4, emulated: {format_count(replaced, 'matmul')}"
        if skipped:
            note += f", unchanged: {', '.join(skipped)}"
        return trace.with_module(module).with_note(note)

    return Transform("nvfp4_training()", "before_autograd", change)


def list_unchanged(compiled: Any) -> list[str]:
    """Every matmul of a compiled module that stays in the model's dtype, with the reason."""
    result: list[str] = []
    for trace in compiled.history:
        for note in trace.notes:
            _, marker, names = note.partition("unchanged: ")
            if marker:
                result += [name for name in names.split(", ") if name not in result]
    return result


# ---- FP8 nodes -> NVFP4 --------------------------------------------------------------------------


def _use_nvfp4(module: fx.GraphModule) -> None:
    """Replace the functions that `replace_matmuls` put in, in nested graphs too."""
    for _, inner in module.named_children():
        if isinstance(inner, fx.GraphModule):
            _use_nvfp4(inner)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in NVFP4_FUNCTIONS:
            function, num_arguments = NVFP4_FUNCTIONS[node.target]
            node.target, node.args = function, node.args[:num_arguments]
    module.recompile()


def _matmul(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return nvfp4_linear(left, right.t(), bias)


def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return nvfp4_grouped_mm(x, weight.transpose(1, 2), offsets)


def _grouped_gemm(
    x: Tensor,
    row_indices: Tensor | None,
    positions: Tensor | None,
    row_weights: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: tuple[str, float, float],
) -> Tensor:
    def multiply(rows: Tensor) -> Tensor:
        return nvfp4_grouped_mm(rows, weight, offsets)

    return apply_grouped(
        multiply, x, row_indices, positions, row_weights, offsets, bias, GatedActivation(*gate)
    )


# function of FP8 -> ours, and how many of its arguments are not about the recipe
NVFP4_FUNCTIONS: dict[Any, tuple[Any, int]] = {
    fp8_linear: (nvfp4_linear, 3),
    fp8_matmuls.run_fp8_matmul: (_matmul, 3),
    fp8_matmuls.run_fp8_grouped_mm: (_grouped_mm, 3),
    fp8_matmuls.run_fp8_grouped_gemm: (_grouped_gemm, 8),
}
