"""The attention functions that transformers' modules call.

    query, key, value of one layer ─▶ attend ─▶ KVCache.attend of the step ─▶ attention output

transformers passes no cache to an attention function, so a model's current `Step` is kept here by
the model's number while its forward runs. Under a compiler the call is one opaque operator. The
layer's index is a tensor there: equal layers then share one compiled graph.

Shapes: B batch; T tokens; N query heads; K KV heads; H size of a key; V size of a value; X token
layout of the `KVCache`, [T] or [B, T].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import KVCache

IMPLEMENTATION = "fulgurite"  # the name of `attend` in transformers' attention interface
LAYER_ATTRIBUTE = "fulgurite_layer"  # of an attention module; see `mark_layer`


@dataclass(frozen=True)
class Step:
    """What the attention layers of one forward need."""

    specs: tuple[AttentionSpec, ...]
    cache: KVCache
    positions_X: Tensor


_current_steps: dict[int, Step] = {}  # by model number, while its forward runs


@contextmanager
def use_step(model_number: int, step: Step) -> Iterator[None]:
    """Attention layers of the model use this step inside the block."""
    assert model_number not in _current_steps, "a model runs one forward at a time"
    _current_steps[model_number] = step
    try:
        yield
    finally:
        del _current_steps[model_number]


def mark_layer(module: nn.Module, model_number: int, layer_index: int) -> None:
    """Tell an attention module its model and the index of its spec: int64 [2] on the CPU.

    It is no buffer: it must stay on the CPU when the model moves, and is not saved.
    """
    layer = torch.tensor((model_number, layer_index), device="cpu")
    object.__setattr__(module, LAYER_ATTRIBUTE, layer)


def attend(
    module: nn.Module,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTV: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface; returns [B, T, N, V] and no weights.

    Options are ignored here: `probe.py` has read them into the layer's `AttentionSpec`.
    """
    arguments = (
        query_BNTH, key_BKTH, value_BKTV, options.get("s_aux"), getattr(module, LAYER_ATTRIBUTE)
    )  # fmt: skip
    call = _attend_op if torch.compiler.is_compiling() else _attend
    return call(*arguments), None


def _attend(
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTV: Tensor,
    sinks_N: Tensor | None,
    layer: Tensor,
) -> Tensor:
    model_number, layer_index = layer.tolist()
    step = _current_steps[model_number]
    num_tokens = step.positions_X.shape[-1]  # a compiled decoder may add padding
    num_padded = query_BNTH.shape[2] - num_tokens
    q, k, v = (x.transpose(1, 2)[:, :num_tokens] for x in (query_BNTH, key_BKTH, value_BKTV))
    is_flat = step.positions_X.dim() == 1
    if is_flat:
        q, k, v = q[0], k[0], v[0]
    out_XNV = step.cache.attend(
        step.specs[layer_index],
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        step.positions_X,
        sinks_N,
    )
    out_BTNV = out_XNV[None] if is_flat else out_XNV
    if num_padded:
        out_BTNV = F.pad(out_BTNV, (0, 0, 0, 0, 0, num_padded))
    return out_BTNV.contiguous()


_attend_op = torch.library.custom_op("fulgurite::transformers_attention", _attend, mutates_args=())


@_attend_op.register_fake
def _(query_BNTH: Tensor, key_BKTH: Tensor, value_BKTV: Tensor, *rest: object) -> Tensor:
    batch, heads, tokens, _ = query_BNTH.shape
    return query_BNTH.new_empty((batch, tokens, heads, value_BKTV.shape[-1]))
