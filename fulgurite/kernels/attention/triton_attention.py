# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged attention on GPUs: one kernel for prefill and decode, flash-style.

    out[t, n] = sum_j p_j value[j],   p = softmax over the seen keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

In: the arguments of `kernels.attention`, on a GPU. Out: the result, or `NotImplemented`. Here tiles are chosen
and memory is made; the kernel itself is in `attention_kernel.py`.

    T  query tokens    S  sequences    N  query heads    K  key heads    G  N / K    H  key    V  value
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.attention.triton_kernel import attention_kernel
from fulgurite.kernels.common.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.common.pdl_region import in_chain
from fulgurite.kernels.common.triton_counters import take_counters
from fulgurite.kernels.common.triton_pdl import early
from fulgurite.kernels.elementwise.ops import HeadNorms, Heads, Pages
from fulgurite.kernels.elementwise.triton_elementwise import DTYPES, angles_fit, pages_fit
from fulgurite.kernels.tuning.gemm import processors

LEAST_SPAN = 128  # keys worth a program of their own
TOGETHER = 8  # spans that are merged at once
MERGED_NUMBERS = 8192  # what a program merges at once: 64 registers of each of 128 threads


@dataclass(frozen=True)
class Plan:
    """Tile sizes and how contexts are split."""

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int


