"""The way through AOTAutograd.

In: a captured graph, FakeTensor inputs, and what to do with each functional graph. Out: a callable that runs
them with everything around: input mutation, aliases of inputs, saved tensors, subclasses, gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import TensorifyState

from fulgurite.transforms.remat import Partition

BoxedFunction = Callable[[list[Any]], Any]
Build = Callable[[fx.GraphModule], BoxedFunction]


def differentiate(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Build,
    backward: Build,
    inference: Build,
    partition: Partition,
) -> Callable[..., Any]:
    """Functionalize, derive backward where it is needed, and build each graph."""

    def builder(build: Build) -> Callable[[fx.GraphModule, Sequence[Any]], BoxedFunction]:
        return lambda graph, _: build(graph)

    backend = aot_autograd(
        fw_compiler=builder(forward),
        bw_compiler=builder(backward),
        inference_compiler=builder(inference),
        partition_fn=partition,
    )
    with _scalar_tensors_stay(module):
        return backend(module, inputs)


@contextmanager
def _scalar_tensors_stay(module: fx.GraphModule) -> Iterator[None]:
    """Keep AOTAutograd from taking the user's 0-dim float64 tensors for Python floats.

    Dynamo passes a changing Python float as a 0-dim float64 tensor, and AOTAutograd asks for a second capture
    without those it could not use. It can't tell such a tensor from a user's own, and the second capture then
    drops in-place writes to it (as under aot_eager). Names that are down for specialization already ask for no
    second capture; taken back afterwards, they change nothing in one that a real Python float asks for.
    """
    names = _scalar_tensor_symbols(module) - TensorifyState.force_specializations
    TensorifyState.force_specializations |= names
    try:
        yield
    finally:
        TensorifyState.force_specializations -= names


def _scalar_tensor_symbols(module: fx.GraphModule) -> set[str]:
    """The symbols by which torch knows the values of 0-dim float64 tensors that are the user's own."""
    names = set()
    for node in module.graph.find_nodes(op="placeholder"):
        source = node.meta.get("grapharg")
        memo = getattr(node.meta.get("example_value"), "item_memo", None)
        if source is not None and memo is not None and not source.pass_arg_as_tensor:
            names.add(str(memo.node._expr))  # the symbol itself, not what it was found equal to
    return names
