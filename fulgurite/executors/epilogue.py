"""Matrix products that take what follows them into their own kernel.

In: a claimed Trace on a GPU. Out: the same with some products, and the generated ops that read them, marked for one
region of the fuser each; the others stay with the library, with a remark that says why. A product is a candidate
where everything generated that reads it is elementwise (bias, activation, gate, residual, cast), or reduces blocks of
columns (to quantize), and ends in memory anyway. Whether one kernel is faster than the library's call and a kernel is
measured under `tune=True`, once a shape and device, and otherwise expected by `pays`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import cache, fuser, timing
from fulgurite.executors.base import Executor
from fulgurite.executors.extract import extract
from fulgurite.executors.fuser import FUSER
from fulgurite.executors.torch import TorchExecutor
from fulgurite.executors.tune import FORMAT, Decision, Tuner, example
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.gemm import pattern
from fulgurite.fuser.gemm.heuristics import Expected, expected
from fulgurite.fuser.gemm.library_fallback import LibraryRegion
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, size_hint, tensors
from fulgurite.trace.signature import signature
from fulgurite.transforms.purity import is_ordered
from fulgurite.version import VERSION

ONE, APART = "one kernel", "library and kernel"
MOST_OPS = 24  # of an epilogue
MARGIN = 1.02  # one kernel must be faster by this much: less is noise
FARTHEST = 0.05  # of two results, which are rounded to float8 at the most


@dataclass(frozen=True)
class Candidate:
    """Products and what reads them, in the order of the program, and the views that their matrices are."""

    nodes: list[fx.Node]
    views: list[fx.Node]

    @property
    def products(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.target in pattern.PRODUCTS]


def mark_epilogues(trace: Trace, executors: Sequence[Executor], tuner: Tuner | None) -> Trace:
    """Mark what becomes one kernel; the trace's nodes are the claim's own, and only their marks change."""
    by_name = {executor.name: executor for executor in executors}
    if FUSER not in executors or not any(isinstance(e, TorchExecutor) for e in executors):
        return trace
    seen: set[fx.Node] = set()
    for node in list(trace.graph.nodes):
        if node.target not in pattern.PRODUCTS or node in seen or not _on_gpu(node):
            continue
        if not isinstance(by_name[node.meta["executor"]], TorchExecutor):
            continue
        found = candidate(trace, node)
        if isinstance(found, Candidate):
            seen.update(found.products)
            _decide(trace, found, tuner)
        elif found:
            node.meta["remark"] = f"library: {found}"
    return trace


def _on_gpu(node: fx.Node) -> bool:
    return any(tensor.device.type == "cuda" for tensor in tensors(node.meta.get("val")))


# ---- candidates ----------------------------------------------------------------------------------


def candidate(trace: Trace, product: fx.Node) -> Candidate | str:
    """What could become one kernel with the product; or why nothing can, "" where nothing follows it."""
    inside = _readers(product)
    if all(is_view(node) for node in inside if node is not product):
        return ""
    reason = pattern.why_not(product)
    if reason:
        return reason
    if len(inside) > MOST_OPS:
        return f"{len(inside)} ops read it"
    later = _dependents(trace, inside)
    _add_sources(inside, later, pattern.operands(product)[0])
    if any(source in later for node in inside for source in node.all_input_nodes):
        return "another call's result is needed in between"
    nodes = [node for node in trace.graph.nodes if node in inside]
    if any(map(is_ordered, nodes)):
        return "an op that keeps its place reads it"
    products = [node for node in nodes if node.target in pattern.PRODUCTS]
    return Candidate(nodes, [view for node in products for view in _views(node)])


def _readers(product: fx.Node) -> set[fx.Node]:
    """The product and every generated op that reads it, directly or through others."""
    inside, stack = {product}, [product]
    while stack:
        for user in stack.pop().users:
            if user not in inside and user.meta.get("executor") == FUSER.name:
                inside.add(user)
                stack.append(user)
    return inside


def _dependents(trace: Trace, inside: set[fx.Node]) -> set[fx.Node]:
    """What depends on these nodes and is none of them."""
    found: set[fx.Node] = set()
    for node in trace.graph.nodes:
        if node not in inside and any(s in inside or s in found for s in node.all_input_nodes):
            found.add(node)
    return found


def _add_sources(inside: set[fx.Node], later: set[fx.Node], left: fx.Node) -> None:
    """Take in what only these nodes read: products of the same left matrix, and generated ops."""
    stack = [source for node in inside for source in _beside(node)]
    while stack:
        source = stack.pop()
        if source in inside or source in later or not all(user in inside for user in source.users):
            continue
        sibling = source.target in pattern.PRODUCTS and pattern.why_not(source) is None
        if sibling and pattern.operands(source)[0] is left and "apart" not in source.meta:
            inside.add(source)
        elif source.meta.get("executor") == FUSER.name and source.op == "call_function":
            inside.add(source)
            stack += source.all_input_nodes


def _beside(node: fx.Node) -> list[fx.Node]:
    """What a node reads, the matrices of a product aside."""
    if node.target not in pattern.PRODUCTS:
        return node.all_input_nodes
    return [source for source in node.all_input_nodes if source not in pattern.operands(node)]


def _views(product: fx.Node) -> list[fx.Node]:
    """The views that the product's matrices are: torch makes them, a region gets them as they are."""
    found = []
    for matrix in pattern.operands(product):
        while matrix.meta.get("executor") == FUSER.name and is_view(matrix):
            found.append(matrix)
            matrix = matrix.all_input_nodes[0]
    return found


