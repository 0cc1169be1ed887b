"""FP8 training: the matmuls of weights in FP8, forward and backward.

In: the captured program, before autograd. Out: the same with every matmul of a weight replaced:

    linear, x @ w, matmul, mm, addmm,        fp8_linear: all three GEMMs in FP8
    einsum("..k,kn->..n")
    grouped_mm, fulgurite::grouped_gemm      fp8_grouped_mm: forward and the gradient of x in FP8

AOTAutograd traces through both, so the functional trace shows each cast and each matmul of forward and
backward as an op.

    compiled = fulgurite.compile(model, transforms=[fp8_training("rowwise", skip=["*head*"])])

Matmuls inside activation checkpointing are replaced too; their casts are recomputed with the rest. The
header of the trace and `explain()` list every matmul that stays as it is, with the reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.fp8_linear import FP8_RECIPES, check_recipe
from fulgurite.quant.format import WHOLE_DIM, resolve_format
from fulgurite.trace import Trace, source_of
from fulgurite.trace.cost import format_count
from fulgurite.trace.node_meta import copy_meta
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.base import Transform
from fulgurite.transforms.fp8_matmuls import Matmul, find_matmul, value_of

SIZE_MULTIPLE = 16  # K and N must be multiples of it for FP8 tensor cores


def fp8_training(
    recipe: str = "rowwise", *, weights: str = "recompute", skip: Sequence[str] = ()
) -> Transform:
    """A transform that trains linear layers and experts in FP8.

    recipe    granularity of the scales: "tensorwise", "rowwise", "blockwise" or "mxfp8"
    weights   the second cast of a linear's weight: done in backward ("recompute"), or in forward and
              saved for backward ("keep")
    skip      patterns of module paths that stay unchanged; matmuls whose sizes are not multiples of
              16 (of 32 with mxfp8) always do
    """
    check_recipe(recipe, weights)
    if isinstance(skip, str):
        raise ArgumentError("skip is not a list", next=f"a list of patterns: skip=[{skip!r}]")

    def change(trace: Trace) -> Trace:
        module = copy_module(trace.module)
        replaced, skipped = replace_matmuls(module, recipe, weights, tuple(skip))
        note = f"fp8 {recipe}: {format_count(replaced, 'matmul')}"
        if skipped:
            note += f", unchanged: {', '.join(skipped)}"
        return trace.with_module(module).with_note(note)

    return Transform(f"fp8_training({recipe!r})", "before_autograd", change)


def replace_matmuls(
    module: fx.GraphModule, recipe: str, weights: str, skip: tuple[str, ...]
) -> tuple[int, list[str]]:
    """Replace the matmuls of a graph and of nested graphs. Returns their number, and those skipped."""
    replaced, skipped = 0, list[str]()
    for name, inner in list(module.named_children()):
        if isinstance(inner, fx.GraphModule):
            inner = copy_module(inner)
            inner_replaced, inner_skipped = replace_matmuls(inner, recipe, weights, skip)
            replaced, skipped = replaced + inner_replaced, skipped + inner_skipped
            setattr(module, name, inner)
    for node in list(module.graph.nodes):
        matmul = find_matmul(node)
        if matmul is None:
            continue
        path = _name_of(node)
        reason = _skip_reason(matmul, path, recipe, skip)
        if reason:
            skipped.append(f"{path} ({reason})")
            continue
        with module.graph.inserting_before(node):
            fp8 = matmul.build(module.graph, recipe, weights)
        copy_meta(node, fp8)
        node.replace_all_uses_with(fp8)
        module.graph.erase_node(node)
        replaced += 1
    return replaced, skipped


def _name_of(node: fx.Node) -> str:
    """The module, or the line, that a matmul is in; its node where neither is known."""
    source = source_of(node)
    return source.module or source.location or node.name


# ---- which of them stay ----------------------------------------------------------------------------


def _skip_reason(matmul: Matmul, path: str, recipe: str, skip: tuple[str, ...]) -> str:
    """Why a matmul stays unchanged; empty if it is replaced."""
    if any(fnmatch.fnmatch(path, pattern) for pattern in skip):
        return "skipped"
    if matmul.unfit:
        return matmul.unfit
    value = value_of(matmul.weight)
    if not isinstance(value, Tensor) or value.dim() not in (2, 3):
        return "its weight is not a matrix"
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {str(value.dtype).removeprefix('torch.')}"
    multiple = _size_multiple(recipe)
    if any(size % multiple for size in value.shape[-2:]):
        return f"{'×'.join(map(str, value.shape))} is not a multiple of {multiple}"
    return ""


def _size_multiple(recipe: str) -> int:
    """What K and N must be multiples of: tensor cores', and whole blocks of scales."""
    entry = resolve_format(FP8_RECIPES[recipe].weight)
    has_whole_blocks = entry.block[1] != WHOLE_DIM and not entry.allows_partial_blocks
    return max(SIZE_MULTIPLE, entry.block[1]) if has_whole_blocks else SIZE_MULTIPLE
