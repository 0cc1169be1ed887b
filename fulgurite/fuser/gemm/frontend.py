"""Lower a graph with GEMMs to the IR.

In: a GraphModule whose GEMM nodes (`calls.py`) read region inputs, and ops that read their results. Out: a
`GemmRegion`: the whole region, where GEMMs are statements with a sum, and the epilogue as a region of its
own, where GEMM outputs are inputs. `schedule.py` schedules the epilogue over the tiles of a GEMM's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.gemm.calls import FLOAT8, GemmCall, is_gemm, read_gemm
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, Operation
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.statement import Reduction, Region, Statement, Tensor, make_statement
from fulgurite.trace.node_meta import fake_value, set_fake_value

aten = torch.ops.aten


@dataclass(frozen=True)
class BlockScales:
    """Scales of `block_k` columns of K, which the main loop multiplies partial sums with.

    lhs          [M, K / block_k]
    rhs          [N / rhs_block, K / block_k]
    """

    lhs: Tensor
    rhs: Tensor
    block_k: int
    rhs_block: int


@dataclass(frozen=True)
class Gemm:
    """`name[i,j] = sum_k lhs[i,k] * rhs[k,j]`, accumulated in float32.

    dtype           of the result that the library would store
    scales          scales of blocks of K, if any
    is_fast_accum   whether tensor cores may keep all of K in their reduced-precision sums
    """

    name: str
    lhs: Tensor
    rhs: Tensor
    dtype: torch.dtype
    scales: BlockScales | None = None
    is_fast_accum: bool = False

    @property
    def k(self) -> int:
        return self.lhs.sizes[1].constant

    @property
    def n(self) -> int:
        return self.rhs.sizes[1].constant

    @property
    def origin(self) -> str:
        return "scaled_mm" if self.lhs.dtype in FLOAT8 else "mm"

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """What the main loop reads."""
        scales = (self.scales.lhs, self.scales.rhs) if self.scales is not None else ()
        return (self.lhs, self.rhs, *scales)


@dataclass(frozen=True)
class GemmRegion:
    """A region that contains GEMMs."""

    region: Region
    epilogue: Region  # the region without the GEMMs; their outputs are its first arguments
    gemms: tuple[Gemm, ...]


def has_gemms(module: fx.GraphModule) -> bool:
    return any(map(is_gemm, module.graph.nodes))


def lower_gemm_graph(module: fx.GraphModule) -> GemmRegion:
    """Lower the graph; GEMMs and epilogue apart."""
    epilogue = lower_graph.lower_graph(extract_epilogue(module))
    # tiles run in any order, so none may overwrite what another one still reads
    epilogue = replace(epilogue, donated=frozenset())
    tensors = {t.name: t for t in epilogue.inputs}
    arguments: list[Any] = [
        tensors.get(node.name) or _lower_input(node)
        for node in module.graph.find_nodes(op="placeholder")
    ]
    by_name = {t.name: t for t in arguments if isinstance(t, Tensor)}
    gemms = tuple(_lower_gemm(node, by_name) for node in module.graph.nodes if is_gemm(node))
    products = (_gemm_statement(g, tensors[g.name], by_name) for g in gemms)
    statements = (*products, *epilogue.statements)
    region = replace(epilogue, arguments=tuple(arguments), statements=statements)
    return GemmRegion(region, epilogue, gemms)


def _lower_gemm(node: fx.Node, tensors: dict[str, Tensor]) -> Gemm:
    call = read_gemm(node)
    rhs = tensors[call.rhs.name]
    return Gemm(
        gemm_name(node),
        tensors[call.lhs.name],
        _transpose(rhs) if call.is_rhs_transposed else rhs,
        fake_value(node).dtype,
        _lower_block_scales(call, tensors),
        call.is_fast_accum,
    )


def _lower_block_scales(call: GemmCall, tensors: dict[str, Tensor]) -> BlockScales | None:
    scales = call.scales
    if scales is None or not scales.block_k:
        return None
    rhs = tensors[scales.rhs.name]
    rhs = _transpose(rhs) if scales.is_rhs_transposed else rhs
    return BlockScales(tensors[scales.lhs.name], rhs, scales.block_k, scales.rhs_block)


def _transpose(matrix: Tensor) -> Tensor:
    return replace(matrix, sizes=matrix.sizes[::-1], strides=matrix.strides[::-1])


# ---- the epilogue as a graph ---------------------------------------------------------------------


def extract_epilogue(module: fx.GraphModule, are_in_memory: bool = False) -> fx.GraphModule:
    """The graph with the GEMM outputs as its first inputs.

    Its first ops scale an accumulator and add the bias. No value is rounded to the dtype of a GEMM's
    result unless it is stored.

    are_in_memory   the library stores (scaled) GEMM outputs; otherwise a returned one is stored by a copy
    """
    gemms = {n: read_gemm(n) for n in module.graph.nodes if is_gemm(n)}
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    read = {
        s
        for n in module.graph.nodes
        for s in (finish_inputs(gemms[n], are_in_memory) if n in gemms else n.all_input_nodes)
    }
    for node, call in gemms.items():
        name = gemm_name(node)  # by itself, fx writes a placeholder's name in lower case
        value_of[node] = graph.create_node("placeholder", name, name=name)
        fake = fake_value(node).contiguous()
        is_finished = call.scales is None or not any(finish_inputs(call, are_in_memory))
        set_fake_value(value_of[node], fake if is_finished else fake.float())
    for node in module.graph.nodes:
        if node.op == "placeholder" and node not in read:
            continue
        if node in gemms:
            value_of[node] = _finish_gemm(graph, value_of, node, gemms[node], are_in_memory)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
            graph.output(tuple(_returned(graph, value_of, n, are_in_memory) for n in results))
        else:
            value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    return fx.GraphModule(module, graph)


def finish_inputs(call: GemmCall, are_in_memory: bool) -> Iterator[fx.Node]:
    """What the epilogue reads of a GEMM call itself: scales per tensor or row, the bias."""
    if call.scales is not None and are_in_memory:
        return
    if call.scales is not None and not call.scales.block_k:
        yield from (call.scales.lhs, call.scales.rhs)
    if call.bias is not None:
        yield call.bias


def _finish_gemm(
    graph: fx.Graph,
    value_of: dict[fx.Node, fx.Node],
    node: fx.Node,
    call: GemmCall,
    are_in_memory: bool,
) -> fx.Node:
    """From the accumulator to the GEMM's result."""
    value, dtype = value_of[node], fake_value(node).dtype
    if call.scales is not None and are_in_memory:
        return value
    if call.scales is not None and not call.scales.block_k:
        left = _reshape(graph, value_of[call.scales.lhs], [-1, 1])
        right = _reshape(graph, value_of[call.scales.rhs], [1, -1])
        value = _elementwise(graph, aten.mul.Tensor, value, left, torch.float32)
        value = _elementwise(graph, aten.mul.Tensor, value, right, dtype)
    if call.bias is not None:
        value = _elementwise(graph, aten.add.Tensor, value, value_of[call.bias], dtype)
    return value


