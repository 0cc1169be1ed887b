# mypy: allow-untyped-defs, allow-incomplete-defs
"""Queries of absorbed latent attention on GPUs: in latent space, and as the kernels take them.

    q_c = U_k^T q of each head, by the library      q_r turned by its token's angles

For FP8 latents queries are float16, which holds e4m3 exactly and is one instruction away from it: each row, both
parts, is divided by a power of two that brings its largest number to 1 or below, and the power goes beside it.

    T  tokens    N  heads    D  plain part    R  rotary part    C  latent rank
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.mla.triton_store_kv import NATIVE, turned

# rotary keys beside FP8 latents are bfloat16, which the interpreter does not multiply
ROPE_KIND = torch.bfloat16 if NATIVE else torch.float16
LEAST = tl.constexpr(2.0**-100)  # of a row's largest number, so that zeros have a power too


class Queries(NamedTuple):
    """What the attention kernels take."""

    latent_TNC: Tensor
    rope_TNR: Tensor
    powers_TN: Tensor | None  # what rows were divided by, for FP8 latents


@triton.jit
def queries_kernel(
    found_ptr, q_ptr, cos_ptr, sin_ptr, latent_ptr, rope_ptr, powers_ptr, rows, q_token, q_head,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, INTERLEAVED: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM (token, head) pairs: the rotary part turned, and for FP8 latents both parts scaled."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    is_row = row < rows
    token, head = row // HEADS, row % HEADS
    from_rope = token * q_token + head * q_head + D
    rope = turned(q_ptr, from_rope, cos_ptr, sin_ptr, token, is_row, R, BR, INTERLEAVED)
    if PACKED:
        column = tl.arange(0, BC)
        at = row[:, None] * C + column[None, :]
        keep = is_row[:, None] & (column < C)[None, :]
        found = tl.load(found_ptr + at, keep, 0.0).to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(found), 1), tl.max(tl.abs(rope), 1))
        power = tl.exp2(tl.ceil(tl.log2(tl.maximum(most, LEAST))))
        found, rope = found / power[:, None], rope / power[:, None]
        tl.store(powers_ptr + row, power, is_row)
        tl.store(latent_ptr + at, found.to(latent_ptr.dtype.element_ty), keep)
    i = tl.arange(0, BR)
    to = rope_ptr + row[:, None] * R + i[None, :]
    tl.store(to, rope.to(rope_ptr.dtype.element_ty), is_row[:, None] & (i < R)[None, :])


def kinds(query: torch.dtype, pages: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """What queries, and their rotary parts, are multiplied in: 16 bits where both sides fit them exactly."""
    if pages.itemsize == 1 and query != torch.float32:
        return torch.float16, ROPE_KIND
    kind = query if query == pages else torch.float32
    return kind, kind


def project_queries(
    q_TNH: Tensor,
    up_key_NDC: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    pages: torch.dtype,
) -> Queries:
    """For latents kept in `pages`."""
    tokens, heads, size = q_TNH.shape
    plain, rank = up_key_NDC.shape[1:]
    rope, packed = size - plain, pages.itemsize == 1
    latent_kind, rope_kind = kinds(q_TNH.dtype, pages)
    found = q_TNH.new_empty((tokens, heads, rank))
    torch.bmm(q_TNH[..., :plain].transpose(0, 1), up_key_NDC, out=found.transpose(0, 1))
    latent = torch.empty_like(found, dtype=latent_kind) if packed else found.to(latent_kind)
    ropes = torch.empty((tokens, heads, rope), dtype=rope_kind, device=q_TNH.device)
    powers = torch.empty((tokens, heads), device=q_TNH.device) if packed else None
    rows = 4 if packed else 16
    queries_kernel[(triton.cdiv(tokens * heads, rows),)](
        found, q_TNH, cos, sin, latent, ropes, cos if powers is None else powers, tokens * heads,
        *q_TNH.stride()[:2], HEADS=heads, D=plain, R=rope,
        BR=max(16, triton.next_power_of_2(rope)), C=rank,
        BC=max(16, triton.next_power_of_2(rank)), INTERLEAVED=interleaved, PACKED=packed, BM=rows,
        num_warps=4 if packed else 1,
    )  # fmt: skip
    return Queries(latent, ropes, powers)
