"""Peak activation memory of a step: a model on the meta device in, bytes out.

The largest step runs on the meta device, where tensors have shapes and no memory. A dispatch mode
tracks which tensors are alive at once. A stand-in KV cache returns attention outputs of the right
shape. The model may be one rank's shard: its collectives allocate and send nothing.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs
from fulgurite.kernels.linear_attention.ops import gated_delta_rule_meta
from fulgurite.kernels.mla.ops import mla_attention_meta
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import ConvWeights, UnpagedKVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.mla import MLAInputs, attend_absorbed
from fulgurite.models.state_spec import StateSpec
from fulgurite.models.transformers_backend.model import TransformersModel
from fulgurite.parallel.context import ContextParallel
from fulgurite.parallel.dispatch.dispatcher import is_sized
from fulgurite.parallel.mesh import Axis


def activation_bytes(model: CausalLM, tokens: int, rows: int, context_parallel: int = 1) -> int:
    """Peak bytes of a step of up to `tokens` tokens that computes the logits of `rows` of them.

    With experts on other ranks (meta_dispatch.py), a smaller step may need more: it is run, too. A
    rank has 1 / `context_parallel` of the tokens.
    """
    assert model.device.type == "meta", "activation_bytes runs a step on the meta device"
    model = _deduplicate_layers(model)
    local = cdiv(tokens, context_parallel)
    return max(
        _measure_step(model, size, min(rows, tokens), _NullCache(context_parallel))
        for size in (local, *_critical_steps(model, local))
    )


def _measure_step(model: CausalLM, tokens: int, rows: int, cache: _NullCache) -> int:
    _set_step_tokens(model, tokens)
    with torch.inference_mode(), track_allocations() as tracker, torch.device("meta"):
        ids = torch.zeros(tokens, dtype=torch.long)
        positions = torch.zeros(tokens, dtype=torch.long)
        if model.stage is None:
            hidden = model.compute_hidden_states(ids, positions, cache)
            selected = hidden[torch.zeros(rows, dtype=torch.long)]
        else:
            hidden = _run_stage(model, ids, positions, cache)
            # From the last stage: those of sampled tokens, and of tokens of prompts.
            received = hidden.new_empty(rows + tokens, hidden.shape[1])
            selected = received[:rows]
        if model.stage is None or model.stage.is_first:
            logits = model.compute_logits(selected).float()
            del hidden
            logits.clone()  # with bias, mask and penalties
    return tracker.peak


def _run_stage(model: CausalLM, ids: Tensor, positions: Tensor, cache: _NullCache) -> Tensor:
    """The hidden states behind the layers of a pipeline stage."""
    assert model.stage is not None, "the model has all layers"
    x, cos_sins = model.embed(ids, positions, cache)  # or room for what is received
    return model.run_layers(x, positions, cos_sins, cache)


def _set_step_tokens(model: CausalLM, tokens: int) -> None:
    """Tell the dispatchers the size of the step, as an engine does; other ranks have no more."""
    ranks = _count_token_ranks(model)
    for module in model.modules():
        dispatcher = getattr(module, "dispatcher", None)
        if dispatcher is not None and is_sized(dispatcher):
            dispatcher.set_step_tokens(cdiv(tokens, ranks))


def _critical_steps(model: CausalLM, tokens: int) -> list[int]:
    """Smaller steps that may need more memory than one of `tokens` tokens."""
    steps, ranks = set(), _count_token_ranks(model)
    local = cdiv(tokens, ranks)
    for module in model.modules():
        find = getattr(getattr(module, "dispatcher", None), "critical_tokens", None)
        if find is not None:
            for parts in {1, getattr(module, "micro_batches", 1)}:  # each is padded by itself
                steps |= {parts * count for count in find(cdiv(local, parts))}
    return [ranks * count for count in sorted(steps)]


def _count_token_ranks(model: CausalLM) -> int:
    """The number of tensor ranks that share the tokens of a step; 1 without sequence parallelism."""
    shardings = (getattr(module, "token_sharding", None) for module in model.modules())
    return max((sharding.axis.size for sharding in shardings if sharding is not None), default=1)


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
    """A KV cache that stores nothing. Its outputs have the right shape and no values.

    With context parallelism it gathers inputs and merges outputs as the engine's cache does.
    """

    def __init__(self, context_parallel: int = 1) -> None:
        self.context: ContextParallel | None = None
        if context_parallel > 1:
            ranks, group = tuple(range(context_parallel)), dist.ProcessGroup(0, context_parallel)
            self.context = ContextParallel(Axis("context", ranks, 0, group))

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        if self.context is None:
            return q_XNH.new_empty(*q_XNH.shape[:-1], spec.value_dim)
        new = [x for x in (q_XNH, k_XKH, v_XKV) if x is not None]
        tokens = self.context.count * q_XNH.shape[0]
        gathered = self.context.gather_inputs(new, tokens)
        out_TNV = q_XNH.new_empty(tokens, spec.num_heads, spec.value_dim)
        lse_TN = q_XNH.new_empty(tokens, spec.num_heads, dtype=torch.float32)
        merged_LNV = self.context.merge_outputs(out_TNV, lse_TN)
        del gathered  # as long as in the engine's cache
        return merged_LNV

    def attend_mla(self, spec: AttentionSpec, step: MLAInputs, positions_X: Tensor) -> Tensor:
        if self.context is not None:
            return attend_absorbed(self.attend, spec, step, positions_X)
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports TorchDynamo (0.7 s) at the first op, to keep it from capturing this

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
