# mypy: allow-untyped-defs, allow-incomplete-defs
"""New keys and values into their pages on GPUs: one program a token and head.

In: keys [T, K, H] and values, pages, and the slot of each token (negative: nowhere). Out: nothing; the
pages are written. float8 saturates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.common.integer_math import next_power_of_2
from fulgurite.kernels.common.triton_launch import prepared
from fulgurite.kernels.elementwise.triton_elementwise import DTYPES, into_page


@prepared
def store_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, key_scale, value_scale, key_limit, value_limit,
    k_token, k_head, v_token, v_head, key_page, key_slot, key_head, value_page, value_slot, value_head,
    H: tl.constexpr, BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PAGE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """One head of one token into its slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    column = tl.arange(0, BH)
    x = tl.load(k_ptr + token * k_token + head * k_head + column, column < H, 0.0)
    into_page(
        x.to(tl.float32), keys_ptr, slot, head, column, slot >= 0, key_scale, key_limit, key_page, key_slot,
        key_head, H, PAGE,
    )  # fmt: skip
    if HAS_VALUES:
        column = tl.arange(0, BV)
        x = tl.load(v_ptr + token * v_token + head * v_head + column, column < V, 0.0)
        into_page(
            x.to(tl.float32), values_ptr, slot, head, column, slot >= 0, value_scale, value_limit, value_page,
            value_slot, value_head, V, PAGE,
        )  # fmt: skip


def store_pages(
    k: Tensor,
    v: Tensor | None,
    keys: Tensor,
    values: Tensor | None,
    slots: Tensor,
    key_scale: float,
    value_scale: float,
) -> Any:
    """`kernels.attention.store_pages`."""
    if k.dtype not in DTYPES or slots.dtype != torch.int64 or slots.stride(0) != 1:
        return NotImplemented
    if any(x is not None and x.stride(-1) != 1 for x in (k, v, keys, values)):
        return NotImplemented
    if k.numel() == 0:
        return None
    new_v, pages_v = (k, keys) if v is None or values is None else (v, values)
    limit = torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else float("inf")
    store_kernel[(k.shape[0], k.shape[1])](
        k, new_v, keys, pages_v, slots, key_scale, value_scale, limit, limit,
        *k.stride()[:2], *new_v.stride()[:2], *keys.stride()[:3], *pages_v.stride()[:3],
        H=k.shape[2], BH=next_power_of_2(k.shape[2]), V=new_v.shape[2],
        BV=next_power_of_2(new_v.shape[2]), PAGE=keys.shape[1],
        HAS_VALUES=v is not None, num_warps=1,
    )  # fmt: skip
    return None
