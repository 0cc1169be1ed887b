"""Paged attention in C++: tensors in, one native call, tensors out.

In: the arguments of `kernels.attention`, on the CPU. Out: the result, or `NotImplemented` for what the
kernel doesn't take (float64, pages whose last dimension is not contiguous), which the reference runs. Both
calls are `replay.Kernel`s: a decode step that is recorded runs them without Python. One library is
built for each dtype of pages, when it is first met.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.common.cpu_library import paging_problem, translation_unit

PARTS = ("vectors.h", "paged.h", "attention.h", "attention_run.h")
PAGES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_pack_attend = struct.Struct("28q3d3q").pack
_pack_store = struct.Struct("13qd13qd2q").pack


def source(pages: torch.dtype) -> str:
    return translation_unit(*PARTS, defines=[f"PAGE {PAGES[pages]}"])


@functools.cache
def _kernels(pages: torch.dtype) -> tuple[replay.Kernel, replay.Kernel]:
    library = native.load(source(pages))
    attend = replay.Kernel(library, "attend", "paged_attention", paging_problem)
    return attend, replay.Kernel(library, "store_pages", problem=paging_problem)


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
) -> Any:
    """`kernels.attention.paged_attention`."""
    if not _takes(q, keys, values) or (sinks is not None and sinks.dtype not in KINDS):
        return NotImplemented
    out = torch.empty((q.shape[0], q.shape[1], value_dim), dtype=q.dtype)
    where = keys if values is None else values
    packed = _pack_attend(
        q.data_ptr(),
        keys.data_ptr(),
        0 if values is None else values.data_ptr(),
        tables.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        *q.shape[:1],
        lengths.shape[0],
        q.shape[1],
        keys.shape[2],
        keys.shape[3],
        value_dim,
        keys.shape[1],
        *q.stride()[:2],
        tables.stride(0),
        *keys.stride()[:3],
        *where.stride()[:3],
        window or 0,
        chunk or 0,
        KINDS[q.dtype],
        0 if sinks is None else KINDS[sinks.dtype],
        scale * key_scale,
        softcap or 0.0,
        value_scale if values is not None else key_scale,
        device.cpu_threads(),
        tables.shape[1],
        keys.shape[0],
    )
    attend, _ = _kernels(keys.dtype)
    attend(packed, keep=(q, keys, values, tables, starts, lengths, sinks, out))
    return out


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
    if not _takes(k, keys, values) or slots.dtype != torch.int64 or not slots.is_contiguous():
        return NotImplemented
    if v is not None and (v.dtype not in KINDS or v.stride(-1) != 1):
        return NotImplemented
    packed = _pack_store(
        *_rows(k, keys, slots),
        key_scale,
        *(_rows(v, values, slots) if v is not None and values is not None else [0] * 13),
        value_scale,
        device.cpu_threads(),
        keys.shape[0] * keys.shape[1],
    )
    _, store = _kernels(keys.dtype)
    store(packed, keep=(k, v, keys, values, slots))
    return None


def _rows(new: Tensor, pages: Tensor, slots: Tensor) -> tuple[int, ...]:
    return (
        new.data_ptr(),
        pages.data_ptr(),
        slots.data_ptr(),
        *new.shape,
        *new.stride()[:2],
        *pages.stride()[:3],
        pages.shape[1],
        KINDS[new.dtype],
    )


def _takes(new: Tensor, keys: Tensor, values: Tensor | None) -> bool:
    if new.dtype not in KINDS or keys.dtype not in PAGES or native.compiler() is None:
        return False
    if values is not None and (values.dtype != keys.dtype or values.stride(-1) != 1):
        return False
    return new.stride(-1) == 1 and keys.stride(-1) == 1
