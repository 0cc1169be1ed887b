"""The layers of a pipeline stage: a whole model in, the same model with one stage's weights out.

    stage = choose_stage(model, index, count)     balanced by the bytes of layers, embedding and head
    keep_stage(model, stage)                      in place: what other stages have is dropped

Parameters keep their names, and layers their numbers. A layer of another stage becomes an
`OtherStageLayer`, which passes hidden states on. It keeps the attention or state spec, so that every
stage has the same KV-cache groups and thus the same block tables (`is_local=False`: no memory). It
keeps a place for its router, so that expert loads of all stages have the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import Router
from fulgurite.models.state_spec import StateSpec
from fulgurite.parallel.collectives import shard_range
from fulgurite.parallel.layers import TokenSharding
from fulgurite.parallel.pipeline import PipelineStage, split_stages


class ReceivedHiddenStates(nn.Module):
    """In place of the embedding behind the first stage: memory that takes what the stage before sends.

    With sequence parallelism a rank has the hidden states of its own tokens only.
    """

    def __init__(
        self, hidden_size: int, dtype: torch.dtype, token_sharding: TokenSharding | None
    ) -> None:
        super().__init__()
        self.hidden_size, self.dtype, self.token_sharding = hidden_size, dtype, token_sharding

    def forward(self, ids_X: Tensor) -> Tensor:
        shape = ids_X.shape
        if self.token_sharding is not None:
            self.token_sharding.shape, axis = ids_X.shape, self.token_sharding.axis
            start, stop = shard_range(ids_X.numel(), axis.index, axis.size)
            shape = torch.Size((stop - start,))
        return torch.empty(*shape, self.hidden_size, dtype=self.dtype, device=ids_X.device)


class OtherStageAttention(nn.Module):
    """The attention of a layer that another stage has."""

    def __init__(self, spec: AttentionSpec | StateSpec) -> None:
        super().__init__()
        self.spec = replace(spec, is_local=False)


class OtherStageRouter(nn.Module):
    """The router of a layer that another stage has."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts


class OtherStageLayer(nn.Module):
    """A layer that another stage has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attention: Any = layer.attention
        self.attention = OtherStageAttention(attention.spec)
        self.routers = nn.ModuleList(
            OtherStageRouter(len(module.weight))
            for module in layer.modules()
            if isinstance(module, Router)
        )

    def forward(self, x_XD: Tensor, *rest: Any) -> Tensor:
        return x_XD


def choose_stage(model: CausalLM, index: int, count: int) -> PipelineStage:
    """Stage `index` of `count`; the largest stage has as few bytes as possible."""
    layer_bytes = [_count_bytes(layer) for layer in model.layers]
    first_bytes = _count_bytes(model) - sum(layer_bytes)
    start, stop = split_stages(layer_bytes, count, first_bytes)[index]
    return PipelineStage(index, count, start, stop)


def keep_stage(model: CausalLM, stage: PipelineStage) -> None:
    """Drop the weights of the other stages, in place.

    The first stage has the embedding and the head. Every stage has the final norm, which is small;
    only the last one applies it.
    """
    for number, layer in enumerate(model.layers):
        if number not in stage:
            model.layers[number] = OtherStageLayer(layer)
    if not stage.is_first:
        size, token_sharding = model.config.hidden_size, find_token_sharding(model)
        received: Any = ReceivedHiddenStates(size, model.dtype, token_sharding)
        model.embed_tokens, model.lm_head = received, None
    model.stage = stage


def find_token_sharding(model: nn.Module) -> TokenSharding | None:
    """How tokens are sharded between layers; None: every rank of the tensor axis has all of them."""
    found = (getattr(module, "token_sharding", None) for module in model.modules())
    return next((sharding for sharding in found if sharding is not None), None)


def _count_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
