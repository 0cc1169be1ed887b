"""FP8 training: the forward and both backward matmuls of every linear layer in FP8.

In: the captured program, before autograd. Out: the same with each `linear` replaced by `fp8_linear`.
AOTAutograd traces through it, so the functional trace shows each cast and each matmul of forward and
backward as an op.

    compiled = fulgurite.compile(model, transforms=[fp8_training("rowwise", skip=["*head*"])])

Linears inside activation checkpointing are replaced too; their casts are recomputed with the rest.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import fx

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.fp8_linear import check_recipe, fp8_linear
from fulgurite.trace import Trace, source_of
from fulgurite.trace.node_meta import captured_value, copy_meta
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.base import Transform

SIZE_MULTIPLE = 16  # K and N must be multiples of it for FP8 tensor cores


def fp8_training(
    recipe: str = "rowwise", *, weights: str = "recompute", skip: Sequence[str] = ()
) -> Transform:
    """A transform that trains linear layers in FP8.

    recipe    granularity of the scales: "tensorwise", "rowwise" or "blockwise"
    weights   the second cast of the weight: done in backward ("recompute"), or in forward and saved
              for backward ("keep")
    skip      patterns of module paths that stay unchanged; layers whose sizes are not multiples of 16
              always do
    """
    check_recipe(recipe, weights)
    if isinstance(skip, str):
        raise ArgumentError("skip is not a list", next=f"a list of patterns: skip=[{skip!r}]")

    def change(trace: Trace) -> Trace:
        module = copy_module(trace.module)
        replaced, skipped = replace_linears(module, recipe, weights, tuple(skip))
        note = f"fp8 {recipe}: {replaced} linear layers"
        if skipped:
            note += f", unchanged: {', '.join(skipped)}"
        return trace.with_module(module).with_note(note)

    return Transform(f"fp8_training({recipe!r})", "before_autograd", change)


def replace_linears(
    module: fx.GraphModule, recipe: str, weights: str, skip: tuple[str, ...]
) -> tuple[int, list[str]]:
    """Replace the linears of a graph and of nested graphs. Returns their number, and those skipped."""
    replaced, skipped = 0, list[str]()
    for name, inner in list(module.named_children()):
        if isinstance(inner, fx.GraphModule):
            inner = copy_module(inner)
            inner_replaced, inner_skipped = replace_linears(inner, recipe, weights, skip)
            replaced, skipped = replaced + inner_replaced, skipped + inner_skipped
            setattr(module, name, inner)
    for node in list(module.graph.nodes):
        if not _is_linear(node):
            continue
        path = source_of(node).module or node.name
        reason = _skip_reason(node, path, skip)
        if reason:
            skipped.append(f"{path} ({reason})")
            continue
        x, weight, bias = _linear_arguments(node)
        with module.graph.inserting_before(node):
            fp8 = module.graph.call_function(fp8_linear, (x, weight, bias, recipe, weights))
        copy_meta(node, fp8)
        node.replace_all_uses_with(fp8)
        module.graph.erase_node(node)
        replaced += 1
    return replaced, skipped


def _is_linear(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch._C._nn.linear


def _linear_arguments(node: fx.Node) -> tuple[fx.node.Argument, fx.node.Argument, fx.node.Argument]:
    """x, weight and bias, whether positional or keyword arguments."""
    arguments = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return arguments["input"], arguments["weight"], arguments.get("bias")


def _skip_reason(node: fx.Node, path: str, skip: tuple[str, ...]) -> str:
    """Why a layer stays unchanged; empty if it is replaced."""
    if any(fnmatch.fnmatch(path, pattern) for pattern in skip):
        return "skipped"
    weight = _linear_arguments(node)[1]
    value = captured_value(weight) if isinstance(weight, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return "its weight is not a matrix"
    if any(size % SIZE_MULTIPLE for size in value.shape):
        return f"{'×'.join(map(str, value.shape))} is not a multiple of {SIZE_MULTIPLE}"
    return ""
