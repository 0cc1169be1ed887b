# mypy: allow-untyped-defs, allow-incomplete-defs
"""The glue of a layer on GPUs: norms, gates, sums; and heads, from a linear's rows into the cache.

    rms_norm   x / sqrt(mean(x^2) + eps) * (weight + offset)
    combine    x + y, or activation(x) * y
    heads      query and key: a norm each, then a rotation; key and value: into their pages

In: tensors whose last dimension is contiguous. Out: new tensors, or `NotImplemented` for anything else.
Everything is computed in float32 and rounded once, which for a head that is normed and turned is once
less than op by op.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.common.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.common.pdl_region import in_chain
from fulgurite.kernels.common.triton_launch import prepared
from fulgurite.kernels.common.triton_pdl import early, let_next_start, wait_for_inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_TOKENS = 256  # up to here a program takes one head, so that there are many programs
WIDEST = 16384  # numbers a row that a program holds in registers


@triton.jit
def tanh(x):
    """By its series near 0, where 2 sigmoid(2x) - 1 would lose digits."""
    z = x * x
    series = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def activate(x, HOW: tl.constexpr):
    """silu, gelu or its tanh form, in float32."""
    if HOW == "silu":
        return x * tl.sigmoid(x)
    elif HOW == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@prepared
def norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, inner, size, outer_step, step, eps, offset,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows of `size`; row i lies at (i // inner) * outer_step + (i % inner) * step."""
    if EARLY:
        let_next_start()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    at = (row // inner).to(tl.int64) * outer_step + (row % inner) * step
    weight = tl.load(weight_ptr + column, column < size, 0.0).to(tl.float32) + offset
    if EARLY:
        wait_for_inputs()
    x = tl.load(x_ptr + at[:, None] + column[None, :], inside, 0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    out = x * factor[:, None] * weight[None, :]
    into = out_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), inside)


@prepared
def combine_kernel(
    x_ptr, y_ptr, out_ptr, size, x_step, y_step, HOW: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        let_next_start()
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_step + column, column < size, 0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_step + column, column < size, 0.0).to(tl.float32)
    out = x + y if HOW == "add" else activate(x, HOW) * y
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), column < size)


