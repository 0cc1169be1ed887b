"""Regions handed to TorchInductor: an alternative, and the yardstick.

In: a region. Out: what Inductor compiles it to. It claims what Inductor can fuse or call: ATen and prims ops
on CPU and CUDA tensors; everything else is left to the executors after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fulgurite.executors.base import Executor
from fulgurite.trace.cost import tensors
from fulgurite.transforms.purity import is_random


class InductorExecutor(Executor):
    name = "inductor"

    def claims(self, node: fx.Node) -> bool:
        target = node.target
        if node.op != "call_function" or is_random(node):
            return False  # random ops stay with torch, so that they draw what eager draws
        values = [
            node.meta.get("val"),
            *(source.meta.get("val") for source in node.all_input_nodes),
        ]
        held = [tensor for value in values for tensor in tensors(value)]
        if any(t.device.type not in ("cpu", "cuda") or t.is_complex() for t in held):
            return False
        if isinstance(target, torch._ops.OpOverload):
            return target.namespace in ("aten", "prims") and not target._schema.is_mutable
        return getattr(target, "__module__", None) == "_operator"

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        from torch._inductor import standalone_compile

        inputs = [n.meta["val"] for n in region.graph.nodes if n.op == "placeholder"]
        symbolic = any(isinstance(value, torch.SymInt) for value in inputs) or any(
            isinstance(size, torch.SymInt) for v in inputs for t in tensors(v) for size in t.shape
        )
        shapes = "from_tracing_context" if symbolic else "from_example_inputs"
        return standalone_compile(region, inputs, dynamic_shapes=shapes)


INDUCTOR = InductorExecutor()
