# mypy: allow-untyped-defs, allow-incomplete-defs
"""Latent attention on GPUs: short pieces of sequences absorbed, long ones expanded.

In: the arguments of `kernels.mla.latent_attention` on a GPU. Out: [T, N, V]. Decode steps (and every call whose
counts the host does not know) are absorbed as they are, without a sync, so a CUDA graph can hold them. In a step
with prompts the host knows who has how many tokens: the few-token sequences are absorbed together, each long one
is expanded a piece of keys at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.mla import triton_decode_sm90
from fulgurite.kernels.mla.ops import EXPANDED_KEYS, expands
from fulgurite.kernels.mla.reference import Parts, parts
from fulgurite.kernels.mla.triton_absorb import project_queries
from fulgurite.kernels.mla.triton_decode import attend_absorbed
from fulgurite.kernels.mla.triton_prefill import attend_expanded, empty_state, gather
from fulgurite.kernels.mla.triton_store_kv import DTYPES, plain_angles


class Call(NamedTuple):
    """The arguments that every sequence shares, with the pages taken apart."""

    up_NUC: Tensor
    kept: Parts
    tables_SM: Tensor
    lengths_S: Tensor
    scale: float
    interleaved: bool
    plain: int
    max_length: int


@torch.no_grad()
def latent_attention(
    q: Tensor,
    up: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    interleaved: bool,
    max_query: int,
    max_length: int,
    query_counts: list[int] | None,
    key_counts: list[int] | None,
) -> Any:
    """`kernels.mla.latent_attention`."""
    if q.dtype not in DTYPES or up.dtype != q.dtype or not plain_angles(cos, sin):
        return NotImplemented
    if any(x.stride(-1) != 1 for x in (q, up, pages)) or scale <= 0:
        return NotImplemented
    if pages.dtype == torch.uint8 and any(step % 16 for step in pages.stride()[:2]):
        return NotImplemented
    rope = 2 * cos.shape[1]
    plain = q.shape[2] - rope
    if q.numel() == 0 or lengths.shape[0] == 0 or max_query == 0:
        return q.new_zeros((*q.shape[:2], up.shape[1] - plain))
    kept = parts(pages, up.shape[2], rope)
    call = Call(up, kept, tables, lengths, scale, interleaved, plain, max_length)
    long = _long(call, rope, query_counts or [], key_counts or [])
    if not long:
        return _absorbed(call, q, cos, sin, starts, max_query)
    assert query_counts is not None and key_counts is not None, "long ones are found by the counts"
    return _mixed(call, q, cos, sin, long, query_counts, key_counts)


def _long(call: Call, rope: int, query_counts: list[int], key_counts: list[int]) -> list[int]:
    """The sequences whose keys are better expanded."""
    heads_up, rank = call.up_NUC.shape[1:]
    sizes = (rank, call.plain, rope, heads_up - call.plain)
    counts = zip(query_counts, key_counts, strict=True)
    return [s for s, (new, length) in enumerate(counts) if expands(new, length, *sizes)]


def _absorbed(
    call: Call, q: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, max_query: int
) -> Tensor:
    """U_v (attention of U_k^T q to the latents)."""
    up_key_NDC, up_value_NVC = call.up_NUC[:, : call.plain], call.up_NUC[:, call.plain :]
    kind = call.kept.latents_PBC.dtype
    queries = project_queries(q, up_key_NDC, cos, sin, call.interleaved, kind)
    on_hopper = triton_decode_sm90.fits(queries, call.kept, max_query * q.shape[1])
    attend = triton_decode_sm90.attend_hopper if on_hopper else attend_absorbed
    found_TNC = attend(
        queries, call.kept, call.tables_SM, starts, call.lengths_S, call.scale, max_query,
        call.max_length, q.dtype,
    )  # fmt: skip
    out_TNV = q.new_empty((*q.shape[:2], up_value_NVC.shape[1]))
    torch.bmm(found_TNC.transpose(0, 1), up_value_NVC.mT, out=out_TNV.transpose(0, 1))
    return out_TNV


def _mixed(
    call: Call,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    long: list[int],
    query_counts: list[int],
    key_counts: list[int],
) -> Tensor:
    """Long sequences one by one; the others gathered into a call of their own."""
    out_TNV = q.new_zeros((*q.shape[:2], call.up_NUC.shape[1] - call.plain))
    starts = [0]
    for count in query_counts:
        starts.append(starts[-1] + count)
    for s in long:
        own = slice(starts[s], starts[s + 1])
        row = call.tables_SM[s]
        _expand(call, q[own], cos[own], sin[own], row, key_counts[s], out_TNV[own])
    few = [s for s, count in enumerate(query_counts) if count and s not in set(long)]
    if few:
        tokens = [t for s in few for t in range(starts[s], starts[s + 1])]
        ends = [0]
        for s in few:
            ends.append(ends[-1] + query_counts[s])
        at = torch.tensor(tokens, device=q.device)
        rows = torch.tensor(few, device=q.device)
        part = call._replace(
            tables_SM=call.tables_SM[rows],
            lengths_S=call.lengths_S[rows],
            max_length=max(key_counts[s] for s in few),
        )
        new_starts = torch.tensor(ends, dtype=torch.int32, device=q.device)
        most = max(query_counts[s] for s in few)
        out_TNV[at] = _absorbed(part, q[at], cos[at], sin[at], new_starts, most)
    return out_TNV


def _expand(
    call: Call, q: Tensor, cos: Tensor, sin: Tensor, row_M: Tensor, length: int, out: Tensor
) -> None:
    """One sequence, a piece of at most EXPANDED_KEYS keys at a time, in whole pages."""
    page = call.kept.latents_PBC.shape[1]
    each = max(EXPANDED_KEYS // page, 1) * page
    tokens, heads, value = out.shape
    state = empty_state(tokens if length > each else 0, heads, value, q.device)
    for first in range(0, length, each):
        count = min(each, length - first)
        c_KC, r_KR = gather(call.kept, row_M[first // page :], count, q.dtype)
        up_KNU = (c_KC @ call.up_NUC.flatten(0, 1).t()).unflatten(1, (q.shape[1], -1))
        before = length - q.shape[0]
        attend_expanded(
            q, cos, sin, up_KNU, r_KR, out, state, call.scale, call.interleaved,
            before, first, first + count == length,
        )  # fmt: skip
