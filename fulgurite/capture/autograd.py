"""The way through AOTAutograd.

In: a captured graph, FakeTensor inputs, and what to do with each functional graph. Out: a callable that runs
them with everything around: input mutation, aliases of inputs, saved tensors, subclasses, gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd

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
    return backend(module, inputs)
