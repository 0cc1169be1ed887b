"""Peak activation memory of a step: a model on the meta device in, bytes out.

The largest step runs on the meta device, where tensors have shapes and no memory. A dispatch mode
tracks which tensors are alive at once. A stand-in KV cache returns attention outputs of the right
shape.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs
from fulgurite.kernels.linear_attention.ops import gated_delta_rule_meta
from fulgurite.kernels.mla.ops import mla_attention_meta
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import ConvWeights, UnpagedKVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.mla import MLAInputs
from fulgurite.models.state_spec import StateSpec
from fulgurite.models.transformers_backend.model import TransformersModel


def activation_bytes(model: CausalLM, tokens: int, rows: int) -> int:
    """Peak bytes of a step of `tokens` tokens that computes the logits of `rows` of them."""
    assert model.device.type == "meta", "activation_bytes runs a step on the meta device"
    rows, model = min(rows, tokens), _deduplicate_layers(model)
    with torch.inference_mode(), track_allocations() as tracker, torch.device("meta"):
        ids = torch.zeros(tokens, dtype=torch.long)
        hidden = model.compute_hidden_states(
            ids, torch.zeros(tokens, dtype=torch.long), _NullCache()
        )
        selected = hidden[torch.zeros(rows, dtype=torch.long)]
        logits = model.compute_logits(selected).float()
        del hidden
        logits.clone()  # with bias, mask and penalties
    return tracker.peak


def _deduplicate_layers(model: CausalLM) -> CausalLM:
    """The model with one layer of each kind. Layers run one by one, so the peak is the same."""
    if isinstance(model, TransformersModel):  # its layers are called by code that is not ours
        return model
    kinds: dict[object, int] = {}
    for index, layer in enumerate(model.layers):
        shapes = tuple((name, value.shape) for name, value in layer.named_parameters())
        kinds.setdefault((str(layer), shapes), index)
    small = copy.copy(model)
    small._modules = dict(model._modules)
    small.layers = torch.nn.ModuleList(model.layers[index] for index in kinds.values())
    small.rotary_index = tuple(model.rotary_index[index] for index in kinds.values())
    return small


class _NullCache(UnpagedKVCache):
    """A KV cache that stores nothing. Its outputs have the right shape and no values."""

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        return q_XNH.new_empty(*q_XNH.shape[:-1], spec.value_dim)

    def attend_mla(self, spec: AttentionSpec, step: MLAInputs, positions_X: Tensor) -> Tensor:
        return mla_attention_meta(step.q_XNH, step.kv_b_NUC, step.value_dim)

    def causal_conv(
        self, spec: StateSpec, x_XC: Tensor, conv: ConvWeights, positions_X: Tensor
    ) -> Tensor:
        return x_XC.new_empty(x_XC.shape)

    def gated_delta_rule(
        self, spec: StateSpec, inputs: DeltaRuleInputs, positions_X: Tensor
    ) -> Tensor:
        return gated_delta_rule_meta(inputs)

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        return positions_X


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of new tensors that are alive: the `current` sum and its `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self.is_counted(leaf):
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.current)
        return result

    def is_counted(self, tensor: Tensor) -> bool:
        return tensor.is_meta

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, bytes = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def on_free(_: Any) -> None:
            del self.alive[key]
            self.current -= bytes

        self.alive[key] = weakref.ref(storage, on_free)
        self.current += bytes


@contextmanager
def track_allocations() -> Iterator[AllocationTracker]:
    tracker = AllocationTracker()
    with tracker:
        yield tracker
