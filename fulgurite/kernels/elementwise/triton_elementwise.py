# mypy: allow-untyped-defs, allow-incomplete-defs
"""Fused elementwise operators in Triton: norms, gated activations, sums, QK norm and RoPE.

    rms_norm            x / sqrt(mean(x^2) + eps) * (weight + offset)
    elementwise_binary  x + scale * y, or activation(x) * y
    qk_norm_rope        query and key: RMS norm, then RoPE; key and value: into the KV cache

In: tensors whose last dimension is contiguous. Out: new tensors, or `NotImplemented` for anything
else. Everything is computed in float32 and rounded once. For a head with norm and RoPE that is one
rounding less than op by op.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.common.pdl import in_pdl_region
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning.heuristics import heuristics_for

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def tanh(x):
    """2 sigmoid(2x) - 1, and near 0, where that loses digits, the Taylor series."""
    z = x * x
    series = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def apply_activation(x, HOW: tl.constexpr):
    """silu, sigmoid, tanh, gelu, tanh-approximated gelu or x itself, in float32."""
    if HOW == "silu":
        return x * tl.sigmoid(x)
    elif HOW == "identity":
        return x
    elif HOW == "sigmoid":
        return tl.sigmoid(x)
    elif HOW == "tanh":
        return tanh(x)
    elif HOW == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@cached_launch
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, group, size, group_stride, row_stride, eps, offset,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x / sqrt(mean(x^2) + eps) * (weight + offset) for ROWS rows of `size`.

    Row i is at (i // group) * group_stride + (i % group) * row_stride.
    """
    if PDL:
        launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    at = (row // group).to(tl.int64) * group_stride + (row % group) * row_stride
    weight = tl.load(weight_ptr + column, column < size, 0.0).to(tl.float32) + offset
    if PDL:
        wait_for_dependencies()
    x = tl.load(x_ptr + at[:, None] + column[None, :], inside, 0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    out = x * factor[:, None] * weight[None, :]
    into = out_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), inside)


@cached_launch
def binary_kernel(
    x_ptr, y_ptr, out_ptr, size, x_stride, y_stride, scale, HOW: tl.constexpr,
    FACTOR: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x + scale * y, or HOW(x) * y, for BLOCK columns of one row. FACTOR: x has one number a row."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_column = column * 0 if FACTOR else column
    x = tl.load(x_ptr + row * x_stride + x_column, column < size, 0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + column, column < size, 0.0).to(tl.float32)
    out = x + scale * y if HOW == "add" else apply_activation(x, HOW) * y
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), column < size)


