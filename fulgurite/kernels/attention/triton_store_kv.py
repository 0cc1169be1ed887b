# mypy: allow-untyped-defs, allow-incomplete-defs
"""Store of new keys and values into the KV cache on GPUs: one program per token and head.

    cache[slot // B, slot % B, k] = round(new[t, k] / scale)

In: keys [T, K, H] and values, the caches, and the slot of each token (negative: it is skipped).
Out: nothing; the caches are written. A float8 cache saturates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.elementwise.triton_elementwise import SUPPORTED_DTYPES, store_to_cache
from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.tuning.heuristics import heuristics_for


@cached_launch
def store_kv_cache_kernel(
    k_ptr, v_ptr, key_cache_ptr, value_cache_ptr, slot_mapping_ptr, key_scale, value_scale,
    key_max, value_max, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride,
    value_head_stride,
    H: tl.constexpr, BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """One head of one token into its slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token)
    column = tl.arange(0, BH)
    x = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + column, column < H, 0.0)
    store_to_cache(
        x.to(tl.float32), key_cache_ptr, slot, head, column, slot >= 0, key_scale, key_max,
        key_block_stride, key_slot_stride, key_head_stride, H, BLOCK_SIZE,
    )  # fmt: skip
    if HAS_VALUES:
        column = tl.arange(0, BV)
        x = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + column, column < V, 0.0)
        store_to_cache(
            x.to(tl.float32), value_cache_ptr, slot, head, column, slot >= 0, value_scale,
            value_max, value_block_stride, value_slot_stride, value_head_stride, V, BLOCK_SIZE,
        )  # fmt: skip


def store_kv_cache(
    k: Tensor,
    v: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> Any:
    """`attention.ops.store_kv_cache`."""
    if k.dtype not in SUPPORTED_DTYPES or slot_mapping.dtype != torch.int64:
        return NotImplemented
    if slot_mapping.stride(0) != 1:
        return NotImplemented
    if any(x is not None and x.stride(-1) != 1 for x in (k, v, key_cache, value_cache)):
        return NotImplemented
    if k.numel() == 0:
        return None
    new_v, v_cache = (k, key_cache) if v is None or value_cache is None else (v, value_cache)
    is_float8 = key_cache.dtype.itemsize == 1
    cache_max = torch.finfo(key_cache.dtype).max if is_float8 else float("inf")
    store_kv_cache_kernel[(k.shape[0], k.shape[1])](
        k, new_v, key_cache, v_cache, slot_mapping, key_scale, value_scale, cache_max, cache_max,
        *k.stride()[:2], *new_v.stride()[:2], *key_cache.stride()[:3], *v_cache.stride()[:3],
        H=k.shape[2], BH=next_power_of_2(k.shape[2]), V=new_v.shape[2],
        BV=next_power_of_2(new_v.shape[2]), BLOCK_SIZE=key_cache.shape[1],
        HAS_VALUES=v is not None, num_warps=heuristics_for(k.device).store_kv_num_warps,
    )  # fmt: skip
    return None
