"""Paged attention in plain torch: the definition that every kernel is compared with.

    out[t, n] = sum_j p_j value[j],   p = softmax over the seen keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

Computed sequence by sequence in float32 (float64 for float64 queries), with the gathered pages in one
piece. Nothing here is fast.

Shapes: T query tokens of all sequences, end to end; S sequences; P pages of B slots; M pages a row of
the table; N query heads; K key heads; H size of a key; V size of a value; C keys of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q_TNH: Tensor,
    keys_PBKH: Tensor,
    values_PBKV: Tensor | None,
    tables_SM: Tensor,
    query_starts: Tensor,
    lengths_S: Tensor,
    scale: float,
    value_dim: int,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    max_query: int = 0,
    max_length: int = 0,
) -> Tensor:
    """What each query token attends to, [T, N, V]; zeros for tokens that belong to no sequence."""
    compute = torch.float64 if q_TNH.dtype == torch.float64 else torch.float32
    out_TNV = q_TNH.new_zeros((*q_TNH.shape[:2], value_dim))
    starts = query_starts.tolist()
    for sequence, length in enumerate(lengths_S.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        row = tables_SM[sequence]
        keys_CKH = gather(keys_PBKH, row, length).to(compute) * key_scale
        if values_PBKV is None:
            values_CKV = keys_CKH[..., :value_dim]
        else:
            values_CKV = gather(values_PBKV, row, length).to(compute) * value_scale
        positions = torch.arange(length - (last - first), length, device=q_TNH.device)
        seen_TC = visible(positions, torch.arange(length, device=q_TNH.device), window, chunk)
        out = attend(
            q_TNH[first:last].to(compute), keys_CKH, values_CKV, seen_TC, scale, softcap, sinks_N
        )
        out_TNV[first:last] = out.to(q_TNH.dtype)
    return out_TNV


def gather(pages_PBKH: Tensor, row_M: Tensor, length: int) -> Tensor:
    """The first `length` slots of the pages that a row of the table names, [C, K, H]."""
    block = pages_PBKH.shape[1]
    used = row_M[: -(-length // block)].long()
    return pages_PBKH[used].flatten(0, 1)[:length]


def visible(
    query_positions: Tensor, key_positions: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """Whether each query sees each key: causal, within the window or chunk."""
    query, key = query_positions[:, None], key_positions[None, :]
    seen = key <= query
    if window is not None:
        seen = seen & (query - key < window)
    if chunk is not None:
        seen = seen & (query // chunk == key // chunk)
    return seen


def attend(
    q_TNH: Tensor,
    keys_CKH: Tensor,
    values_CKV: Tensor,
    seen_TC: Tensor,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """One sequence. A sink is a key without a value: it takes its share and gives nothing."""
    tokens, heads = q_TNH.shape[:2]
    group = heads // keys_CKH.shape[1]
    keys_CNH = keys_CKH.repeat_interleave(group, dim=1)
    values_CNV = values_CKV.repeat_interleave(group, dim=1)
    scores_NTC = torch.einsum("tnh,cnh->ntc", q_TNH, keys_CNH) * scale
    if softcap is not None:
        scores_NTC = torch.tanh(scores_NTC / softcap) * softcap
    scores_NTC = scores_NTC.masked_fill(~seen_TC, float("-inf"))
    if sinks_N is not None:
        sink_NT1 = sinks_N.to(scores_NTC.dtype)[:, None, None].expand(heads, tokens, 1)
        scores_NTC = torch.cat((scores_NTC, sink_NT1), dim=-1)
    weights_NTC = scores_NTC.softmax(dim=-1)[..., : keys_CNH.shape[0]]
    return torch.einsum("ntc,cnv->tnv", weights_NTC, values_CNV)


def store_pages(
    k_TKH: Tensor,
    v_TKV: Tensor | None,
    keys_PBKH: Tensor,
    values_PBKV: Tensor | None,
    slots_T: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write new keys and values into their slots; a negative slot is not written."""
    wanted = slots_T >= 0
    slots = slots_T[wanted].long()
    for new, pages, factor in ((k_TKH, keys_PBKH, key_scale), (v_TKV, values_PBKV, value_scale)):
        if new is None or pages is None:
            continue
        block = pages.shape[1]
        rounded = narrowed(new[wanted], pages.dtype, factor)
        pages[slots // block, slots % block] = rounded


def narrowed(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x / scale in a page's dtype; float8 saturates, as kept keys must stay finite."""
    if dtype.itemsize > 1:
        return (x if scale == 1.0 else x.float() / scale).to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)
