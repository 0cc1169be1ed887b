"""Signatures of training graphs: how results and arguments are ordered, and which graphs are plain.

In: a forward and a backward graph as AOTAutograd partitioned them, and its metadata. Out: a
`TrainingSignature`, or None for a graph that needs AOTAutograd's runtime wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch.fx.experimental._backward_state import BackwardState

from fulgurite.capture.unused_outputs import can_make_zeros
from fulgurite.trace.node_meta import fake_value

PLAIN_OUTPUTS = (OutputType.non_alias, OutputType.unsafe_view_alias)


@dataclass(frozen=True)
class Tangent:
    """A gradient that the backward graph takes: the output it belongs to, and its expected layout.

    stride   with which the backward graph was traced; None if symbolic. A gradient with these strides needs
             no `coerce`.
    """

    output: int
    meta: PlainTensorMeta
    stride: tuple[int, ...] | None

    def coerce(self, gradient: Tensor) -> Tensor:
        """The gradient in the layout that the backward graph was traced with."""
        if isinstance(gradient, torch.nn.Parameter):
            gradient = gradient.detach()
        result, _ = AOTDispatchAutograd.process_runtime_tangent(gradient, self.meta)
        assert isinstance(result, Tensor), "a tangent of a plain tensor is a tensor"
        return result


@dataclass(frozen=True)
class TrainingSignature:
    """How a forward graph's results and a backward graph's arguments are ordered.

    A forward graph returns outputs, saved tensors, saved sizes. A backward graph takes saved sizes,
    saved tensors, tangents, and returns one gradient or None for each input.
    """

    num_outputs: int
    num_sizes: int  # saved sizes (symbolic integers and floats)
    non_differentiable: tuple[int, ...]
    unsafe_views: tuple[int, ...]  # outputs that are views of intermediates; autograd must not know
    tangents: tuple[Tangent, ...]
    detached_inputs: tuple[int, ...]  # non-leaf inputs that never get a gradient
    written_inputs: tuple[int, ...]  # inputs that the graph writes, seen by autograd
    may_miss_gradients: bool  # outputs may have none: then their tangents are no zeros, but removed
    forbids_deterministic: bool  # backward raises if deterministic algorithms are enabled meanwhile
    dynamic_dims: tuple[tuple[int, set[int]], ...]  # outputs with symbolic sizes, and which


def read_signature(
    forward: fx.GraphModule, backward: fx.GraphModule, metadata: Any, inputs: Sequence[Any]
) -> TrainingSignature | None:
    """The signature of a training graph that needs none of AOTAutograd's wrappers; None for others."""
    tangents = _find_tangents(backward, metadata)
    if tangents is None or not _is_plain(forward, backward, metadata, inputs):
        return None
    gradients = backward.graph.output_node().args[0]
    assert isinstance(gradients, list | tuple)
    outputs = metadata.output_info
    return TrainingSignature(
        num_outputs=len(outputs),
        num_sizes=metadata.num_symints_saved_for_bw,
        non_differentiable=tuple(k for k, info in enumerate(outputs) if not info.requires_grad),
        unsafe_views=tuple(metadata.unsafe_view_out_indices),
        tangents=tangents,
        detached_inputs=tuple(
            k
            for k, info in enumerate(metadata.input_info)
            if gradients[k] is None and info.requires_grad and not info.is_leaf
        ),
        written_inputs=tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
        may_miss_gradients=len(tangents) > 1 and can_make_zeros(backward, len(tangents)),
        forbids_deterministic=metadata.deterministic is False,
        dynamic_dims=tuple((k, x.dynamic_dims) for k, x in enumerate(outputs) if x.dynamic_dims),
    )


def _is_plain(
    forward: fx.GraphModule, backward: fx.GraphModule, metadata: Any, inputs: Sequence[Any]
) -> bool:
    """Whether the graphs take and return exactly what the captured graph does, and saved values.

    `desc` describes each input and output. Others than those listed here are the inner tensors of a
    subclass, the common base of several views, effect tokens, RNG states.
    """
    taken = [node.meta.get("desc") for node in forward.graph.find_nodes(op="placeholder")]
    returned = list(forward.graph.output_node().meta.get("desc", ()))
    gradients = list(backward.graph.output_node().meta.get("desc", ()))
    num_outputs = len(metadata.output_info)
    return (
        taken == [PlainAOTInput(k) for k in range(len(inputs))]
        and returned[:num_outputs] == [PlainAOTOutput(k) for k in range(num_outputs)]
        and all(d in (None, GradAOTOutput(PlainAOTInput(k))) for k, d in enumerate(gradients))
        and len(gradients) == len(inputs)
        and metadata.num_forward == num_outputs  # no mutated inputs, bases of views, RNG offsets
        and all(info.output_type in PLAIN_OUTPUTS for info in metadata.output_info)
        and not any(info.mutates_metadata for info in metadata.input_info)
        and not metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw
        and metadata.grad_enabled_mutation is None
        and not metadata.tokens
        and not metadata.num_backward_tokens
        and not metadata.num_graphsafe_rng_states
        and not getattr(metadata, "num_tensors_saved_with_no_vc_check", 0)
        and not getattr(metadata, "num_opaque_objects_saved_for_bw", 0)
        and not getattr(metadata, "act_input_indices", ())
        and not any(isinstance(value, BackwardState) for value in inputs)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def _find_tangents(backward: fx.GraphModule, metadata: Any) -> tuple[Tangent, ...] | None:
    """The tangents at the end of the backward graph's inputs; None if one is not of a plain output."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    found = [node.meta.get("desc") for node in placeholders]
    positions = [k for k, desc in enumerate(found) if isinstance(desc, TangentAOTInput)]
    metas = metadata.subclass_tangent_meta
    if len(positions) != len(metas) or positions != list(
        range(len(found) - len(positions), len(found))
    ):
        return None
    tangents = []
    for position, meta in zip(positions, metas, strict=True):
        output = found[position].output
        if not isinstance(output, PlainAOTOutput) or not isinstance(meta, PlainTensorMeta):
            return None
        if meta.memory_format is None:
            return None
        tangents.append(Tangent(output.idx, meta, _static_stride(placeholders[position])))
    return tuple(tangents)


def _static_stride(placeholder: fx.Node) -> tuple[int, ...] | None:
    stride: tuple[Any, ...] = fake_value(placeholder).stride()
    return stride if all(isinstance(step, int) for step in stride) else None
