"""The forms of a matmul in a captured program, and their FP8 replacements.

In: a node of the graph before autograd. Out: a `Matmul`, which builds the replacement or says why there
is none; None for other ops. `fp8.py` decides which are replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm.fp8_linear import fp8_linear
from fulgurite.kernels.grouped_gemm.args import DENSE
from fulgurite.kernels.grouped_gemm.fp8_grouped import fp8_grouped_gemm, fp8_grouped_mm
from fulgurite.trace.node_meta import captured_value

# ops that only reorder a weight between the parameter and the matmul
WEIGHT_VIEWS = {"t", "transpose", "permute", "swapaxes", "contiguous", "to", "mT", "T"}
# ops with a matmul inside, by a part of their name
FUSED_MATMULS = {
    "linear_cross_entropy": "the LM head in the fused cross entropy",
    "scaled_dot_product_attention": "attention scores and values",
    "dense_linear": "a batch-invariant matmul of deterministic mode",
}


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


def find_matmul(node: fx.Node) -> Matmul | None:
    """The matmul that a node computes, None for other ops.

    A convolution is one if its windows are single elements: x @ weight at each position.
    """
    reader = MATMULS.get(node.target if node.op in ("call_function", "call_method") else None)
    if reader is not None:
        return reader(node)
    fused = [what for name, what in FUSED_MATMULS.items() if name in str(node.target)]
    return _unfit(None, fused[0]) if fused and node.op == "call_function" else None


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
    bias, value = named["input"], value_of(named["input"])
    matmul = _matmul_with_bias(named["mat1"], named["mat2"], bias)
    is_bias = isinstance(value, Tensor) and value.dim() == 1
    if not is_bias or named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return Matmul(matmul.weight, matmul.build, "addmm that does more than add a bias")
    return matmul


def _matmul_with_bias(left: Any, right: Any, bias: Any) -> Matmul:
    """left @ right + bias, right [K, N]."""

    def build(graph: fx.Graph, recipe: str, weights: str) -> fx.Node:
        return graph.call_function(run_fp8_matmul, (left, right, bias, recipe, weights))

    value, x = value_of(right), value_of(left)
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


def _read_einsum(node: fx.Node) -> Matmul:
    """x @ weight or x @ weight.T as an einsum; other equations stay."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    terms = find_einsum_terms(equation, len(operands))
    if terms is not None:
        for left, right in ((0, 1), (1, 0)):
            is_transposed = is_einsum_of_weight(terms[left], terms[right], terms[2])
            if is_transposed is not None and _is_weight(operands[right]):
                return _einsum_with_weight(operands[left], operands[right], is_transposed)
    text = str(equation).replace(" ", "")
    return _unfit(operands[-1], f"the einsum {text!r} is not x @ weight")


def _einsum_with_weight(x: Any, weight: Any, is_transposed: bool) -> Matmul:
    run = fp8_linear if is_transposed else run_fp8_matmul

    def build(graph: fx.Graph, recipe: str, weights: str) -> fx.Node:
        return graph.call_function(run, (x, weight, None, recipe, weights))

    return Matmul(weight, build)


def find_einsum_terms(equation: Any, operands: int) -> tuple[str, str, str] | None:
    """Subscripts of two operands and the result, `...` as one character."""
    if not isinstance(equation, str) or operands != 2 or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").replace("...", ".").split("->")
    left, right = inputs.split(",")
    return left, right, output


def is_einsum_of_weight(x: str, weight: str, output: str) -> bool | None:
    """Whether x @ weight.T (True) or x @ weight (False) is the einsum; None if it is neither."""
    has_distinct = all(len(set(term)) == len(term) for term in (x, weight, output))
    if len(weight) != 2 or len(x) < 2 or not has_distinct or "." in weight:
        return None
    contracted = x[-1]
    if contracted not in weight:
        return None
    free = weight.replace(contracted, "")
    if free in x or output != x[:-1] + free:
        return None
    return weight[1] == contracted


def _unfit(operand: Any, reason: str) -> Matmul:
    """A matmul that is only listed."""

    def build(graph: fx.Graph, recipe: str, weights: str) -> fx.Node:
        raise AssertionError(f"{reason}, and is never replaced")

    return Matmul(operand, build, reason)


def _read_listed(node: fx.Node) -> Matmul:
    """Matmuls in forms that are not replaced."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return _unfit(None, f"{name} is not replaced; write it as linear or x @ weight")


def _read_convolution(node: fx.Node) -> Matmul | None:
    """Convolutions with windows of one element, the only ones that are matmuls of their input."""
    weight = _named_arguments(node, "input", "weight").get("weight")
    value = value_of(weight)
    if not isinstance(value, Tensor) or any(size != 1 for size in value.shape[2:]):
        return None
    ones = "×".join("1" for _ in value.shape[2:])
    return _unfit(weight, f"a {ones} convolution; write it as linear over the channels")


def _read_batched(node: fx.Node) -> Matmul:
    matmul = _matmul_with_bias(node.args[-2], node.args[-1], None)
    return Matmul(matmul.weight, matmul.build, "a batched matmul")


def _read_grouped_mm(node: fx.Node) -> Matmul:
    named = _named_arguments(node, "mat_a", "mat_b")
    named = {"mat_a": named.pop("self", None), "mat_b": named.pop("mat2", None)} | named
    x, weight, offsets = named["mat_a"], named["mat_b"], named.get("offs")

    def build(graph: fx.Graph, recipe: str, weights: str) -> fx.Node:
        return graph.call_function(run_fp8_grouped_mm, (x, weight, offsets, recipe))

    value = value_of(weight)
    is_experts = isinstance(value, Tensor) and value.dim() == 3 and value_of(x).dim() == 2
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


LISTED_FORMS = (
    torch.functional.tensordot,
    torch.functional.chain_matmul,
    torch.linalg.multi_dot,
    torch.inner,
    torch.mv,
    torch.addmv,
    torch.addbmm,
    torch.bilinear,
    *("inner", "mv", "addmv", "addbmm"),
)
MATMULS: dict[Any, Callable[[fx.Node], Matmul | None]] = {
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
    torch.linalg.matmul: _read_matmul,
    torch.functional.einsum: _read_einsum,
    torch.bmm: _read_batched,
    torch.baddbmm: _read_batched,
    "bmm": _read_batched,
    "baddbmm": _read_batched,
    F.grouped_mm: _read_grouped_mm,
    torch._grouped_mm: _read_grouped_mm,
    torch.ops.fulgurite.grouped_gemm.default: _read_grouped_gemm,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _read_convolution),
    **dict.fromkeys(LISTED_FORMS, _read_listed),
}


def _named_arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments by name, whether positional or keyword ones."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def value_of(argument: Any) -> Any:
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
    return is_input and isinstance(value_of(argument), torch.nn.Parameter)
