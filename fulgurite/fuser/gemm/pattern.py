"""Reads a matrix product and what follows it: one region of the IR, and which of its statements are products.

In: a GraphModule whose `mm` and `addmm` nodes read region inputs, and elementwise ops that read their results.
Out: a `Matmuls`: the whole as a region (the products are statements with a sum, as on a board), and the epilogue
as a region of its own, where the products are inputs. `gpu_matmul` schedules the epilogue over a product's tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Load, Operation
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.statement import Reduction, Region, Statement, Tensor, statement

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
OPERANDS = (torch.bfloat16, torch.float16)  # wider ones stay with the library


@dataclass(frozen=True)
class Product:
    """`name[i,j] = sum_k left[i,k] * right[k,j]`, the sum in float32."""

    name: str
    left: Tensor
    right: Tensor

    @property
    def depth(self) -> int:
        return self.left.sizes[1].constant

    @property
    def width(self) -> int:
        return self.right.sizes[1].constant


@dataclass(frozen=True)
class Matmuls:
    """A region with matrix products in it."""

    region: Region  # the whole
    epilogue: Region  # the same with the products' results among its arguments
    products: tuple[Product, ...]


def has_products(module: fx.GraphModule) -> bool:
    return any(node.target in PRODUCTS for node in module.graph.nodes)


def read(module: fx.GraphModule) -> Matmuls:
    """The region, its products apart."""
    products = {n: operands(n) for n in module.graph.nodes if n.target in PRODUCTS}
    after = replace(lower_graph.read(epilogue(module)), lent=frozenset())  # tiles come in any order
    tensors = {t.name: t for t in after.inputs}
    given: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            given.append(tensors.get(node.name) or _input(node))
    by_name = {t.name: t for t in given if isinstance(t, Tensor)}
    found = [Product(_name(n), by_name[a.name], by_name[b.name]) for n, (a, b) in products.items()]
    statements = tuple(_statement(product, tensors[product.name]) for product in found)
    region = replace(after, arguments=tuple(given), statements=(*statements, *after.statements))
    return Matmuls(region, after, tuple(found))


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two matrices of a product."""
    if node.target is aten.addmm.default:
        if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            raise Unsupported("an addmm that scales its parts")
        return node.args[1], node.args[2]  # type: ignore[return-value]
    return node.args[0], node.args[1]  # type: ignore[return-value]


def why_not(node: fx.Node) -> str | None:
    """Why a product can't be a generated one, or None where it can."""
    try:
        left, right = operands(node)
    except Unsupported as reason:
        return str(reason)
    a, b = left.meta["val"], right.meta["val"]
    if a.dtype not in OPERANDS or b.dtype != a.dtype:
        return f"a product of {a.dtype}"
    sizes = (a.shape[1], b.shape[1], *a.stride(), *b.stride())
    if not all(isinstance(size, int) for size in sizes):
        return "a product whose inner size, columns or strides are dynamic"
    rows = a.shape[0]
    if min(a.shape[1], b.shape[1]) < 2 or (isinstance(rows, int) and rows < 2):
        return "a product of vectors"
    if 1 not in a.stride() or 1 not in b.stride():
        return "a matrix that is contiguous along neither dimension"
    return None


def epilogue(module: fx.GraphModule, in_memory: bool = False) -> fx.GraphModule:
    """The graph with its products as the first inputs; a product that is a result is a copy, if not `in_memory`."""
    products = [n for n in module.graph.nodes if n.target in PRODUCTS]
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    kept = {s for n in module.graph.nodes for s in _read_beside(n)}
    for node in products:
        value_of[node] = graph.placeholder(_name(node))
        value_of[node].meta["val"] = node.meta["val"].contiguous()
    for node in module.graph.nodes:
        if node.op == "placeholder" and node not in kept:
            continue
        if node.target is aten.addmm.default:
            value_of[node] = _added(graph, value_of[node], value_of[node.args[0]], node)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
            bare = [] if in_memory else [n for n in products if n.target is not aten.addmm.default]
            copied = {n: _copy(graph, value_of[n], n) for n in results if n in bare}
            graph.output(tuple(copied.get(n) or value_of[n] for n in results))
        elif node not in products:
            value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    return fx.GraphModule(module, graph)


def _read_beside(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs of a node, those of a product that are no matrices of it."""
    if node.target is aten.addmm.default:
        yield node.args[0]  # type: ignore[misc]
    elif node.target not in PRODUCTS:
        yield from node.all_input_nodes


def _added(graph: fx.Graph, product: fx.Node, bias: fx.Node, node: fx.Node) -> fx.Node:
    added = graph.call_function(aten.add.Tensor, (product, bias))
    added.meta["val"] = node.meta["val"]
    return added


def _copy(graph: fx.Graph, value: fx.Node, node: fx.Node) -> fx.Node:
    """A product that leaves the region, stored as any other value is."""
    copy = graph.call_function(aten.clone.default, (value,))
    copy.meta["val"] = node.meta["val"]
    return copy


def _name(node: fx.Node) -> str:
    """Of a product; an addmm's own name is that of the sum with its bias."""
    return f"{node.name}_product" if node.target is aten.addmm.default else node.name


def _input(node: fx.Node) -> Any:
    return lower_graph.input_value(Reader(), node.name, node.meta["val"])


def _statement(product: Product, result: Tensor) -> Statement:
    rows, columns = (Axis(name, size) for name, size in zip("ij", result.sizes, strict=True))
    inner = Axis("k", product.left.sizes[1])
    i, j, k = (indices.of_atom(axis) for axis in (rows, columns, inner))
    left = Load(product.left.name, (i, k), product.left.dtype)
    right = Load(product.right.name, (k, j), product.right.dtype)
    terms = Operation("mul", (left, right), torch.float32)
    return statement(result, (rows, columns), terms, Reduction("sum", (inner,)), "mm")
