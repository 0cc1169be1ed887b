"""`AttentionSpec`: the shape and the mask of one layer's attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What a KV cache needs to know about the attention of one layer.

    With `is_mla` the layer has one key per token and no values: a value is the first `value_dim`
    elements of its key. Then `mla_head_dims` are the sizes of a head's query without RoPE and of its
    value. An FP8 cache stores keys divided by `key_scale` and values divided by `value_scale`.
    Without `is_local` another pipeline stage has the layer, and its keys.
    """

    layer_index: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None = None
    chunk_size: int | None = None
    softcap: float | None = None
    is_mla: bool = False
    key_scale: float = 1.0
    value_scale: float = 1.0
    mla_head_dims: tuple[int, int] | None = None
    is_local: bool = True


def build_attention_mask(
    spec: AttentionSpec, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """Whether query [.., T] attends to key [.., S]: causal, within the sliding window or chunk."""
    query, key = query_positions[..., :, None], key_positions[..., None, :]
    mask = (key >= 0) & (key <= query)
    if spec.sliding_window is not None:
        mask = mask & (query - key < spec.sliding_window)
    if spec.chunk_size is not None:
        mask = mask & (query // spec.chunk_size == key // spec.chunk_size)
    return mask
