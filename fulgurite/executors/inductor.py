"""The inductor executor: regions compiled by TorchInductor, as an alternative and for comparison.

In: a region. Out: what Inductor compiles it to. It claims what Inductor can fuse or call: ATen and prims
ops on CPU and CUDA tensors. Other ops go to the executors after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fulgurite.executors.base import Executor
from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.node_meta import fake_value
from fulgurite.trace.purity import is_random


class InductorExecutor(Executor):
    name = "inductor"
    falls_back_if_failed = True

    def claims(self, node: fx.Node) -> bool:
        target = node.target
        if node.op != "call_function" or is_random(node):
            return False  # torch draws the same random numbers as eager
        values = [fake_value(n) for n in (node, *node.all_input_nodes)]
        tensors = [tensor for value in values for tensor in iter_tensors(value)]
        if any(t.device.type not in ("cpu", "cuda") or t.is_complex() for t in tensors):
            return False
        if isinstance(target, torch._ops.OpOverload):
            return target.namespace in ("aten", "prims") and not target._schema.is_mutable
        return getattr(target, "__module__", None) == "_operator"

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        from torch._inductor import standalone_compile

        inputs = [fake_value(n) for n in region.graph.nodes if n.op == "placeholder"]
        is_symbolic = any(isinstance(value, torch.SymInt) for value in inputs) or any(
            isinstance(size, torch.SymInt)
            for v in inputs
            for t in iter_tensors(v)
            for size in t.shape
        )
        shapes = "from_tracing_context" if is_symbolic else "from_example_inputs"
        return standalone_compile(region, inputs, dynamic_shapes=shapes)


INDUCTOR = InductorExecutor()
