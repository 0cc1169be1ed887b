"""The last launches of a captured trace, which run without a graph: those that make large results.

In: a final trace, and which of its outputs go to the user. Out: the trace without its last launches (the
"head", which is captured), and a function of those launches (the "tail", which runs after each replay).

A CUDA graph writes to the same memory at every replay. So a result that the user may keep is copied out of
it, and needs its memory twice. The tail writes large results to fresh memory instead: no copy, one buffer, and
they are ordinary tensors, also for other streams and libraries.

    hidden = …                        # head
    padded = mm(hidden, weight)       # tail: only the result needs it, and it is large
    logits = padded[:, :n].clone()    # tail: a large result

A launch that the head or backward needs too, as a hidden state, stays in the head; its result is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.cudagraph import OutputMode, ResultTail
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, iter_tensors, value_bytes, view_base
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import copy_meta, fake_value
from fulgurite.trace.purity import is_pure, is_random
from fulgurite.trace.region import Region, bind_cached_launches

# A copy of so many bytes takes as long as the host needs for a launch (H200: 5 µs).
MIN_RESULT_BYTES = 8 << 20
MAX_LAUNCHES = 8  # of a tail; more would bring back the host time that a graph saves
MIN_HEAD_LAUNCHES = 2  # one launch is no slower than a replay


@dataclass(frozen=True)
class SplitTrace:
    """A head, which returns the other outputs and then what the tail reads, and the tail."""

    head: Trace
    tail: ResultTail
    num_internal: int  # outputs of the head that only the tail reads


def split_tail(trace: Trace, modes: Sequence[OutputMode]) -> SplitTrace | None:
    """Split off the launches of large results; None if there are none.

    modes   of the outputs: only "copied" ones are split off
    """
    tail = _find_tail(trace, modes)
    head = [node for node in trace.ops if node not in tail]
    if not tail or len(_launches(head)) < MIN_HEAD_LAUNCHES:
        return None
    if _overwrites_what_tail_reads(trace, tail):
        return None
    return _build(trace, tail)


def _find_tail(trace: Trace, modes: Sequence[OutputMode]) -> set[fx.Node]:
    """The launches of large results, those of their large inputs, and the views of both."""
    returned = [
        (node, mode)
        for node, mode in zip(trace.outputs, modes, strict=True)
        if isinstance(node, fx.Node)
    ]
    saved = {node for node, mode in returned if mode != "copied"}
    order = {node: k for k, node in enumerate(trace.graph.nodes)}
    values = [node for node, mode in returned if mode == "copied"]
    tail: set[fx.Node] = set()
    for _ in range(2):  # the results, then what they are made of
        bases = {view_base(node) for node in values if _is_large(node)} - tail
        for base in sorted(bases, key=order.__getitem__, reverse=True):
            members = _launch_and_views(base)
            if members and not members & saved and _is_only_read_by(members, tail):
                if len(_launches(tail | members)) <= MAX_LAUNCHES:
                    tail |= members
        values = [source for node in _launches(tail) for source in node.all_input_nodes]
    return tail


def _is_large(node: fx.Node) -> bool:
    return value_bytes(fake_value(node)) >= MIN_RESULT_BYTES


def _launches(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if not is_view(n) and any(True for _ in iter_tensors(fake_value(n)))]


def _launch_and_views(base: fx.Node) -> set[fx.Node]:
    """The launch that makes a value, its results and their views; empty if it can't run later."""
    launch = base.args[0] if base.target is operator.getitem else base
    if not isinstance(launch, fx.Node) or not _can_run_later(launch):
        return set()
    found, stack = {launch}, [launch]
    while stack:
        views = [user for user in stack.pop().users if user.op == "call_function" and is_view(user)]
        stack += [view for view in views if view not in found]
        found.update(views)
    return found


