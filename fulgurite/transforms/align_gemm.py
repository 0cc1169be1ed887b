"""Pad 16-bit GEMMs whose rows don't start at multiples of 16 bytes.

In: a functional graph. Out: the same, with operands padded by zeros and results sliced:

    mm(a, b)   →   mm(pad(a), pad(b))[:m, :n]

GPU libraries have no fast kernel for such rows: they can't be copied by TMA or in vectors. GPT-2's
vocabulary of 50257 tokens makes the three largest GEMMs of a training step several times slower.
Generated kernels write the padded operands; a consumer that is fused reads the slice in place. A result
that is returned (logits) has no consumer: `fulgurite::padded_mm` makes it without a padded copy of all of it.
Padding costs memory traffic, so a GEMM has to do enough work per padded byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.kernels.gemm.padded_mm import padded_mm
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, size_hint, tensor_bytes
from fulgurite.trace.node_meta import copy_location, fake_value
from fulgurite.transforms.base import transform

aten = torch.ops.aten
ALIGNMENT = 8  # elements of 16 bits in 16 bytes
# of a GEMM per byte that padding reads or writes. H200, bfloat16: a misaligned GEMM takes 5e-15 s per FLOP longer,
# a byte takes 2.5e-13 s; doubled for the launch of another kernel.
MIN_FLOPS_PER_BYTE = 100
GEMMS = {aten.mm.default: 0, aten.addmm.default: 1}  # position of the first operand


def has_misaligned_gemms(trace: Trace) -> bool:
    return any(_padded_sizes(node) is not None for node in trace.graph.nodes)


@transform
def align_gemms(trace: Trace) -> Trace:
    """Pad the misaligned GEMMs that are large enough."""
    return trace.edit(align_gemms_in_graph)


def align_gemms_in_graph(graph: fx.Graph) -> None:
    """The same on a graph in place."""
    for node in list(graph.nodes):
        sizes = _padded_sizes(node)
        if sizes is not None:
            _replace(graph, node, *sizes)


def _padded_sizes(node: fx.Node) -> tuple[int, int, int] | None:
    """How many rows, columns and inner elements to add to a GEMM; None: leave it."""
    if node.op != "call_function" or node.target not in GEMMS:
        return None
    a, b = (fake_value(operand) for operand in _operands(node))
    result = fake_value(node)
    if not is_slow_if_misaligned(a, b):
        return None
    (m, k), n = a.shape, b.shape[1]
    # the contiguous dimension of each operand is the one whose size is the distance of two rows
    m_pad = _missing(m) if not _is_row_major(a) else 0
    k_pad = _missing(k) if _is_row_major(a) or not _is_row_major(b) else 0
    n_pad = _missing(n)  # the result is row-major
    if not (m_pad or n_pad or k_pad):
        return None
    padded_bytes = 2 * tensor_bytes(a) if m_pad or k_pad else 0
    padded_bytes += 2 * tensor_bytes(b) if n_pad or k_pad else 0
    padded_bytes += 2 * tensor_bytes(result) if m_pad or n_pad else 0
    flops = 2 * size_hint(m) * size_hint(n) * size_hint(k)
    return (m_pad, n_pad, k_pad) if flops >= MIN_FLOPS_PER_BYTE * padded_bytes else None


def is_slow_if_misaligned(a: Any, b: Any) -> bool:
    """Whether the library has fast kernels for these operands only if their rows are aligned."""
    operands = (a, b)
    if not all(isinstance(x, Tensor) and x.device.type == "cuda" for x in operands):
        return False
    return all(x.dtype in (torch.bfloat16, torch.float16) for x in operands)


def _missing(size: Any) -> int:
    """Elements up to the next multiple; symbolic sizes are not padded."""
    return -size % ALIGNMENT if isinstance(size, int) else 0


def _is_row_major(x: Tensor) -> bool:
    return bool(x.stride(1) == 1)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first = GEMMS[node.target]  # type: ignore[index]
    a, b = node.args[first : first + 2]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node), "operands of a GEMM are values"
    return a, b


def _replace(graph: fx.Graph, node: fx.Node, m_pad: int, n_pad: int, k_pad: int) -> None:
    (m, n), (a, b) = fake_value(node).shape, _operands(node)
    added: list[fx.Node] = []

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        added.append(graph.call_function(target, args, kwargs))
        return added[-1]

    def pad(operand: fx.Node, rows: int, columns: int) -> fx.Node:
        if not (rows or columns):
            return operand
        if _is_row_major(fake_value(operand)):
            return call(aten.constant_pad_nd.default, operand, [0, columns, 0, rows], 0.0)
        transposed = call(aten.permute.default, operand, [1, 0])  # its memory stays in order
        padded = call(aten.constant_pad_nd.default, transposed, [0, rows, 0, columns], 0.0)
        return call(aten.permute.default, padded, [1, 0])

    def pad_gemm() -> fx.Node:
        operands = pad(a, m_pad, k_pad), pad(b, k_pad, n_pad)
        is_addmm = node.target is aten.addmm.default
        bias = _pad_bias(call, node.args[0], m, n, m_pad, n_pad) if is_addmm else None
        if n_pad and not m_pad and _is_row_bias(bias) and not node.kwargs and _is_returned(node):
            return call(padded_mm.overload, *operands, bias, n)
        if is_addmm:
            result = call(aten.addmm.default, bias, *operands, **node.kwargs)
        else:
            result = call(aten.mm.default, *operands)
        for dim, (size, padding) in enumerate(((m, m_pad), (n, n_pad))):
            result = call(aten.slice.Tensor, result, dim, 0, size) if padding else result
        if m_pad or n_pad:
            result = call(aten.clone.default, result, memory_format=torch.contiguous_format)
        return result

    with graph.inserting_before(node):
        result = pad_gemm()
    for new in added:
        copy_location(node, new)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_row_bias(bias: fx.Node | None) -> bool:
    """Whether `padded_mm` can add it: there is none, or one number per padded column."""
    return bias is None or (bias.target is aten.constant_pad_nd.default and len(bias.args[1]) == 2)  # type: ignore[arg-type]


def _is_returned(node: fx.Node) -> bool:
    """Whether nothing reads a value but the caller, also through views."""
    readers = [
        user.op == "output" or (user.op == "call_function" and is_view(user) and _is_returned(user))
        for user in node.users
    ]
    return bool(readers) and all(readers)


def _pad_bias(call: Any, bias: Any, m: Any, n: Any, m_pad: int, n_pad: int) -> fx.Node:
    """The first argument of `addmm`, padded along the dimensions that it does not broadcast."""
    shape = fake_value(bias).shape
    columns = n_pad if shape and shape[-1] == n and n != 1 else 0
    rows = m_pad if len(shape) > 1 and shape[0] == m and m != 1 else 0
    if not (rows or columns):
        return bias  # type: ignore[no-any-return]
    amounts = [0, columns, 0, rows] if len(shape) > 1 else [0, columns]
    padded: fx.Node = call(aten.constant_pad_nd.default, bias, amounts, 0.0)
    return padded
