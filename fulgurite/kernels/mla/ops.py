"""Multi-head latent attention (MLA, DeepSeek) over a paged cache of latents.

    store_mla_cache   norms a new token's latent, rotates its rotary key, and caches both
    mla_attention     rotates the queries and attends to the cache

A token caches L = C + R numbers for all heads: its latent c, from which every head's key and value
follow (key = (W_uk c, r), value = W_uv c), and one rotary key r. There are two ways to attend to
them:

    absorbed   (W_uk^T q, q_r) . (c, r), then W_uv on the result: no key is expanded. A pair of a
               query and a key costs 2C + R multiply-adds per head, a query C (D + V) more.
    expanded   keys and values of each head first, C (D + V) multiply-adds per key and head; a pair
               then costs D + R + V, a third.

So decode tokens, and a few new tokens, are absorbed. Long prompts are expanded, with the cached
prefix before them. `tuning.mla.should_expand` decides for each sequence.

Caches are float32, bfloat16 or float16, [P, B, C + R]; or uint8, [P, B, bytes], with an FP8 latent,
its own scale and a bfloat16 rotary key per slot (`reference.fp8_row_layout`; 656 bytes for C = 512,
R = 64, against 1152 in 16 bits).

Three implementations: plain torch (`reference`), C++ (`cpu`) and Triton (`triton_mla`). During
graph capture the functions are the operators `fulgurite::store_mla_cache` and
`fulgurite::mla_attention`.

Shapes: T tokens; S sequences; P cache blocks of B slots of W numbers or bytes; M blocks in a row of
the block table; N heads; D size of a query without its rotary part; R the rotary part; H = D + R; I
= R / 2 pairs; C rank of the latent; V size of a value; U = D + V; L = C + R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.attention.metadata import (
    AttentionMetadata,
    as_contiguous,
    check_metadata,
    check_slot_mapping,
    complete_metadata,
)
from fulgurite.kernels.mla import cpu, reference, triton_mla, triton_store_kv
from fulgurite.kernels.mla.prefill_plan import MLASizes, PrefillPlan, plan_prefill
from fulgurite.kernels.mla.triton_prefill import allocate_expanded_keys, allocate_state
from fulgurite.kernels.tuning.heuristics import heuristics_for

# device type -> kernel with the operator's arguments; it may return NotImplemented
MLA_ATTENTION_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.mla_attention,
    "cuda": triton_mla.mla_attention,
}
STORE_MLA_CACHE_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.store_mla_cache,
    "cuda": triton_store_kv.store_mla_cache,
}

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def mla_slot_shape(rank: int, rope_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Width and dtype of a cache slot that stores latents in `dtype`; any float8 is an FP8 row."""
    if dtype.itemsize > 1:
        return rank + rope_dim, dtype
    return reference.fp8_row_layout(rank, rope_dim).size, torch.uint8


def mla_attention_meta(q_TNH: Tensor, kv_b_NUC: Tensor, value_dim: int) -> Tensor:
    """An empty result; allocates what a GPU needs to expand keys. For memory planning.

    These are the buffers of one chunk of keys (`prefill_plan.py`), and the softmax state of tokens
    whose keys are in several chunks. Groups of absorbed sequences need no more.
    """
    max_keys = heuristics_for(kv_b_NUC.device).mla_max_expanded_keys
    rope_dim = q_TNH.shape[-1] - (kv_b_NUC.shape[1] - value_dim)
    out_TNV = q_TNH.new_empty((*q_TNH.shape[:2], value_dim))
    tokens, heads = q_TNH.shape[:2]
    _buffers = (
        allocate_expanded_keys(max_keys, kv_b_NUC, rope_dim, q_TNH.dtype),
        allocate_state(tokens, heads, value_dim, q_TNH.device),
    )
    return out_TNV