def _can_run_later(launch: fx.Node) -> bool:
    """Whether a launch has no effect but its value, and draws no random numbers."""
    if launch.op != "call_function" or is_view(launch):
        return False
    if isinstance(launch.target, Region):
        inner = launch.target.module.graph.nodes
        return not mutated_inputs(launch) and not any(is_random(node) for node in inner)
    return is_pure(launch)


def _is_only_read_by(members: set[fx.Node], tail: set[fx.Node]) -> bool:
    readers = {user for node in members for user in node.users}
    return all(user in members or user in tail or user.op == "output" for user in readers)


def _overwrites_what_tail_reads(trace: Trace, tail: set[fx.Node]) -> bool:
    """Whether a launch writes to memory of the head that the tail reads, or would return."""
    read = {view_base(n) for node in tail for n in node.all_input_nodes} - tail
    for node in trace.ops:
        written = [*mutated_inputs(node), *_donated_inputs(node)]
        if read & {view_base(n) for n in written}:
            return True
    return False


def _donated_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs in whose buffers a region stores its results."""
    if not isinstance(node.target, Region):
        return []
    donated = [node.args[k] for k in getattr(node.target.call, "overwritten_inputs", ())]
    return [value for value in donated if isinstance(value, fx.Node)]


# ---- two functions -----------------------------------------------------------------------------------


def _build(trace: Trace, tail: set[fx.Node]) -> SplitTrace:
    positions = [k for k, node in enumerate(trace.outputs) if node in tail]
    builder = _TailBuilder(trace, tail)
    results = [builder.copy(trace.outputs[k]) for k in positions]
    run = bind_cached_launches(trace.with_module(builder.finish(results)).compile())
    inputs = trace.inputs
    numbers = [inputs.index(node) for node in builder.inputs]
    head = _build_head(trace, tail, list(builder.internal))
    result_tail = ResultTail(run, tuple(numbers), tuple(positions))
    return SplitTrace(head, result_tail, len(builder.internal))


class _TailBuilder:
    """Copies the tail's nodes into a graph of their own.

    Its inputs are values of the head, then inputs of the trace. Views of inputs are copied along: the
    capture must not keep them.
    """

    def __init__(self, trace: Trace, tail: set[fx.Node]) -> None:
        self.trace, self.tail = trace, tail
        read = [n for node in trace.graph.nodes if node in tail for n in node.all_input_nodes]
        outside = dict.fromkeys(source for n in read if n not in tail for source in self._source(n))
        self.internal = [node for node in outside if node.op != "placeholder"]
        self.inputs = [node for node in outside if node.op == "placeholder"]
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        for node in (*self.internal, *self.inputs):
            self.copies[node] = self.graph.placeholder(node.name)
            copy_meta(node, self.copies[node])

    def _source(self, node: fx.Node) -> list[fx.Node]:
        """What the tail takes to get this value."""
        if node.op == "get_attr":
            return []
        base = view_base(node)
        if node is base or base.op not in ("placeholder", "get_attr"):
            return [node]
        return [s for source in node.all_input_nodes for s in self._source(source)]

    def copy(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            for source in node.all_input_nodes:
                self.copy(source)
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        return self.copies[node]

    def finish(self, results: list[fx.Node]) -> fx.GraphModule:
        copy_meta(self.trace.graph.output_node(), self.graph.output(results))
        return _make_module(self.trace.module, self.graph)


def _build_head(trace: Trace, tail: set[fx.Node], internal: list[fx.Node]) -> Trace:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in trace.graph.nodes:
        if node.op != "output" and node not in tail:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs: list[Any] = [None if node in tail else node for node in trace.outputs]
    outputs = [copies[n] if isinstance(n, fx.Node) else n for n in (*outputs, *internal)]
    copy_meta(trace.graph.output_node(), graph.output(outputs))
    return trace.with_module(_make_module(trace.module, graph))


def _make_module(owner: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module with the constants of another one."""
    return _LazyGraphModule(owner, graph, class_name="Trace")
