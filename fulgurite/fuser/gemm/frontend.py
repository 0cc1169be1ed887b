"""Lower a graph with GEMMs to the IR.

In: a GraphModule whose `mm` and `addmm` nodes read region inputs, and ops that read their results. Out: a
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
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Load, Operation
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.statement import Reduction, Region, Statement, Tensor, make_statement
from fulgurite.trace.node_meta import fake_value, set_fake_value

aten = torch.ops.aten
GEMM_OPS = (aten.mm.default, aten.addmm.default)
OPERAND_DTYPES = (torch.bfloat16, torch.float16)  # the library runs GEMMs of other dtypes


@dataclass(frozen=True)
class Gemm:
    """`name[i,j] = sum_k lhs[i,k] * rhs[k,j]`, accumulated in float32."""

    name: str
    lhs: Tensor
    rhs: Tensor

    @property
    def k(self) -> int:
        return self.lhs.sizes[1].constant

    @property
    def n(self) -> int:
        return self.rhs.sizes[1].constant


@dataclass(frozen=True)
class GemmRegion:
    """A region that contains GEMMs."""

    region: Region
    epilogue: Region  # the region without the GEMMs; their outputs are its first arguments
    gemms: tuple[Gemm, ...]


def has_gemms(module: fx.GraphModule) -> bool:
    return any(node.target in GEMM_OPS for node in module.graph.nodes)


def lower_gemm_graph(module: fx.GraphModule) -> GemmRegion:
    """Lower the graph; GEMMs and epilogue apart."""
    operands = {n: gemm_operands(n) for n in module.graph.nodes if n.target in GEMM_OPS}
    epilogue = lower_graph.lower_graph(extract_epilogue(module))
    # tiles run in any order, so none may overwrite what another one still reads
    epilogue = replace(epilogue, donated=frozenset())
    tensors = {t.name: t for t in epilogue.inputs}
    arguments: list[Any] = [
        tensors.get(node.name) or _lower_input(node)
        for node in module.graph.find_nodes(op="placeholder")
    ]
    by_name = {t.name: t for t in arguments if isinstance(t, Tensor)}
    gemms = tuple(
        Gemm(_gemm_name(n), by_name[a.name], by_name[b.name]) for n, (a, b) in operands.items()
    )
    statements = (*(_gemm_statement(g, tensors[g.name]) for g in gemms), *epilogue.statements)
    region = replace(epilogue, arguments=tuple(arguments), statements=statements)
    return GemmRegion(region, epilogue, gemms)


def gemm_operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The left and right matrix of a GEMM node."""
    if node.target is aten.addmm.default:
        if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            raise Unsupported("an addmm with alpha or beta")
        return node.args[1], node.args[2]  # type: ignore[return-value]
    return node.args[0], node.args[1]  # type: ignore[return-value]


def unsupported_reason(node: fx.Node) -> str | None:
    """Why a GEMM can't be generated; None if it can."""
    try:
        lhs, rhs = gemm_operands(node)
    except Unsupported as reason:
        return str(reason)
    a, b = fake_value(lhs), fake_value(rhs)
    if a.dtype not in OPERAND_DTYPES or b.dtype != a.dtype:
        return f"a GEMM of {a.dtype}"
    sizes = (a.shape[1], b.shape[1], *a.stride(), *b.stride())
    if not all(isinstance(size, int) for size in sizes):
        return "a GEMM whose K, N or strides are dynamic"
    rows = a.shape[0]
    if min(a.shape[1], b.shape[1]) < 2 or (isinstance(rows, int) and rows < 2):
        return "a matrix-vector product"
    if 1 not in a.stride() or 1 not in b.stride():
        return "a matrix that is contiguous in neither dimension"
    return None


def extract_epilogue(module: fx.GraphModule, are_in_memory: bool = False) -> fx.GraphModule:
    """The graph with the GEMM outputs as its first inputs.

    are_in_memory   the library stores GEMM outputs; otherwise a returned one is stored by a copy
    """
    gemms = [n for n in module.graph.nodes if n.target in GEMM_OPS]
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    read = {s for n in module.graph.nodes for s in _epilogue_inputs(n)}
    for node in gemms:
        value_of[node] = graph.placeholder(_gemm_name(node))
        set_fake_value(value_of[node], fake_value(node).contiguous())
    for node in module.graph.nodes:
        if node.op == "placeholder" and node not in read:
            continue
        if node.target is aten.addmm.default:
            value_of[node] = _add_bias(graph, value_of[node], value_of[node.args[0]], node)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
            is_copied = {n for n in gemms if n.target is not aten.addmm.default}
            is_copied = set() if are_in_memory else is_copied
            copied = {
                n: _copy_gemm_output(graph, value_of[n], n) for n in results if n in is_copied
            }
            graph.output(tuple(copied.get(n) or value_of[n] for n in results))
        elif node not in gemms:
            value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    return fx.GraphModule(module, graph)


def _epilogue_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs of a node, without the matrices of a GEMM."""
    if node.target is aten.addmm.default:
        yield node.args[0]  # type: ignore[misc]
    elif node.target not in GEMM_OPS:
        yield from node.all_input_nodes


def _add_bias(graph: fx.Graph, gemm: fx.Node, bias: fx.Node, node: fx.Node) -> fx.Node:
    added = graph.call_function(aten.add.Tensor, (gemm, bias))
    set_fake_value(added, fake_value(node))
    return added


def _copy_gemm_output(graph: fx.Graph, value: fx.Node, node: fx.Node) -> fx.Node:
    """Store a returned GEMM output like any other value of the epilogue."""
    copy = graph.call_function(aten.clone.default, (value,))
    set_fake_value(copy, fake_value(node))
    return copy


def _gemm_name(node: fx.Node) -> str:
    """The name of a GEMM's output; an addmm's own name is that of the sum with its bias."""
    return f"{node.name}_gemm" if node.target is aten.addmm.default else node.name


def _lower_input(node: fx.Node) -> Any:
    return lower_graph.lower_placeholder(LoweringContext(), node.name, fake_value(node))


def _gemm_statement(gemm: Gemm, result: Tensor) -> Statement:
    rows, columns = (Axis(name, size) for name, size in zip("ij", result.sizes, strict=True))
    inner = Axis("k", gemm.lhs.sizes[1])
    i, j, k = (indices.from_atom(axis) for axis in (rows, columns, inner))
    lhs = Load(gemm.lhs.name, (i, k), gemm.lhs.dtype)
    rhs = Load(gemm.rhs.name, (k, j), gemm.rhs.dtype)
    terms = Operation("mul", (lhs, rhs), torch.float32)
    return make_statement(result, (rows, columns), terms, Reduction("sum", (inner,)), "mm")
