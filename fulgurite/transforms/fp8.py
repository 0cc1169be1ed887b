"""FP8 training: the matmuls of weights in FP8, forward and backward.

In: the captured program, before autograd. Out: the same with every matmul of a weight replaced:

    linear, x @ w, matmul, mm, addmm         fp8_linear: all three GEMMs in FP8
    grouped_mm, fulgurite::grouped_gemm      fp8_grouped_mm: forward and the gradient of x in FP8

AOTAutograd traces through both, so the functional trace shows each cast and each matmul of forward and
backward as an op.

    compiled = fulgurite.compile(model, transforms=[fp8_training("rowwise", skip=["*head*"])])

Matmuls inside activation checkpointing are replaced too; their casts are recomputed with the rest. The
header of the trace and `explain()` list every matmul that stays as it is, with the reason.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm.fp8_linear import FP8_RECIPES, check_recipe, fp8_linear
from fulgurite.kernels.grouped_gemm.args import DENSE
from fulgurite.kernels.grouped_gemm.fp8_grouped import fp8_grouped_gemm, fp8_grouped_mm
from fulgurite.quant.format import WHOLE_DIM, resolve_format
from fulgurite.trace import Trace, source_of
from fulgurite.trace.cost import format_count
from fulgurite.trace.node_meta import captured_value, copy_meta
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.base import Transform

SIZE_MULTIPLE = 16  # K and N must be multiples of it for FP8 tensor cores
# ops that only reorder a weight between the parameter and the matmul
WEIGHT_VIEWS = {"t", "transpose", "permute", "swapaxes", "contiguous", "to", "mT", "T"}


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
        matmul = _find_matmul(node)
        if matmul is None:
            continue
        path = source_of(node).module or node.name
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


# ---- the forms of a matmul -------------------------------------------------------------------------


@dataclass(frozen=True)
class Matmul:
    """A matmul of the captured program.

    weight   the operand that is a weight in the usual call
    unfit    why this form is never replaced; empty if it may be
    build    adds the replacement to a graph
    """

    weight: Any
    build: Callable[[fx.Graph, str, str], fx.Node]
    unfit: str = ""


def _find_matmul(node: fx.Node) -> Matmul | None:
    """The matmul that a node computes, None for other ops."""
    reader = MATMULS.get(node.target if node.op in ("call_function", "call_method") else None)
    return None if reader is None else reader(node)


def _read_linear(node: fx.Node) -> Matmul:
    named = _named_arguments(node, "input", "weight", "bias")
    arguments = (named["input"], named["weight"], named.get("bias"))
    return Matmul(
        named["weight"],
        lambda graph, recipe, weights: graph.call_function(
            fp8_linear, (*arguments, recipe, weights)
        ),
    )


def _read_matmul(node: fx.Node) -> Matmul:
    left, right = list(_named_arguments(node, "input", "other").values())[:2]
    return _matmul_with_bias(left, right, None)


def _read_addmm(node: fx.Node) -> Matmul:
    named = _named_arguments(node, "input", "mat1", "mat2")
    bias, value = named["input"], _value_of(named["input"])
    matmul = _matmul_with_bias(named["mat1"], named["mat2"], bias)
    is_bias = isinstance(value, Tensor) and value.dim() == 1
    if not is_bias or named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return Matmul(matmul.weight, matmul.build, "addmm that does more than add a bias")
    return matmul


def _matmul_with_bias(left: Any, right: Any, bias: Any) -> Matmul:
    """left @ right + bias, right [K, N]."""

    def build(graph: fx.Graph, recipe: str, weights: str) -> fx.Node:
        return graph.call_function(run_fp8_matmul, (left, right, bias, recipe, weights))

    value, x = _value_of(right), _value_of(left)
    unfit = ""
    if not isinstance(value, Tensor) or value.dim() != 2:
        unfit = "a batched matmul"
    elif not isinstance(x, Tensor) or x.dim() < 2:
        unfit = "a matrix-vector product"
    elif not _is_weight(right):
        unfit = "its right operand is not a weight"
    return Matmul(right, build, unfit)


def run_fp8_matmul(
    left: Tensor, right: Tensor, bias: Tensor | None, recipe: str, weights: str
) -> Tensor:
    return fp8_linear(left, right.t(), bias, recipe, weights)


def _read_batched(node: fx.Node) -> Matmul:
    matmul = _matmul_with_bias(node.args[-2], node.args[-1], None)
    return Matmul(matmul.weight, matmul.build, "a batched matmul")


def _read_grouped_mm(node: fx.Node) -> Matmul:
    named = _named_arguments(node, "mat_a", "mat_b")
    named = {"mat_a": named.pop("self", None), "mat_b": named.pop("mat2", None)} | named
    x, weight, offsets = named["mat_a"], named["mat_b"], named.get("offs")

    def build(graph: fx.Graph, recipe: str, weights: str) -> fx.Node:
        return graph.call_function(run_fp8_grouped_mm, (x, weight, offsets, recipe))

    value = _value_of(weight)
    is_experts = isinstance(value, Tensor) and value.dim() == 3 and _value_of(x).dim() == 2
    is_plain = offsets is not None and named.get("bias") is None and named.get("out_dtype") is None
    return Matmul(weight, build, "" if is_experts and is_plain else "not rows times experts")


def run_fp8_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, recipe: str) -> Tensor:
    return fp8_grouped_mm(x, weight.transpose(1, 2), offsets, recipe)


def _read_grouped_gemm(node: fx.Node) -> Matmul:
    x, row_indices, positions, row_weights, offsets, data, _, format, bias, _, *gate = node.args

    def build(graph: fx.Graph, recipe: str, weights: str) -> fx.Node:
        arguments = (
            x,
            row_indices,
            positions,
            row_weights,
            offsets,
            data,
            bias,
            tuple(gate),
            recipe,
        )
        return graph.call_function(run_fp8_grouped_gemm, arguments)

    return Matmul(data, build, "" if format == DENSE else f"its weight is {format}")


def run_fp8_grouped_gemm(
    x: Tensor,
    row_indices: Tensor | None,
    positions: Tensor | None,
    row_weights: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: tuple[str, float, float],
    recipe: str,
) -> Tensor:
    return fp8_grouped_gemm(
        x,
        row_indices,
        positions,
        row_weights,
        offsets,
        weight,
        bias,
        GatedActivation(*gate),
        recipe,
    )


MATMULS: dict[Any, Callable[[fx.Node], Matmul]] = {
    torch._C._nn.linear: _read_linear,
    operator.matmul: _read_matmul,
    operator.imatmul: _read_matmul,
    torch.matmul: _read_matmul,
    torch.mm: _read_matmul,
    "matmul": _read_matmul,
    "mm": _read_matmul,
    "__matmul__": _read_matmul,
    torch.addmm: _read_addmm,
    "addmm": _read_addmm,
    torch.bmm: _read_batched,
    torch.baddbmm: _read_batched,
    "bmm": _read_batched,
    "baddbmm": _read_batched,
    F.grouped_mm: _read_grouped_mm,
    torch._grouped_mm: _read_grouped_mm,
    torch.ops.fulgurite.grouped_gemm.default: _read_grouped_gemm,
}


def _named_arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments by name, whether positional or keyword ones."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _value_of(argument: Any) -> Any:
    return captured_value(argument) if isinstance(argument, fx.Node) else None


def _is_weight(argument: Any) -> bool:
    """Whether a value is an input of the graph (a parameter), perhaps transposed or cast."""
    while isinstance(argument, fx.Node) and argument.op in ("call_function", "call_method"):
        name = argument.target if isinstance(argument.target, str) else argument.target.__name__
        if argument.target is getattr:
            name = str(argument.args[1])
        if name not in WEIGHT_VIEWS:
            return False
        argument = argument.args[0]
    is_input = isinstance(argument, fx.Node) and argument.op in ("placeholder", "get_attr")
    return is_input and isinstance(_value_of(argument), torch.nn.Parameter)


# ---- which of them stay ----------------------------------------------------------------------------


def _skip_reason(matmul: Matmul, path: str, recipe: str, skip: tuple[str, ...]) -> str:
    """Why a matmul stays unchanged; empty if it is replaced."""
    if any(fnmatch.fnmatch(path, pattern) for pattern in skip):
        return "skipped"
    if matmul.unfit:
        return matmul.unfit
    value = _value_of(matmul.weight)
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
