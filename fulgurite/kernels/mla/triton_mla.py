# mypy: allow-untyped-defs, allow-incomplete-defs
"""MLA on GPUs: sequences with few new tokens absorbed, long ones expanded.

In: the arguments of `mla.ops.mla_attention` on a GPU. Out: [T, N, V], or `NotImplemented`. Decode
steps, and every call whose lengths the host does not know, are absorbed without a device sync, so a
CUDA graph can capture them. In a step with prompts the host knows the lengths. A `PrefillPlan`, made
once a step, then says what is expanded and what is absorbed; no layer copies anything from the host
or loops over sequences. In deterministic mode all sequences are absorbed, by one kernel and config.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.mla import triton_decode_sm90
from fulgurite.kernels.mla.prefill_plan import MLASizes, PrefillPlan, plan_prefill
from fulgurite.kernels.mla.reference import LatentCache, split_latent_cache
from fulgurite.kernels.mla.triton_absorb import absorb_queries, multiply_heads
from fulgurite.kernels.mla.triton_decode import attend_absorbed
from fulgurite.kernels.mla.triton_prefill import (
    allocate_expanded_keys,
    allocate_state,
    attend_expanded,
    gather_latents,
)
from fulgurite.kernels.mla.triton_store_kv import SUPPORTED_DTYPES, is_rope_supported


class LayerArguments(NamedTuple):
    """The arguments that all sequences of a call share."""

    kv_b_NUC: Tensor
    cache: LatentCache
    scale: float
    interleaved: bool
    nope_dim: int


@torch.no_grad()
def mla_attention(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    interleaved: bool,
    plan: PrefillPlan | None = None,
) -> Any:
    """`mla.ops.mla_attention`."""
    if q.dtype not in SUPPORTED_DTYPES or kv_b.dtype != q.dtype or not is_rope_supported(cos, sin):
        return NotImplemented
    if any(x.stride(-1) != 1 for x in (q, kv_b, cache)) or scale <= 0:
        return NotImplemented
    if cache.dtype == torch.uint8 and any(stride % 16 for stride in cache.stride()[:2]):
        return NotImplemented
    rope_dim = 2 * cos.shape[1]
    nope_dim = q.shape[2] - rope_dim
    if q.numel() == 0 or metadata.seq_lens_S.shape[0] == 0 or metadata.max_query_len == 0:
        return q.new_zeros((*q.shape[:2], kv_b.shape[1] - nope_dim))
    views = split_latent_cache(cache, kv_b.shape[2], rope_dim)
    layer = LayerArguments(kv_b, views, scale, interleaved, nope_dim)
    if plan is None:
        sizes = MLASizes(kv_b.shape[2], nope_dim, rope_dim, kv_b.shape[1] - nope_dim)
        plan = plan_prefill(metadata, sizes, q.device)
    if plan is None or plan.is_one_call:
        return _attend_absorbed(layer, q, cos, sin, metadata)
    return _attend_planned(layer, q, cos, sin, metadata, plan)


def _attend_planned(
    layer: LayerArguments,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    metadata: AttentionMetadata,
    plan: PrefillPlan,
) -> Tensor:
    """Every chunk of expanded keys, then every group of absorbed sequences."""
    shape = (*q.shape[:2], layer.kv_b_NUC.shape[1] - layer.nope_dim)
    out_TNV = q.new_empty(shape) if plan.num_tokens == len(q) else q.new_zeros(shape)
    _attend_expanded(layer, q, cos, sin, metadata, plan, out_TNV)
    for tokens, subset in ((group.tokens, group.metadata) for group in plan.absorbed):
        if isinstance(tokens, slice):
            _attend_absorbed(layer, q[tokens], cos[tokens], sin[tokens], subset, out_TNV[tokens])
        else:
            gathered = [x.index_select(0, tokens) for x in (q, cos, sin)]
            out = _attend_absorbed(layer, gathered[0], gathered[1], gathered[2], subset)
            out_TNV.index_copy_(0, tokens, out)
    return out_TNV


def _attend_expanded(
    layer: LayerArguments,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    metadata: AttentionMetadata,
    plan: PrefillPlan,
    out: Tensor,
) -> None:
    """Gather, expand and attend, chunk by chunk."""
    if not plan.chunks:
        return
    max_keys, (heads, value_dim) = max(chunk.num_keys for chunk in plan.chunks), out.shape[1:]
    keys = allocate_expanded_keys(max_keys, layer.kv_b_NUC, 2 * cos.shape[1], q.dtype)
    state = allocate_state(plan.num_state_tokens, heads, value_dim, q.device)
    kv_b_CM = layer.kv_b_NUC.flatten(0, 1).t()
    for chunk in plan.chunks:
        count = chunk.num_keys
        gather_latents(layer.cache, metadata.block_table_SM, chunk.gather_tiles, keys)
        torch.mm(keys.c_KC[:count], kv_b_CM, out=keys.kv_KNU[:count].flatten(1))
        attend_expanded(
            q, cos, sin, chunk, plan.block_m, keys, out, state, layer.scale, layer.interleaved
        )


def _attend_absorbed(
    layer: LayerArguments,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    metadata: AttentionMetadata,
    out_TNV: Tensor | None = None,
) -> Tensor:
    """W_uv (attention of W_uk^T q to the latents)."""
    w_uk_NDC, w_uv_NVC = layer.kv_b_NUC[:, : layer.nope_dim], layer.kv_b_NUC[:, layer.nope_dim :]
    cache_dtype = layer.cache.latents_PBC.dtype
    queries = absorb_queries(q, w_uk_NDC, cos, sin, layer.interleaved, cache_dtype)
    assert metadata.max_query_len is not None, "the operator sets it"
    rows = metadata.max_query_len * q.shape[1]
    # in deterministic mode one kernel takes few rows and many
    use_sm90 = not is_deterministic() and triton_decode_sm90.is_supported(
        queries, layer.cache, rows
    )
    attend = triton_decode_sm90.attend_absorbed_sm90 if use_sm90 else attend_absorbed
    latent_TNC = attend(queries, layer.cache, metadata, layer.scale, q.dtype)
    if out_TNV is None:
        out_TNV = q.new_empty((*q.shape[:2], w_uv_NVC.shape[1]))
    multiply_heads(latent_TNC, w_uv_NVC.mT, out_TNV)
    return out_TNV
