"""FakeTensor metadata: what a node's value will look like, without computing it.

In: a graph whose inputs carry `meta["val"]`. Out: `meta["val"]` on every node, made by running the ops on
FakeTensors in the mode (and with the symbolic sizes) the inputs came with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fulgurite.trace.cost import tensors
from fulgurite.trace.region import Region


def fake_mode_of(module: fx.GraphModule) -> FakeTensorMode:
    """The mode the graph's metadata was made in."""
    for node in module.graph.nodes:
        for tensor in tensors(node.meta.get("val")):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Run ops on fakes: constants may be real tensors, and gradients are of no interest.

    Sizes that depend on data get new symbols here, which the capture that is under way must not wait for.
    """
    allowed = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    environment = mode.shape_env
    fresh = environment.ignore_fresh_unbacked_symbols() if environment else nullcontext()
    try:
        with mode, torch.no_grad(), fresh:
            yield
    finally:
        mode.allow_non_fake_inputs = allowed


def evaluate(
    module: fx.GraphModule, visit: Callable[[fx.Node, Any, dict[fx.Node, Any]], Any] | None = None
) -> dict[fx.Node, Any]:
    """Run the graph on its inputs' metadata; `visit(node, computed, values)` may replace a value."""
    values: dict[fx.Node, Any] = {}
    with faking(fake_mode_of(module)):
        for node in module.graph.nodes:
            if node.op == "placeholder" or node.meta.get("effect"):
                values[node] = node.meta.get("val")
            elif node.op != "output":
                computed = call_node(module, node, values)
                values[node] = visit(node, computed, values) if visit else computed
    return values


def call_node(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """One node applied to values of its arguments."""
    if node.op == "get_attr":
        held: Any = module
        for part in str(node.target).split("."):
            held = getattr(held, part)
        return held
    args = fx.node.map_arg(node.args, lambda source: values[source])
    kwargs = fx.node.map_arg(node.kwargs, lambda source: values[source])
    if node.op == "call_method":
        receiver, *rest = args
        return getattr(receiver, str(node.target))(*rest, **kwargs)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if isinstance(node.target, Region):
        return _run_region(node.target.module, args)
    assert callable(node.target), f"{node.name}: {node.target} can't be called"
    return node.target(*args, **kwargs)


def _run_region(module: fx.GraphModule, inputs: Any) -> Any:
    """A region op by op, and so the regions inside it."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda source: values[source])
        values[node] = next(given) if node.op == "placeholder" else call_node(module, node, values)
    raise AssertionError("a graph without an output")


def fill_metadata(module: fx.GraphModule) -> None:
    """Give metadata to the nodes that lack it, computing only those."""
    missing = [
        node
        for node in module.graph.nodes
        if "val" not in node.meta and node.op not in ("placeholder", "output")
    ]
    if not missing:
        return
    with faking(mode := fake_mode_of(module)):
        for node in missing:
            sources = {source: source.meta.get("val") for source in node.all_input_nodes}
            value = call_node(module, node, sources)
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                value = mode.from_tensor(value, static_shapes=True)
            node.meta["val"] = value


def same_metadata(one: Any, two: Any) -> bool:
    """Equal in everything that metadata says."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.dtype != two.dtype or one.device != two.device or one.layout != two.layout:
            return False
        if not _equal_sizes(one.shape, two.shape):
            return False
        return one.layout is not torch.strided or _equal_strides(one, two)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(same_metadata, one, two))
    return not isinstance(one, torch.Tensor) and not isinstance(two, torch.Tensor)


def _equal_sizes(one: Any, two: Any) -> bool:
    return len(one) == len(two) and all(
        statically_known_true(a == b) for a, b in zip(one, two, strict=True)
    )


def _equal_strides(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Strides of axes of size 0 or 1 mean nothing, nor do any where there is no element."""
    if any(statically_known_true(size == 0) for size in one.shape):
        return True
    return all(
        statically_known_true(a == b) or statically_known_true(size <= 1)
        for a, b, size in zip(one.stride(), two.stride(), one.shape, strict=True)
    )