def _reshape(graph: fx.Graph, scale: fx.Node, shape: list[int]) -> fx.Node:
    reshaped = graph.call_function(aten.reshape.default, (scale, shape))
    set_fake_value(reshaped, fake_value(scale).reshape(shape))
    return reshaped


def _elementwise(
    graph: fx.Graph, target: Any, value: fx.Node, other: fx.Node, dtype: torch.dtype
) -> fx.Node:
    """`value` combined with another one that is broadcast to it, in float32."""
    result = graph.call_function(target, (value, other))
    set_fake_value(result, fake_value(value).to(dtype))
    return result


def _returned(
    graph: fx.Graph, value_of: dict[fx.Node, fx.Node], node: Any, are_in_memory: bool
) -> Any:
    """A returned value; a plain GEMM output is stored by a copy unless the library stores it."""
    if not isinstance(node, fx.Node):
        return node
    value = value_of[node]
    if value.op != "placeholder" or not is_gemm(node) or are_in_memory:
        return value
    copy = graph.call_function(aten.clone.default, (value,))
    set_fake_value(copy, fake_value(node))
    return copy


def gemm_name(node: fx.Node) -> str:
    """The name of an accumulator. A node that adds a bias or scales has its own name for its result."""
    return node.name if node.target is aten.mm.default else f"{node.name}_gemm"


def _lower_input(node: fx.Node) -> Any:
    return lower_graph.lower_placeholder(LoweringContext(), node.name, fake_value(node))


# ---- GEMMs as statements -------------------------------------------------------------------------


def _gemm_statement(gemm: Gemm, result: Tensor, inputs: dict[str, Tensor]) -> Statement:
    def load(matrix: Tensor, row: Index, column: Index) -> Load:
        """A GEMM may read an input transposed; the IR loads it as it is."""
        is_transposed = matrix.strides != inputs[matrix.name].strides
        index = (column, row) if is_transposed else (row, column)
        return Load(matrix.name, index, matrix.dtype)

    rows, columns = (Axis(name, size) for name, size in zip("ij", result.sizes, strict=True))
    inner = Axis("k", gemm.lhs.sizes[1])
    i, j, k = (indices.from_atom(axis) for axis in (rows, columns, inner))
    terms = _multiply(load(gemm.lhs, i, k), load(gemm.rhs, k, j))
    scales = gemm.scales
    if scales is not None:
        block = indices.floordiv(k, Index(scales.block_k))
        terms = _multiply(terms, load(scales.lhs, i, block))
        right = indices.floordiv(j, Index(scales.rhs_block))
        terms = _multiply(terms, load(scales.rhs, right, block))
    return make_statement(result, (rows, columns), terms, Reduction("sum", (inner,)), gemm.origin)


def _multiply(a: Expression, b: Expression) -> Expression:
    return Operation("mul", (a, b), torch.float32)