@triton.jit
def into_page(x, pages_ptr, slot, head, column, keep, scale, limit, page_step, slot_step, head_step,
               SIZE: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Heads of one token into their slot, divided by `scale`; float8 saturates at `limit`."""
    x = tl.clamp(tl.div_rn(x, scale), -limit, limit)
    place = (slot // PAGE) * page_step + (slot % PAGE) * slot_step + head * head_step
    size = tl.where(keep, SIZE, 0)
    tl.store(pages_ptr + place + column, x.to(pages_ptr.dtype.element_ty), column < size)


@triton.jit
def turned_rows(
    row_ptrs, is_row, norm_ptr, cos_ptr, sin_ptr, pairs, eps, offset,
    H: tl.constexpr, BH: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads of one token, [R, BH] in float32: normed, then turned by the token's angles."""
    column = tl.arange(0, BH)
    at = row_ptrs[:, None]
    x = tl.load(at + column[None, :], is_row[:, None] & (column < H)[None, :], 0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
        weight = tl.load(norm_ptr + column, column < H, 0.0).to(tl.float32) + offset
        x *= factor[:, None] * weight[None, :]
    if TURN:
        if INTERLEAVED:
            pair, partner, second = column // 2, column ^ 1, column % 2 == 1
        else:
            second = column >= pairs
            pair = tl.where(second, column - pairs, column)
            partner = tl.where(second, column - pairs, column + pairs)
        turned = column < 2 * pairs
        inside = is_row[:, None] & turned[None, :]
        y = tl.load(at + partner[None, :], inside, 0.0).to(tl.float32)
        if NORM:
            other = tl.load(norm_ptr + partner, turned, 0.0).to(tl.float32) + offset
            y *= factor[:, None] * other[None, :]
        cos = tl.load(cos_ptr + pair, turned, 1.0)[None, :]
        sin = tl.load(sin_ptr + pair, turned, 0.0)[None, :]
        x = x * cos + tl.where(second[None, :], y, -y) * sin
    return x


@prepared
def heads_kernel(
    q_ptr, k_ptr, v_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    keys_ptr, values_ptr, slots_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, pairs, eps, offset, limit,
    key_page, key_slot, key_head, value_page, value_slot, value_head,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORE: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """R heads of one token: of N query heads, K key heads, and with STORE K value heads."""
    if EARLY:
        let_next_start()
        wait_for_inputs()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    OF_Q: tl.constexpr = (N + R - 1) // R
    OF_K: tl.constexpr = (K + R - 1) // R
    slot = tl.zeros([], tl.int64)
    if STORE:
        slot = tl.load(slots_ptr + token)
    angles, rows = token * pairs, tl.arange(0, R)
    column = tl.arange(0, BH)[None, :]
    if part < OF_Q:
        head = part * R + rows
        query = turned_rows(
            q_ptr + token * q_token + head * q_head, head < N, query_norm_ptr, cos_ptr + angles,
            sin_ptr + angles, pairs, eps, offset, H, BH, NORM, TURN, INTERLEAVED,
        )  # fmt: skip
        into = q_out_ptr + (token * N + head)[:, None] * H + column
        tl.store(into, query.to(q_out_ptr.dtype.element_ty), (head < N)[:, None] & (column < H))
    elif part < OF_Q + OF_K:
        head = (part - OF_Q) * R + rows
        key = turned_rows(
            k_ptr + token * k_token + head * k_head, head < K, key_norm_ptr, cos_ptr + angles,
            sin_ptr + angles, pairs, eps, offset, H, BH, NORM, TURN, INTERLEAVED,
        )  # fmt: skip
        if STORE:
            keep = ((head < K) & (slot >= 0))[:, None]
            into_page(
                key, keys_ptr, slot, head[:, None], column, keep, 1.0, limit, key_page, key_slot,
                key_head, H, PAGE,
            )  # fmt: skip
        else:
            into = k_out_ptr + (token * K + head)[:, None] * H + column
            tl.store(into, key.to(k_out_ptr.dtype.element_ty), (head < K)[:, None] & (column < H))
    else:
        head = (part - OF_Q - OF_K) * R + rows
        wide = tl.arange(0, BV)[None, :]
        there = (head < K)[:, None] & (wide < V)
        value = tl.load(v_ptr + token * v_token + (head * v_head)[:, None] + wide, there, 0.0)
        keep = ((head < K) & (slot >= 0))[:, None]
        into_page(
            value.to(tl.float32), values_ptr, slot, head[:, None], wide, keep, 1.0, limit, value_page,
            value_slot, value_head, V, PAGE,
        )  # fmt: skip


# ---- launching -----------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
    """`kernels.glue.rms_norm`."""
    rows, size = _rows(x), x.shape[-1] if x.dim() else 0
    if rows is None or not weight.is_contiguous() or not 0 < size <= WIDEST:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    constants = _norm_constants(x.device, size, in_chain())
    norm_kernel[(cdiv(rows[0], constants["ROWS"]),)](
        x, weight, out, rows[0], rows[1], size, rows[2], rows[3], eps, offset, **constants
    )
    return out


@functools.cache
def _norm_constants(device: torch.device, size: int, chained: bool) -> dict[str, Any]:
    block = next_power_of_2(size)
    together = max(1, 512 // block)  # a head is a short row
    warps = max(1, min(16, block * together // 512))
    return dict(BLOCK=block, ROWS=together, num_warps=warps, **early(device, chained))


def combine(x: Tensor, y: Tensor, how: str) -> Any:
    """`kernels.glue.gate` and `add`: x + y ("add"), or activation(x) * y."""
    first, second = _rows(x), _rows(y)
    if first is None or second is None or x.shape != y.shape or x.dtype != y.dtype:
        return NotImplemented
    if first[1] != 1 or second[1] != 1:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    size = x.shape[-1]
    block = min(1024, next_power_of_2(size))
    combine_kernel[(first[0], cdiv(size, block))](
        x, y, out, size, first[2], second[2], HOW=how, BLOCK=block, num_warps=4,
        **early(x.device),
    )  # fmt: skip
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    """`kernels.glue.rotate`: heads that are all queries."""
    found = heads(x, x[:, :0] if x.dim() == 3 else x, x, None, cos, sin, interleaved, None)
    return found if found is NotImplemented else found[0]


def heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Tensor, Tensor, float, float] | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    pages: tuple[Tensor, Tensor, Tensor] | None,
) -> Any:
    """`kernels.glue.heads`: (q, k, v), or (q, None, None) where key and value went into the pages."""
    if any(t.dim() != 3 or t.dtype not in DTYPES or t.stride(-1) != 1 for t in (q, k, v)):
        return NotImplemented
    if q.shape[-1] > 1024 or not angles_fit(q, cos, sin) or not pages_fit(pages):
        return NotImplemented
    tokens, n, size = q.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = q_out if pages else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    keys, values, slots = pages or (k_out, k_out, k_out)
    query_norm, key_norm, eps, offset = norms or (q, q, 0.0, 0.0)
    steps = (*keys.stride()[:3], *values.stride()[:3]) if pages else (0,) * 6
    made = heads_layout(
        q.device, (tokens, n, size, *k.shape[1:2], v.shape[2]), keys.dtype,
        keys.shape[1] if pages else None, norms is not None, cos is not None, interleaved, in_chain(),
    )  # fmt: skip
    if tokens and made.grid[1]:
        heads_kernel[made.grid](
            q, k, v, query_norm, key_norm, q if cos is None else cos, q if sin is None else sin,
            q_out, k_out, keys, values, slots,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            0 if cos is None else cos.shape[-1], eps, offset, made.limit, *steps, **made.constants,
        )  # fmt: skip
    return (q_out, None, None) if pages else (q_out, k_out, v)


class HeadsLayout(NamedTuple):
    """A launch, as far as it is the same for every layer of a step."""

    grid: tuple[int, int]
    limit: float  # what float8 pages saturate at
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def heads_layout(
    device: torch.device,
    sizes: tuple[int, int, int, int, int],
    page_dtype: torch.dtype,
    page: int | None,
    norm: bool,
    turn: bool,
    interleaved: bool,
    chained: bool,
) -> HeadsLayout:
    """`sizes`: tokens, query heads, of one, key heads, of a value. `page`: slots of one, if there are any."""
    tokens, n, size, k, value_size = sizes
    together = 1 if tokens <= FEW_TOKENS else max(1, min(8, 1024 // size))
    count = cdiv(n, together) + (1 if page is None else 2) * cdiv(k, together)
    limit = torch.finfo(page_dtype).max if page_dtype.itemsize == 1 else float("inf")
    constants = dict(
        N=n, K=k, H=size, BH=next_power_of_2(size), V=value_size, BV=next_power_of_2(value_size),
        PAGE=page or 1, NORM=norm, TURN=turn, INTERLEAVED=interleaved, STORE=page is not None,
        R=next_power_of_2(together), num_warps=4 if together > 1 else 1, **early(device, chained),
    )  # fmt: skip
    return HeadsLayout((tokens, count), limit, constants)


def angles_fit(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> bool:
    if cos is None or sin is None:
        return cos is sin
    plain = cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
    return plain and cos.numel() == q.shape[0] * cos.shape[-1] and 2 * cos.shape[-1] <= q.shape[-1]


def pages_fit(pages: tuple[Tensor, Tensor, Tensor] | None) -> bool:
    if pages is None:
        return True
    keys, values, slots = pages
    contiguous = keys.stride(-1) == 1 == values.stride(-1)
    return contiguous and slots.dtype == torch.int64 and slots.stride(0) == 1


def _rows(x: Tensor) -> tuple[int, int, int, int] | None:
    """Rows, how many lie together, and how far apart groups and rows are: heads of tokens."""
    if x.dtype not in DTYPES or x.dim() == 0:
        return None
    if x.is_contiguous():
        return (x.numel() // x.shape[-1] if x.shape[-1] else 0), 1, x.shape[-1], 0
    if x.dim() == 2 and x.stride(-1) == 1:
        return x.shape[0], 1, x.stride(0), 0
    if x.dim() == 3 and x.stride(-1) == 1:
        return x.shape[0] * x.shape[1], max(x.shape[1], 1), x.stride(0), x.stride(1)
    return None