def plan(
    rows: int,
    key_dim: int,
    value_dim: int,
    wide: bool,
    programs: int,
    longest: int,
    processors: int,
) -> Plan:
    """For `rows` rows a sequence and key head, and `programs` of those.

    Contexts are split until every processor has two programs, since a program waits for memory most
    of its time. Measured on an H200 (`benchmarks/sweep_decode.py`): many programs want few warps each; in
    prefill 64 x 64 beat 128 rows and 128 keys, with 290 to 350 TFLOP/s.
    """
    large = key_dim > 256
    if rows <= 16:
        if programs >= 12 * processors:
            tile = Plan(16, 32, 1, 2 if large or wide else 4, 1)
        elif programs >= 2 * processors:
            tile = Plan(16, 32, 2, 2 if large or wide else 3, 1)
        else:
            tile = Plan(16, 32 if large or wide else 64, 4, 2, 1)
    else:
        side = 32 if large or wide else 64
        tile = Plan(side, side, 4, 2, 1)
    count = programs * cdiv(rows, tile.rows)
    splits = 1
    if rows <= 64:
        splits = min(cdiv(2 * processors, max(count, 1)), cdiv(longest, LEAST_SPAN))
    return Plan(tile.rows, tile.keys, tile.warps, tile.stages, max(min(splits, 64), 1))


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    value_dim: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_scale: float,
    value_scale: float,
    max_query: int,
    max_length: int,
    fresh: tuple[Heads, Tensor] | None = None,
) -> Any:
    """`kernels.attention.paged_attention`; with `fresh` heads and their slots it stores them."""
    if q.dtype not in DTYPES or q.stride(-1) != 1 or keys.stride(-1) != 1 or scale * key_scale <= 0:
        return NotImplemented
    if values is not None and (values.dtype != keys.dtype or values.stride(-1) != 1):
        return NotImplemented
    tokens, heads, size = q.shape
    sequences, key_heads = lengths.shape[0], keys.shape[2]
    if q.numel() == 0 or sequences == 0 or max_query == 0:
        return torch.zeros((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    new, slots = fresh or (_NOTHING_NEW, lengths)
    made = layout(
        q.device, q.dtype, keys.dtype, (heads, key_heads, size, value_dim), keys.shape[1], sequences,
        max_query, max_length, window, chunk, softcap is not None,
        (values is None, sinks is not None, fresh is not None),
        (new.norms is not None, new.cos is not None, new.interleaved), in_chain(),
    )  # fmt: skip
    splits = made.splits
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    parts = tops = sums = counters = out
    if splits > 1:
        numbers = tokens * heads * splits
        parts = torch.empty(numbers * made.constants["BV"], device=q.device)
        tops, sums = torch.empty(2, numbers, device=q.device).unbind(0)
        counters = take_counters(q.device, sequences * made.tiles * key_heads)
    new_k, new_v = (q, q) if fresh is None else (new.k_XKH, new.v_XKV)
    norms = new.norms or HeadNorms(q, q, 0.0, 0.0)
    cos, sin = (q, q) if new.cos is None or new.sin is None else (new.cos, new.sin)
    pages_of_values = keys if values is None else values
    attention_kernel[made.grid](
        q, keys, pages_of_values, tables, starts, lengths, q if sinks is None else sinks, out,
        parts, tops, sums, counters,
        scale * key_scale, softcap or 1.0, key_scale if values is None else value_scale, window or 0,
        chunk or 0, made.tiles, splits, tokens, sequences,
        *q.stride()[:2], tables.stride(0), *keys.stride()[:3], *pages_of_values.stride()[:3],
        new_k, new_v, slots, norms.query, norms.key, cos, sin, *new_k.stride()[:2],
        *new_v.stride()[:2], 0 if new.cos is None else cos.shape[-1], norms.eps, norms.offset, made.limit,
        **made.constants,
    )  # fmt: skip
    return out


class Layout(NamedTuple):
    """A launch, as far as it is the same for every layer of a step."""

    grid: tuple[int, int, int]
    tiles: int
    splits: int
    limit: float  # what float8 pages saturate at
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def layout(
    device: torch.device,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    page: int,
    sequences: int,
    max_query: int,
    max_length: int,
    window: int | None,
    chunk: int | None,
    softcap: bool,
    has: tuple[bool, bool, bool],
    new: tuple[bool, bool, bool],
    chained: bool,
) -> Layout:
    """`sizes`: query heads, key heads, of a key, of a value. `has`: values in keys, sinks, fresh heads.
    `new`: whether those are normed, are turned, and interleaved."""
    heads, key_heads, size, value_dim = sizes
    group, compute = heads // key_heads, _compute(dtype, page_dtype)
    wide = compute is tl.float32
    reach = min(max_length, window or max_length, chunk or max_length)
    chosen = plan(
        max_query * group, size, value_dim, wide, sequences * key_heads, max(reach, 1),
        processors(device),
    )  # fmt: skip
    splits = chosen.splits
    first = max(1 << (size.bit_length() - 1), 16)
    value_width = max(16, next_power_of_2(value_dim))
    tiles = cdiv(max_query * group, chosen.rows)
    together = min(TOGETHER, next_power_of_2(splits))
    merged = max(1, MERGED_NUMBERS // (together * value_width))
    constants = dict(
        HEADS=heads, GROUP=group, H=size, H1=first, H2=max(16, next_power_of_2(max(size - first, 1))),
        V=value_dim, BV=value_width, PAGE=page, SHARED=has[0], HAS_SINKS=has[1], SOFTCAP=softcap,
        SPLIT=splits > 1,
        BOUNDED=bool(window or chunk) or max_query == 1,  # one walk waits for memory once
        PRECISION="ieee" if wide else "tf32", COMPUTE=compute, BM=chosen.rows, BN=chosen.keys,
        LEAST=LEAST_SPAN, TOGETHER=together,
        MERGED=min(chosen.rows, next_power_of_2(max_query * group), merged),
        FRESH=has[2], NORM=new[0], TURN=new[1], INTERLEAVED=new[2],
        num_warps=chosen.warps, num_stages=chosen.stages, **early(device, chained),
    )  # fmt: skip
    limit = torch.finfo(page_dtype).max if page_dtype.itemsize == 1 else float("inf")
    return Layout((sequences * tiles + 1, key_heads, splits), tiles, splits, limit, constants)


_NOTHING_NEW: Any = Heads(None, None, None, None, None, None, False)  # type: ignore[arg-type]


def fresh_attention(heads: Heads, pages: Pages, *rest: Any) -> Any:
    """`kernels.attention.fresh_attention`."""
    q, size = heads.q_XNH, heads.q_XNH.shape[-1]
    whole = size == next_power_of_2(size) and size >= 16 and q.shape[0] > 0
    alike = all(t.dtype == q.dtype and t.dim() == 3 and t.stride(-1) == 1 for t in heads[:3])
    if not whole or not alike or not angles_fit(q, heads.cos, heads.sin) or not pages_fit(pages):
        return NotImplemented
    more: dict[str, Any] = {"fresh": (heads, pages.slots_T)}
    return paged_attention(q, *pages[:2], *rest, **more)


def _compute(query: torch.dtype, pages: torch.dtype) -> Any:
    """What the dot products run in: 16 bit where both sides fit it exactly."""
    if query == pages or pages.itemsize == 1:
        return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(query, tl.float32)
    return tl.float32
