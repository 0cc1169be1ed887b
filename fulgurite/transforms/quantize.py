"""FP8 training: every linear layer's forward and both backward matmuls in FP8.

In: the captured program, before autograd. Out: the same with `fp8_linear` in the place of each
`linear`; AOTAutograd then traces through it, so the functional trace shows each cast and each
matmul, forward and backward, as an op of its own.

    compiled = fulgurite.compile(model, transforms=[fp8_training("rowwise", skip=["*head*"])])

Linears inside activation checkpointing are found too: their casts are recomputed with the rest.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import fx

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.fp8_linear import check_recipe, fp8_linear
from fulgurite.trace import Trace, source_of
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.base import Transform

MULTIPLE = 16  # K and N of a linear: what float8 tensor cores take


def fp8_training(
    recipe: str = "rowwise", *, weights: str = "recompute", skip: Sequence[str] = ()
) -> Transform:
    """A transform that trains linear layers in FP8.

    `recipe` is "tensorwise", "rowwise" or "blockwise". `weights` says whether backward makes the
    weight's second cast itself ("recompute") or forward makes it and it is kept ("keep"). `skip`
    holds patterns of module paths to leave as they are; layers whose sizes are no multiple of 16
    always are.
    """
    check_recipe(recipe, weights)
    if isinstance(skip, str):
        raise ArgumentError("skip is not a list", next=f"a list of patterns: skip=[{skip!r}]")

    def change(trace: Trace) -> Trace:
        module = copy_module(trace.module)
        changed, left = rewrite(module, recipe, weights, tuple(skip))
        note = f"fp8 {recipe}: {changed} linear layers"
        if left:
            note += f", left as they are: {', '.join(left)}"
        return trace.with_module(module).with_note(note)

    return Transform(f"fp8_training({recipe!r})", "before_autograd", change)


def rewrite(
    module: fx.GraphModule, recipe: str, weights: str, skip: tuple[str, ...]
) -> tuple[int, list[str]]:
    """Replaces the linears of a graph and of the graphs in it; how many, and which were left."""
    changed, left = 0, list[str]()
    for name, inner in list(module.named_children()):
        if isinstance(inner, fx.GraphModule):
            inner = copy_module(inner)
            more, others = rewrite(inner, recipe, weights, skip)
            changed, left = changed + more, left + others
            setattr(module, name, inner)
    for node in list(module.graph.nodes):
        if not _is_linear(node):
            continue
        path = source_of(node).module or node.name
        why = _why_left(node, path, skip)
        if why:
            left.append(f"{path} ({why})")
            continue
        x, weight, bias = _arguments(node)
        with module.graph.inserting_before(node):
            made = module.graph.call_function(fp8_linear, (x, weight, bias, recipe, weights))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
        changed += 1
    return changed, left


def _is_linear(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch._C._nn.linear


def _arguments(node: fx.Node) -> tuple[fx.node.Argument, fx.node.Argument, fx.node.Argument]:
    """x, weight and bias, however they were passed."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given.get("bias")


def _why_left(node: fx.Node, path: str, skip: tuple[str, ...]) -> str:
    """The reason a layer stays as it is, or nothing."""
    if any(fnmatch.fnmatch(path, pattern) for pattern in skip):
        return "skipped"
    weight = _arguments(node)[1]
    value = (
        weight.meta.get("val", weight.meta.get("example_value"))
        if isinstance(weight, fx.Node)
        else None
    )
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return "its weight is no matrix"
    if any(size % MULTIPLE for size in value.shape):
        return f"{'×'.join(map(str, value.shape))} is no multiple of {MULTIPLE}"
    return ""