# ---- the choice ----------------------------------------------------------------------------------


def _decide(trace: Trace, found: Candidate, tuner: Tuner | None) -> None:
    module, _, _ = extract(trace, found.nodes)
    first = found.products[0]
    try:
        with _disable_current_modes():
            expect = expected(module)
    except Unsupported as reason:
        first.meta["remark"] = f"library: {reason}"
        return
    fused, why = expect.pays, expect.why
    if tuner is not None and tuner.tune is True:
        decision = measured(module, expect)
        tuner.decisions.append(decision)
        fused, why = decision.winner == ONE, _times(decision)
    if not fused:
        first.meta["remark"] = f"library: {why}"
        return
    for node in found.nodes:
        node.meta |= {"executor": FUSER.name, "apart": first.name}
    for view in found.views:
        view.meta["executor"] = TorchExecutor.name


def measured(module: fx.GraphModule, expect: Expected) -> Decision:
    """Which of the two is faster, from the cache or by the clock."""
    key = _key(module)
    kept = _kept(cache.read_text("decisions", key), expect.name)
    if kept is not None:
        return kept
    calls: dict[str, Callable[..., Any]] = {
        ONE: fuser.lower(module, tune=True),
        APART: LibraryRegion(module, fuser.lower),
    }
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        inputs = [example(n.meta["val"]) for n in module.graph.nodes if n.op == "placeholder"]
        seconds = timing.compare_on(calls, *inputs)
        if not _agree(calls[ONE](*inputs), calls[APART](*inputs)):
            seconds[ONE] = math.inf
    winner = ONE if MARGIN * seconds[ONE] <= seconds[APART] else APART
    decision = Decision(expect.name, winner, seconds, cached=False)
    cache.write_text("decisions", key, json.dumps({"format": FORMAT, **asdict(decision)}))
    return decision


def _kept(stored: str | None, name: str) -> Decision | None:
    """A stored decision, unless there is none or it is damaged."""
    try:
        record = json.loads(stored or "")
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("winner") not in (ONE, APART):
        return None
    return Decision(name, record["winner"], record["seconds"], cached=True)


def _agree(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Nearly the same numbers: compilers of new devices' instructions have been seen to go wrong."""
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            distance = (one.double() - other.double()).norm()
            if not bool(distance <= FARTHEST * other.double().norm()):  # nor where it is NaN
                return False
    return True


def _times(decision: Decision) -> str:
    ratio = decision.seconds[ONE] / decision.seconds[APART]
    if ratio == math.inf:
        return "one kernel's results were wrong"
    return f"one kernel takes {ratio:.2f}×"


def _key(module: fx.GraphModule) -> str:
    """Everything the choice depends on; a dynamic size by its power of two."""
    sizes = [
        1 << max(size_hint(size) - 1, 0).bit_length()
        for node in module.graph.nodes
        for tensor in tensors(node.meta.get("val"))
        for size in tensor.shape
        if isinstance(size, torch.SymInt)
    ]
    place = next(t.device for n in module.graph.nodes for t in tensors(n.meta.get("val")))
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)
    return cache.digest(
        "epilogue", str(FORMAT), VERSION, torch.__version__, name, signature(module), str(sizes)
    )
