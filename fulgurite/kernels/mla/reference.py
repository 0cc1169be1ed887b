"""Latent attention in plain torch: the definition that every kernel is compared with.

    c_j, r_j    the normed latent and the turned rotary key of token j, as they are kept
    key_j       (U_k c_j, r_j) and value_j = U_v c_j for every head, U_k and U_v the parts of `up`
    out[t, n]   sum_j p_j value_j,  p = softmax over j up to t of scale * (q[t, n], turned) . key_j

Computed sequence by sequence in float32 (float64 for float64 queries) with expanded keys. Nothing here
is fast.

Shapes: T tokens; S sequences; P pages of B slots of W numbers or bytes; M pages a row of the table;
N heads; D size of a query without its rotary part; R the rotary part; H = D + R; I = R / 2 pairs;
C latent rank; V size of a value; U = D + V; L = C + R; K keys of one sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.attention.reference import narrowed, visible

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 2.0**-126
ALIGNMENT = 16  # bytes


class PackedRow(NamedTuple):
    """Where the parts of a row of FP8 pages begin, and its size, in bytes."""

    rope: int
    scale: int
    size: int


def packed_row(rank: int, rope: int) -> PackedRow:
    """C numbers of float8_e4m3fn, R of bfloat16, their scale in float32; padded to 16 bytes."""
    rope_at = _aligned(rank, ALIGNMENT)
    scale_at = _aligned(rope_at + 2 * rope, 4)
    return PackedRow(rope_at, scale_at, _aligned(scale_at + 4, ALIGNMENT))


def _aligned(count: int, step: int) -> int:
    return -(-count // step) * step


class Parts(NamedTuple):
    """Pages as views: the latents, the rotary keys, and for FP8 pages the scale of each latent."""

    latents_PBC: Tensor
    ropes_PBR: Tensor
    scales_PB: Tensor | None


def parts(pages_PBW: Tensor, rank: int, rope: int) -> Parts:
    """uint8 pages are packed rows; all others hold L = C + R numbers of their own dtype."""
    if pages_PBW.dtype != torch.uint8:
        return Parts(pages_PBW[..., :rank], pages_PBW[..., rank : rank + rope], None)
    row = packed_row(rank, rope)
    latents = pages_PBW[..., :rank].view(torch.float8_e4m3fn)
    ropes = pages_PBW[..., row.rope : row.rope + 2 * rope].view(torch.bfloat16)
    scales = pages_PBW[..., row.scale : row.scale + 4].view(torch.float32)
    return Parts(latents, ropes, scales[..., 0])


def write_latent(
    latent_TL: Tensor,
    norm_C: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    pages_PBW: Tensor,
    slots_T: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Norm the latent, turn the rotary key, round both once into their slots."""
    rank = norm_C.shape[0]
    rope = latent_TL.shape[1] - rank
    wanted = slots_T >= 0
    slots = slots_T[wanted].long()
    page, slot = slots // pages_PBW.shape[1], slots % pages_PBW.shape[1]
    wide = latent_TL[wanted].to(_compute(latent_TL.dtype))
    c_TC = F.rms_norm(wide[:, :rank], (rank,), norm_C.to(wide.dtype), eps)
    r_TR = turned(wide[:, rank:], cos_TI[wanted], sin_TI[wanted], interleaved)
    into = parts(pages_PBW, rank, rope)
    into.ropes_PBR[page, slot] = r_TR.to(into.ropes_PBR.dtype)
    if into.scales_PB is None:
        into.latents_PBC[page, slot] = c_TC.to(into.latents_PBC.dtype)
        return
    scale_T = scale_of(c_TC)
    into.scales_PB[page, slot] = scale_T
    quotient_TC = c_TC.float() / scale_T[:, None]
    into.latents_PBC[page, slot] = narrowed(quotient_TC, torch.float8_e4m3fn, 1.0)


def scale_of(c_TC: Tensor) -> Tensor:
    """What brings the largest number of each token to 448; 1 for zeros; NaN where one is not finite."""
    most_T = c_TC.float().abs().amax(dim=-1) if c_TC.shape[-1] else c_TC.new_zeros(len(c_TC))
    scale_T = (most_T / LARGEST).clamp(min=SMALLEST_SCALE).where(most_T != 0, 1.0)
    return scale_T.where(most_T.isfinite(), float("nan"))


def latent_attention(
    q_TNH: Tensor,
    up_NUC: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    pages_PBW: Tensor,
    tables_SM: Tensor,
    query_starts: Tensor,
    lengths_S: Tensor,
    scale: float,
    interleaved: bool,
    max_query: int = 0,
    max_length: int = 0,
    query_counts: list[int] | None = None,
    key_counts: list[int] | None = None,
) -> Tensor:
    """What each query token attends to, [T, N, V]; zeros for tokens that belong to no sequence."""
    compute = _compute(q_TNH.dtype)
    rope = 2 * cos_TI.shape[-1]
    plain, rank = q_TNH.shape[2] - rope, up_NUC.shape[2]
    up_key_NDC, up_value_NVC = up_NUC.to(compute).split((plain, up_NUC.shape[1] - plain), dim=1)
    q_TND, q_TNR = q_TNH.to(compute).split((plain, rope), dim=-1)
    q_TNR = turned(q_TNR, cos_TI[:, None], sin_TI[:, None], interleaved)
    kept = parts(pages_PBW, rank, rope)
    out_TNV = q_TNH.new_zeros((*q_TNH.shape[:2], up_value_NVC.shape[1]))
    starts = query_starts.tolist()
    for sequence, length in enumerate(lengths_S.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        c_KC, r_KR = read_latent(kept, tables_SM[sequence], length, compute)
        scores_NTK = torch.einsum(
            "tnd,ndc,kc->ntk", q_TND[first:last], up_key_NDC, c_KC
        ) + torch.einsum("tnr,kr->ntk", q_TNR[first:last], r_KR)
        positions = torch.arange(length - (last - first), length, device=q_TNH.device)
        keys = torch.arange(length, device=q_TNH.device)
        hidden_TK = ~visible(positions, keys, None, None)
        weights_NTK = (scores_NTK * scale).masked_fill(hidden_TK, float("-inf")).softmax(dim=-1)
        out = torch.einsum("ntk,kc,nvc->tnv", weights_NTK, c_KC, up_value_NVC)
        out_TNV[first:last] = out.to(q_TNH.dtype)
    return out_TNV


def read_latent(
    kept: Parts, row_M: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The first `length` latents and rotary keys of the pages that a row of the table names."""
    block = kept.latents_PBC.shape[1]
    used = row_M[: -(-length // block)].long()

    def gather(pages: Tensor) -> Tensor:
        return pages[used].flatten(0, 1)[:length].to(dtype)

    c_KC, r_KR = gather(kept.latents_PBC), gather(kept.ropes_PBR)
    return (c_KC if kept.scales_PB is None else c_KC * gather(kept.scales_PB)[:, None]), r_KR


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin); a pair is (x[i], x[i + I]), or (x[2i], x[2i + 1])."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def _compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