def store_mla_cache(
    kv_a_TL: Tensor,
    norm_C: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    cache_PBW: Tensor,
    slot_mapping_T: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """Write the latents and rotary keys of new tokens into the cache, in place.

    kv_a_TL          the down projection: C numbers that are normed here, R that are rotated here
    norm_C           the weight of the latent's RMS norm
    slot_mapping_T   int64; token t goes to block slot // B, slot slot % B; negative: not stored
    """
    rank, rope_dim = norm_C.shape[0], 2 * cos_TI.shape[-1]
    if kv_a_TL.dim() != 2 or kv_a_TL.shape[1] != rank + rope_dim:
        raise ArgumentError(
            f"kv_a {list(kv_a_TL.shape)} for a rank of {rank} and rotary keys of {rope_dim}",
            next=f"kv_a must be [T, {rank + rope_dim}]",
        )
    _check_cache(cache_PBW, rank, rope_dim)
    _check_rope(cos_TI, sin_TI, kv_a_TL.shape[0])
    check_slot_mapping(slot_mapping_T, kv_a_TL.shape[0])
    call = _store_mla_cache_op if torch.compiler.is_compiling() else _dispatch_store_mla_cache
    call(kv_a_TL, norm_C, cos_TI, sin_TI, cache_PBW, slot_mapping_T, eps, interleaved)


def mla_attention(
    q_TNH: Tensor,
    kv_b_NUC: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    cache_PBW: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    interleaved: bool,
    plan: PrefillPlan | None = None,
) -> Tensor:
    """Attention output of each query token, [T, N, V]; zeros for tokens of no sequence.

    q_TNH      D numbers as they are, then R that are rotated here
    kv_b_NUC   the up projection of each head: D rows for its key, V for its value
    metadata   a GPU expands only where `query_lens` and `seq_lens` are known
    plan       `make_prefill_plan` of this step, which all layers share; None: each call makes its own
    """
    metadata = complete_metadata(metadata, q_TNH.shape[0], cache_PBW.shape[1])
    _check_attention(q_TNH, kv_b_NUC, cos_TI, sin_TI, cache_PBW, metadata)
    if torch.compiler.is_compiling():
        return _mla_attention_op(
            q_TNH, kv_b_NUC, cos_TI, sin_TI, cache_PBW, *metadata, scale, interleaved
        )
    return _dispatch_mla_attention(
        q_TNH, kv_b_NUC, cos_TI, sin_TI, cache_PBW, metadata, scale, interleaved, plan
    )


def make_prefill_plan(
    metadata: AttentionMetadata, sizes: MLASizes, device: torch.device
) -> PrefillPlan | None:
    """What `mla_attention` of this step may be given as `plan`; None where its kernel needs none."""
    if MLA_ATTENTION_KERNELS.get(device.type) is not triton_mla.mla_attention:
        return None  # the C++ kernel reads lengths as it runs
    return plan_prefill(metadata, sizes, device)


def _check_attention(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
) -> None:
    rope_dim = 2 * cos.shape[-1]
    if q.dim() != 3 or kv_b.dim() != 3 or q.shape[1] != kv_b.shape[0]:
        raise ArgumentError(
            f"queries {list(q.shape)} and kv_b {list(kv_b.shape)} don't fit together",
            next="queries are [T, N, D + R], kv_b [N, D + V, C]",
        )
    if q.shape[2] < rope_dim or kv_b.shape[1] < q.shape[2] - rope_dim:
        raise ArgumentError(
            f"queries of {q.shape[2]} numbers, {rope_dim} of them rotary, and {kv_b.shape[1]} rows "
            "of kv_b per head don't fit together"
        )
    _check_rope(cos, sin, q.shape[0])
    _check_cache(cache, kv_b.shape[2], rope_dim)
    check_metadata(metadata)


def _check_rope(cos: Tensor, sin: Tensor, tokens: int) -> None:
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != tokens:
        raise ArgumentError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} for {tokens} tokens",
            next="both must be [T, R / 2]",
        )


def _check_cache(cache: Tensor, rank: int, rope_dim: int) -> None:
    if cache.dtype not in CACHE_DTYPES:
        raise ArgumentError(f"MLA cache of {cache.dtype}", next=f"use one of {CACHE_DTYPES}")
    width = rank + rope_dim
    if cache.dtype == torch.uint8:
        width = reference.fp8_row_layout(rank, rope_dim).size
    if cache.dim() != 3 or cache.shape[2] != width:
        raise ArgumentError(
            f"MLA cache {list(cache.shape)} for a rank of {rank} and rotary keys of {rope_dim}",
            next=f"a cache of {cache.dtype} must be [P, B, {width}]",
        )


def _dispatch_mla_attention(
    q_TNH: Tensor,
    kv_b_NUC: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    cache_PBW: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    interleaved: bool,
    plan: PrefillPlan | None = None,
) -> Tensor:
    """Run the kernel of this device."""
    tensors = (q_TNH, kv_b_NUC, cos_TI, sin_TI, cache_PBW)
    arguments = (*tensors, as_contiguous(metadata), scale, interleaved, plan)
    out: Tensor = registry.dispatch(
        MLA_ATTENTION_KERNELS, q_TNH.device, reference.mla_attention, *arguments
    )
    return out


def _mla_attention_schema(
    q_TNH: Tensor,
    kv_b_NUC: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    cache_PBW: Tensor,
    block_table_SM: Tensor,
    query_start_loc: Tensor,
    seq_lens_S: Tensor,
    max_query_len: int,
    max_seq_len: int,
    query_lens: list[int] | None,
    seq_lens: list[int] | None,
    scale: float,
    interleaved: bool,
) -> Tensor:
    """`mla_attention` with a flat argument list, which a torch operator's schema needs."""
    metadata = AttentionMetadata(
        block_table_SM,
        query_start_loc,
        seq_lens_S,
        max_query_len,
        max_seq_len,
        query_lens,
        seq_lens,
    )
    tensors = (q_TNH, kv_b_NUC, cos_TI, sin_TI, cache_PBW)
    return _dispatch_mla_attention(*tensors, metadata, scale, interleaved)


def _dispatch_store_mla_cache(
    kv_a_TL: Tensor,
    norm_C: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    cache_PBW: Tensor,
    slot_mapping_T: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Run the kernel of this device."""
    arguments = (kv_a_TL, norm_C, cos_TI, sin_TI, cache_PBW, slot_mapping_T, eps, interleaved)
    registry.dispatch(
        STORE_MLA_CACHE_KERNELS, kv_a_TL.device, reference.store_mla_cache, *arguments
    )


_mla_attention_op = torch.library.custom_op(
    "fulgurite::mla_attention", _mla_attention_schema, mutates_args=()
)
_store_mla_cache_op = torch.library.custom_op(
    "fulgurite::store_mla_cache", _dispatch_store_mla_cache, mutates_args=("cache_PBW",)
)


@_mla_attention_op.register_fake
def _(q_TNH, kv_b_NUC, cos_TI, *rest):  # type: ignore[no-untyped-def]
    value_dim = kv_b_NUC.shape[1] - (q_TNH.shape[2] - 2 * cos_TI.shape[-1])
    return q_TNH.new_empty((q_TNH.shape[0], q_TNH.shape[1], value_dim))


@_store_mla_cache_op.register_fake
def _(*args):  # type: ignore[no-untyped-def]
    return None