@triton.jit
def store_to_cache(
    x, cache_ptr, slot, head, column, keep, scale, limit, block_stride, slot_stride, head_stride,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Store heads of one token into its slot, divided by `scale`; float8 saturates at `limit`."""
    x = tl.clamp(tl.div_rn(x, scale), -limit, limit)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = block * block_stride + offset * slot_stride + head * head_stride
    size = tl.where(keep, SIZE, 0)
    tl.store(cache_ptr + row + column, x.to(cache_ptr.dtype.element_ty), column < size)


@triton.jit
def load_norm_rope(
    row_ptrs, is_row, norm_ptr, cos_ptr, sin_ptr, pairs, eps, offset,
    H: tl.constexpr, BH: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load heads of one token, [R, BH] in float32, and apply their RMS norm and RoPE."""
    column = tl.arange(0, BH)
    at = row_ptrs[:, None]
    x = tl.load(at + column[None, :], is_row[:, None] & (column < H)[None, :], 0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
        weight = tl.load(norm_ptr + column, column < H, 0.0).to(tl.float32) + offset
        x *= factor[:, None] * weight[None, :]
    if ROPE:
        if INTERLEAVED:
            pair, partner, is_second = column // 2, column ^ 1, column % 2 == 1
        else:
            is_second = column >= pairs
            pair = tl.where(is_second, column - pairs, column)
            partner = tl.where(is_second, column - pairs, column + pairs)
        is_rotated = column < 2 * pairs
        inside = is_row[:, None] & is_rotated[None, :]
        y = tl.load(at + partner[None, :], inside, 0.0).to(tl.float32)
        if NORM:
            partner_weight = tl.load(norm_ptr + partner, is_rotated, 0.0).to(tl.float32) + offset
            y *= factor[:, None] * partner_weight[None, :]
        cos = tl.load(cos_ptr + pair, is_rotated, 1.0)[None, :]
        sin = tl.load(sin_ptr + pair, is_rotated, 0.0)[None, :]
        x = x * cos + tl.where(is_second[None, :], y, -y) * sin
    return x


@cached_launch
def qk_norm_rope_kernel(
    q_ptr, k_ptr, v_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    key_cache_ptr, value_cache_ptr, slot_mapping_ptr, q_token_stride, q_head_stride, k_token_stride,
    k_head_stride, v_token_stride, v_head_stride, pairs, eps, offset, limit, key_block_stride,
    key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORE: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R heads of one token: of N query heads, K key heads, and with STORE of K value heads."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_PARTS: tl.constexpr = (N + R - 1) // R
    K_PARTS: tl.constexpr = (K + R - 1) // R
    slot = tl.zeros([], tl.int64)
    if STORE:
        slot = tl.load(slot_mapping_ptr + token)
    angles, rows = token * pairs, tl.arange(0, R)
    column = tl.arange(0, BH)[None, :]
    if part < Q_PARTS:
        head = part * R + rows
        query = load_norm_rope(
            q_ptr + token * q_token_stride + head * q_head_stride, head < N, query_norm_ptr,
            cos_ptr + angles, sin_ptr + angles, pairs, eps, offset, H, BH, NORM, ROPE, INTERLEAVED,
        )  # fmt: skip
        into = q_out_ptr + (token * N + head)[:, None] * H + column
        tl.store(into, query.to(q_out_ptr.dtype.element_ty), (head < N)[:, None] & (column < H))
    elif part < Q_PARTS + K_PARTS:
        head = (part - Q_PARTS) * R + rows
        key = load_norm_rope(
            k_ptr + token * k_token_stride + head * k_head_stride, head < K, key_norm_ptr,
            cos_ptr + angles, sin_ptr + angles, pairs, eps, offset, H, BH, NORM, ROPE, INTERLEAVED,
        )  # fmt: skip
        if STORE:
            keep = ((head < K) & (slot >= 0))[:, None]
            store_to_cache(
                key, key_cache_ptr, slot, head[:, None], column, keep, 1.0, limit, key_block_stride,
                key_slot_stride, key_head_stride, H, BLOCK_SIZE,
            )  # fmt: skip
        else:
            into = k_out_ptr + (token * K + head)[:, None] * H + column
            tl.store(into, key.to(k_out_ptr.dtype.element_ty), (head < K)[:, None] & (column < H))
    else:
        head = (part - Q_PARTS - K_PARTS) * R + rows
        value_column = tl.arange(0, BV)[None, :]
        mask = (head < K)[:, None] & (value_column < V)
        value_row = token * v_token_stride + (head * v_head_stride)[:, None]
        value = tl.load(v_ptr + value_row + value_column, mask, 0.0)
        keep = ((head < K) & (slot >= 0))[:, None]
        store_to_cache(
            value.to(tl.float32), value_cache_ptr, slot, head[:, None], value_column, keep, 1.0,
            limit, value_block_stride, value_slot_stride, value_head_stride, V, BLOCK_SIZE,
        )  # fmt: skip


# ---- launching -----------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
    """`elementwise.ops.rms_norm`."""
    rows, size = _rows(x), x.shape[-1] if x.dim() else 0
    if rows is None or not weight.is_contiguous():
        return NotImplemented
    if not 0 < size <= heuristics_for(x.device).rms_norm_max_row:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    constants = _rms_norm_constants(x.device, size, in_pdl_region())
    rms_norm_kernel[(cdiv(rows[0], constants["ROWS"]),)](
        x, weight, out, rows[0], rows[1], size, rows[2], rows[3], eps, offset, **constants
    )
    return out


@functools.cache
def _rms_norm_constants(device: torch.device, size: int, pdl: bool) -> dict[str, Any]:
    rows, num_warps = heuristics_for(device).rms_norm_launch(size)
    block = next_power_of_2(size)
    return dict(BLOCK=block, ROWS=rows, num_warps=num_warps, **pdl_options(device, pdl))


def elementwise_binary(x: Tensor, y: Tensor, operation: str, scale: float = 1.0) -> Any:
    """x + scale * y ("add"), or activation(x) * y; x may have one number a row."""
    x_rows, y_rows = _rows(x), _rows(y)
    is_factor = x.shape != y.shape and x.shape == (*y.shape[:-1], 1)
    if x_rows is None or y_rows is None or x.dtype != y.dtype:
        return NotImplemented
    if x.shape != y.shape and not is_factor:
        return NotImplemented
    if x_rows[1] != 1 or y_rows[1] != 1:
        return NotImplemented
    out = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    size = y.shape[-1]
    config = heuristics_for(x.device).elementwise
    block = min(config.block_n, next_power_of_2(size))
    binary_kernel[(y_rows[0], cdiv(size, block))](
        x, y, out, size, x_rows[2], y_rows[2], scale, HOW=operation, FACTOR=is_factor, BLOCK=block,
        num_warps=config.num_warps,
        **pdl_options(x.device),
    )  # fmt: skip
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    """`elementwise.ops.apply_rope`: `qk_norm_rope` with query heads only."""
    result = qk_norm_rope(x, x[:, :0] if x.dim() == 3 else x, x, None, cos, sin, interleaved, None)
    return result if result is NotImplemented else result[0]


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Tensor, Tensor, float, float] | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    cache: tuple[Tensor, Tensor, Tensor] | None,
) -> Any:
    """`elementwise.ops.qk_norm_rope`: (q, k, v); (q, None, None) if key and value were stored."""
    if any(t.dim() != 3 or t.dtype not in SUPPORTED_DTYPES or t.stride(-1) != 1 for t in (q, k, v)):
        return NotImplemented
    if q.shape[-1] > 1024 or not is_rope_supported(q, cos, sin) or not is_cache_supported(cache):
        return NotImplemented
    tokens, n, size = q.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = q_out if cache else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    key_cache, value_cache, slot_mapping = cache or (k_out, k_out, k_out)
    query_norm, key_norm, eps, offset = norms or (q, q, 0.0, 0.0)
    cache_strides = (*key_cache.stride()[:3], *value_cache.stride()[:3]) if cache else (0,) * 6
    launch = build_qk_norm_rope_launch(
        q.device, (tokens, n, size, *k.shape[1:2], v.shape[2]), key_cache.dtype,
        key_cache.shape[1] if cache else None, norms is not None, cos is not None, interleaved,
        in_pdl_region(), is_deterministic(),
    )  # fmt: skip
    if tokens and launch.grid[1]:
        qk_norm_rope_kernel[launch.grid](
            q, k, v, query_norm, key_norm, q if cos is None else cos, q if sin is None else sin,
            q_out, k_out, key_cache, value_cache, slot_mapping, *q.stride()[:2], *k.stride()[:2],
            *v.stride()[:2], 0 if cos is None else cos.shape[-1], eps, offset, launch.limit,
            *cache_strides, **launch.constants,
        )  # fmt: skip
    return (q_out, None, None) if cache else (q_out, k_out, v)


def norm_rope(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> Any:
    """Heads of tokens, [T, N, H], with their norm and RoPE: the query of `qk_norm_rope`."""
    norms = (weight, weight, eps, offset)
    result = qk_norm_rope(x, x[:, :0], x, norms, cos, sin, interleaved, None)
    return result if result is NotImplemented else result[0]


class QKNormRopeLaunch(NamedTuple):
    """The part of a launch that is the same for every layer of a step."""

    grid: tuple[int, int]
    limit: float  # largest number of a float8 cache, infinity otherwise
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def build_qk_norm_rope_launch(
    device: torch.device,
    sizes: tuple[int, int, int, int, int],
    cache_dtype: torch.dtype,
    block_size: int | None,
    norm: bool,
    rope: bool,
    interleaved: bool,
    pdl: bool,
    deterministic: bool,
) -> QKNormRopeLaunch:
    """`sizes`: tokens, query heads, head size, key heads, value size. `block_size`: the cache's."""
    tokens, n, size, k, value_size = sizes
    heuristics = heuristics_for(device)
    heads = heuristics.rope_heads(tokens, size)
    count = cdiv(n, heads) + (1 if block_size is None else 2) * cdiv(k, heads)
    limit = torch.finfo(cache_dtype).max if cache_dtype.itemsize == 1 else float("inf")
    constants = dict(
        N=n, K=k, H=size, BH=next_power_of_2(size), V=value_size, BV=next_power_of_2(value_size),
        BLOCK_SIZE=block_size or 1, NORM=norm, ROPE=rope, INTERLEAVED=interleaved,
        STORE=block_size is not None, R=next_power_of_2(heads),
        num_warps=heuristics.rope_num_warps(heads), **pdl_options(device, pdl),
    )  # fmt: skip
    return QKNormRopeLaunch((tokens, count), limit, constants)


def is_rope_supported(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> bool:
    if cos is None or sin is None:
        return cos is sin
    if not cos.is_contiguous() or not sin.is_contiguous():
        return False
    is_float32 = cos.dtype == sin.dtype == torch.float32
    pairs = cos.shape[-1]
    return is_float32 and cos.numel() == q.shape[0] * pairs and 2 * pairs <= q.shape[-1]


def is_cache_supported(cache: tuple[Tensor, Tensor, Tensor] | None) -> bool:
    if cache is None:
        return True
    key_cache, value_cache, slot_mapping = cache
    contiguous = key_cache.stride(-1) == 1 == value_cache.stride(-1)
    return contiguous and slot_mapping.dtype == torch.int64 and slot_mapping.stride(0) == 1


def _rows(x: Tensor) -> tuple[int, int, int, int] | None:
    """Number of rows, rows per group, strides of groups and rows: the heads of tokens.

    One token has the strides that many would have: kernels are compiled for their divisors.
    """
    if x.dtype not in SUPPORTED_DTYPES or x.dim() == 0:
        return None
    is_part = x.dim() in (2, 3) and x.shape[0] == 1 and x.stride(0) != x[0].numel()
    if x.is_contiguous() and not is_part:
        return (x.numel() // x.shape[-1] if x.shape[-1] else 0), 1, x.shape[-1], 0
    if x.dim() == 2 and x.stride(-1) == 1:
        return x.shape[0], 1, x.stride(0), 0
    if x.dim() == 3 and x.stride(-1) == 1:
        return x.shape[0] * x.shape[1], max(x.shape[1], 1), x.stride(0), x.stride(1)
    return None
