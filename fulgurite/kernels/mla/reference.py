"""Multi-head latent attention (MLA) in plain torch: the reference of every kernel.

    c_j, r_j    the normed latent and the rotary key of token j, as cached
    key_j       (W_uk c_j, r_j) and value_j = W_uv c_j for every head; kv_b holds W_uk and W_uv
    out[t, n]   sum_j p_j value_j,  p = softmax_j<=t(scale * (q_nope, rope(q_rope)) . key_j)

In: the operator's arguments. Out: its result, computed sequence by sequence in float32 (float64 for
float64 queries) with expanded keys. Nothing here is fast; a `plan` is not used.

Shapes: T tokens; S sequences; P cache blocks of B slots of W numbers or bytes; M blocks in a row of
the block table; N heads; D size of a query without its rotary part; R the rotary part; H = D + R; I
= R / 2 pairs; C rank of the latent; V size of a value; U = D + V; L = C + R; K keys of one
sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.attention.reference import attention_mask, cast_to_cache_dtype
from fulgurite.kernels.mla.prefill_plan import PrefillPlan

FP8_MAX = 448.0  # of float8_e4m3fn
MIN_SCALE = 2.0**-126
ALIGNMENT = 16  # bytes


class Fp8RowLayout(NamedTuple):
    """Byte offsets of the rotary key and the scale in a slot of an FP8 cache; its size."""

    rope: int
    scale: int
    size: int


def fp8_row_layout(rank: int, rope_dim: int) -> Fp8RowLayout:
    """C numbers of float8_e4m3fn, R of bfloat16, a float32 scale; padded to 16 bytes."""
    rope = _align_up(rank, ALIGNMENT)
    scale = _align_up(rope + 2 * rope_dim, 4)
    return Fp8RowLayout(rope, scale, _align_up(scale + 4, ALIGNMENT))


def _align_up(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


class LatentCache(NamedTuple):
    """Views of a cache: the latents, the rotary keys, and for FP8 the scale of each latent."""

    latents_PBC: Tensor
    ropes_PBR: Tensor
    scales_PB: Tensor | None


def split_latent_cache(cache_PBW: Tensor, rank: int, rope_dim: int) -> LatentCache:
    """A uint8 cache holds FP8 rows; any other holds L = C + R numbers of its own dtype."""
    if cache_PBW.dtype != torch.uint8:
        ropes = cache_PBW[..., rank : rank + rope_dim]
        return LatentCache(cache_PBW[..., :rank], ropes, None)
    row = fp8_row_layout(rank, rope_dim)
    latents = cache_PBW[..., :rank].view(torch.float8_e4m3fn)
    ropes = cache_PBW[..., row.rope : row.rope + 2 * rope_dim].view(torch.bfloat16)
    scales = cache_PBW[..., row.scale : row.scale + 4].view(torch.float32)
    return LatentCache(latents, ropes, scales[..., 0])


def store_mla_cache(
    kv_a_TL: Tensor,
    norm_C: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    cache_PBW: Tensor,
    slot_mapping_T: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Norm the latent, rotate the rotary key, and round both once into their slots."""
    rank = norm_C.shape[0]
    rope_dim = kv_a_TL.shape[1] - rank
    stored = slot_mapping_T >= 0
    slots = slot_mapping_T[stored].long()
    block, slot = slots // cache_PBW.shape[1], slots % cache_PBW.shape[1]
    kv_a = kv_a_TL[stored].to(_compute_dtype(kv_a_TL.dtype))
    c_TC = F.rms_norm(kv_a[:, :rank], (rank,), norm_C.to(kv_a.dtype), eps)
    r_TR = apply_rope(kv_a[:, rank:], cos_TI[stored], sin_TI[stored], interleaved)
    cache = split_latent_cache(cache_PBW, rank, rope_dim)
    cache.ropes_PBR[block, slot] = r_TR.to(cache.ropes_PBR.dtype)
    if cache.scales_PB is None:
        cache.latents_PBC[block, slot] = c_TC.to(cache.latents_PBC.dtype)
        return
    scale_T = fp8_scale(c_TC)
    cache.scales_PB[block, slot] = scale_T
    scaled_TC = c_TC.float() / scale_T[:, None]
    cache.latents_PBC[block, slot] = cast_to_cache_dtype(scaled_TC, torch.float8_e4m3fn, 1.0)


def fp8_scale(c_TC: Tensor) -> Tensor:
    """Scale that maps each token's largest number to 448; 1 for zeros; NaN if not finite."""
    amax_T = c_TC.float().abs().amax(dim=-1) if c_TC.shape[-1] else c_TC.new_zeros(len(c_TC))
    scale_T = (amax_T / FP8_MAX).clamp(min=MIN_SCALE).where(amax_T != 0, 1.0)
    return scale_T.where(amax_T.isfinite(), float("nan"))


def mla_attention(
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
    """Attention output of each query token, [T, N, V]; zeros for tokens of no sequence."""
    compute = _compute_dtype(q_TNH.dtype)
    rope_dim = 2 * cos_TI.shape[-1]
    nope_dim, rank = q_TNH.shape[2] - rope_dim, kv_b_NUC.shape[2]
    sizes = (nope_dim, kv_b_NUC.shape[1] - nope_dim)
    w_uk_NDC, w_uv_NVC = kv_b_NUC.to(compute).split(sizes, dim=1)
    q_TND, q_TNR = q_TNH.to(compute).split((nope_dim, rope_dim), dim=-1)
    q_TNR = apply_rope(q_TNR, cos_TI[:, None], sin_TI[:, None], interleaved)
    cache = split_latent_cache(cache_PBW, rank, rope_dim)
    out_TNV = q_TNH.new_zeros((*q_TNH.shape[:2], w_uv_NVC.shape[1]))
    starts = metadata.query_start_loc.tolist()
    for sequence, length in enumerate(metadata.seq_lens_S.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        blocks_M = metadata.block_table_SM[sequence]
        c_KC, r_KR = gather_latents(cache, blocks_M, length, compute)
        scores_NTK = torch.einsum(
            "tnd,ndc,kc->ntk", q_TND[first:last], w_uk_NDC, c_KC
        ) + torch.einsum("tnr,kr->ntk", q_TNR[first:last], r_KR)
        positions = torch.arange(length - (last - first), length, device=q_TNH.device)
        keys = torch.arange(length, device=q_TNH.device)
        hidden_TK = ~attention_mask(positions, keys, None, None)
        weights_NTK = (scores_NTK * scale).masked_fill(hidden_TK, float("-inf")).softmax(dim=-1)
        out = torch.einsum("ntk,kc,nvc->tnv", weights_NTK, c_KC, w_uv_NVC)
        out_TNV[first:last] = out.to(q_TNH.dtype)
    return out_TNV


def gather_latents(
    cache: LatentCache, blocks_M: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The first `length` latents and rotary keys of a sequence's blocks."""
    block_size = cache.latents_PBC.shape[1]
    used = blocks_M[: -(-length // block_size)].long()

    def gather(values_PB: Tensor) -> Tensor:
        return values_PB[used].flatten(0, 1)[:length].to(dtype)

    c_KC, r_KR = gather(cache.latents_PBC), gather(cache.ropes_PBR)
    if cache.scales_PB is not None:
        c_KC = c_KC * gather(cache.scales_PB)[:, None]
    return c_KC, r_KR


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for pairs (x[i], x[i + I]) or (x[2i], x[2i + 1])."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
