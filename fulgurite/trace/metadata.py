"""FakeTensor propagation: the dtype, shape and strides of every node, without computing it.

In: a graph whose inputs have fake values. Out: fake values on every node. Ops run on FakeTensors in the
inputs' own fake mode, with its symbolic sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    statically_known_true,
)

from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.node_meta import (
    aten_op,
    fake_value,
    has_fake_value,
    set_fake_value,
)
from fulgurite.trace.region import Region


def find_fake_mode(module: fx.GraphModule) -> FakeTensorMode:
    """The fake mode of the graph's metadata."""
    for node in module.graph.nodes:
        for tensor in iter_tensors(fake_value(node)):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def use_fake_mode(mode: FakeTensorMode) -> Iterator[None]:
    """Run ops on FakeTensors without gradients. Constants may be real tensors.

    Data-dependent sizes get fresh unbacked symbols, which the enclosing capture must ignore.
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


def run_node(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Run one node on the values of its arguments."""
    if node.op == "get_attr":
        attribute: Any = module
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part)
        return attribute
    args = fx.node.map_arg(node.args, lambda source: values[source])
    kwargs = fx.node.map_arg(node.kwargs, lambda source: values[source])
    if node.op == "call_method":
        receiver, *rest = args
        return getattr(receiver, str(node.target))(*rest, **kwargs)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if isinstance(node.target, Region):
        return _run_region(node.target.module, args)
    target: Any = node.target
    assert callable(target), f"{node.name}: {target} can't be called"
    if getattr(aten_op(node), "namespace", "") == "fulgurite":
        target = aten_op(node)  # it has a fake rule, and the kernel's own function has none
    return target(*args, **kwargs)


def _run_region(module: fx.GraphModule, inputs: Any) -> Any:
    """Run a region op by op, nested regions too."""
    values: dict[fx.Node, Any] = {}
    arguments = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda source: values[source])
        values[node] = (
            next(arguments) if node.op == "placeholder" else run_node(module, node, values)
        )
    raise AssertionError("a graph without an output")


def fill_metadata(module: fx.GraphModule) -> None:
    """Compute the fake values of nodes that have none."""
    missing = [
        node
        for node in module.graph.nodes
        if not has_fake_value(node) and node.op not in ("placeholder", "output")
    ]
    if not missing:
        return
    with use_fake_mode(mode := find_fake_mode(module)):
        for node in missing:
            sources = {source: fake_value(source) for source in node.all_input_nodes}
            value = run_node(module, node, sources)
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                value = mode.from_tensor(value, static_shapes=True)
            set_fake_value(node, value)


def same_metadata(
    one: Any, two: Any, *, allow_fresh_symbols: bool = False, exact: bool = False
) -> bool:
    """Whether two fake values have the same dtypes, devices, layouts, bits, sizes and strides.

    allow_fresh_symbols   data-dependent sizes count as equal: they have a fresh symbol each time that
                          an op runs
    exact                 as torch's rules for other ops read them: strides of dimensions of size 1 count
                          (they order the dimensions of an elementwise result), and sizes that are
                          equal by a guard alone are not the same expression
    """

    def is_equal(a: Any, b: Any) -> bool:
        if exact:
            return str(a) == str(b)
        is_fresh = allow_fresh_symbols and bool(free_unbacked_symbols([a, b]))
        return is_fresh or statically_known_true(a == b)

    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.dtype != two.dtype or one.device != two.device or one.layout != two.layout:
            return False
        if one.is_conj() != two.is_conj() or one.is_neg() != two.is_neg():
            return False
        if len(one.shape) != len(two.shape) or not all(map(is_equal, one.shape, two.shape)):
            return False
        if one.layout is not torch.strided:
            return True
        if exact:
            return all(map(is_equal, one.stride(), two.stride()))
        return _has_same_strides(one, two, is_equal)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        compare = functools.partial(
            same_metadata, allow_fresh_symbols=allow_fresh_symbols, exact=exact
        )
        return len(one) == len(two) and all(map(compare, one, two))
    return not isinstance(one, torch.Tensor) and not isinstance(two, torch.Tensor)


def _has_same_strides(
    one: torch.Tensor, two: torch.Tensor, is_equal: Callable[[Any, Any], bool]
) -> bool:
    """Compare strides. Those of axes of size 1 don't matter, nor any of an empty tensor."""
    if any(statically_known_true(size == 0) for size in one.shape):
        return True
    return all(
        is_equal(a, b) or statically_known_true(size <= 1)
        for a, b, size in zip(one.stride(), two.stride(), one.shape, strict=True)
    )
