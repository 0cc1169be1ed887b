"""The native forward and backward of training graphs: `include/training_call.h`.

In: graphs and their signature. Out: functions that do what `forward` and `backward` of
`training.make_function` do, or None where the library for it can't be used. What is unusual (double
backward, autocast in backward, a backward graph that is not built yet) they leave to Python.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from fulgurite.capture.double_backward import read_versions
from fulgurite.capture.training_signature import TrainingSignature
from fulgurite.host_api import load_library

State = tuple[bytes, tuple[Any, ...]]


def make_native_forward(
    forward_graph: Any, graphs: Any, signature: TrainingSignature
) -> Callable[..., Any] | None:
    """(ctx, *inputs) → the tuple of outputs. What backward needs is stored in `ctx`."""
    library = load_library()
    if library is None:
        return None
    state = _pack_state(signature, graphs, forward_graph=forward_graph)
    made: Callable[..., Any] = library.make_callable("run_training_forward", state)
    return made


def make_native_backward(
    graphs: Any, signature: TrainingSignature, python_backward: Callable[..., Any]
) -> Any:
    """`apply` of the autograd node's class: (ctx, *gradients) or (ctx, [*gradients]) → gradients.

    Autograd calls it without `BackwardCFunction.apply`, which looks up the function to call.
    """
    library = load_library()
    if library is None:
        return None
    state = _pack_state(signature, graphs, python_backward=python_backward)
    return library.make_method("run_training_backward", state)


def _pack_state(
    signature: TrainingSignature,
    graphs: Any,
    forward_graph: Any = None,
    python_backward: Any = None,
) -> State:
    """`Training` of training_call.h, and the objects that it refers to."""
    objects = [forward_graph, graphs, python_backward, read_versions]
    words = [
        *map(id, objects),
        *(signature.num_outputs, signature.num_sizes, len(signature.tangents)),
        *(len(signature.non_differentiable), len(signature.unsafe_views)),
        *(not graphs.captured.reason, signature.may_miss_gradients),
        signature.forbids_deterministic,
        *signature.non_differentiable,
        *signature.unsafe_views,
    ]
    for tangent in signature.tangents:
        coerce, stride = tangent.coerce, tangent.stride
        objects.append(coerce)
        rank = -1 if stride is None else len(stride)
        words += [tangent.output, id(coerce), rank, *(stride or ())]
    return struct.pack(f"{len(words)}q", *map(int, words)), tuple(objects)
