"""Latent attention in C++: tensors in, one native call, tensors out.

In: the arguments of `kernels.mla`, on the CPU. Out: the result, or `NotImplemented` for what the kernel
doesn't take (float64, weights of another dtype than the queries, rows that are not contiguous), which the
reference runs. Both calls are `replay.Kernel`s: a decode step that is recorded runs them without Python.
One library is built for each dtype of pages, when it is first met.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.common.cpu_library import paging_problem, translation_unit
from fulgurite.kernels.mla.ops import FEW
from fulgurite.kernels.mla.reference import packed_row

PARTS = ("vectors.h", "paged.h", "mla.h", "mla_absorbed.h", "mla_expanded.h", "mla_run.h")
PAGES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.uint8: "f8e4m3",
}
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_pack_attend = struct.Struct("28qd3q").pack
_pack_write = struct.Struct("18qd2q").pack


def source(pages: torch.dtype) -> str:
    return translation_unit(*PARTS, defines=[f"PAGE {PAGES[pages]}", f"FEW {FEW}"])


@functools.cache
def _kernels(pages: torch.dtype) -> tuple[replay.Kernel, replay.Kernel]:
    library = native.load(source(pages))
    names = ("latent_attention", "write_latent")
    attend, write = (replay.Kernel(library, name, problem=paging_problem) for name in names)
    return attend, write


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
    """`kernels.mla.latent_attention`; which sequences are expanded is decided in C++."""
    if not _takes(q, cos, sin, pages) or up.dtype != q.dtype or up.stride(-1) != 1:
        return NotImplemented
    rope, rank = 2 * cos.shape[1], up.shape[2]
    plain = q.shape[2] - rope
    value = up.shape[1] - plain
    out = torch.empty((q.shape[0], q.shape[1], value), dtype=q.dtype)
    packed = _pack_attend(
        q.data_ptr(), up.data_ptr(), cos.data_ptr(), sin.data_ptr(), pages.data_ptr(),
        tables.data_ptr(), starts.data_ptr(), lengths.data_ptr(), out.data_ptr(),
        q.shape[0], lengths.shape[0], q.shape[1], plain, rope, rank, value, pages.shape[1],
        *q.stride()[:2], *up.stride()[:2], tables.stride(0),
        *_row(pages, rank, rope), KINDS[q.dtype], interleaved, scale, device.cpu_threads(),
        tables.shape[1], pages.shape[0],
    )  # fmt: skip
    attend, _ = _kernels(pages.dtype)
    attend(packed, keep=(q, up, cos, sin, pages, tables, starts, lengths, out))
    return out


def write_latent(
    latent: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
) -> Any:
    """`kernels.mla.write_latent`."""
    if not _takes(latent, cos, sin, pages) or slots.dtype != torch.int64:
        return NotImplemented
    if norm.dtype not in KINDS or not norm.is_contiguous() or not slots.is_contiguous():
        return NotImplemented
    rank = norm.shape[0]
    rope = latent.shape[1] - rank
    packed = _pack_write(
        latent.data_ptr(), norm.data_ptr(), cos.data_ptr(), sin.data_ptr(), pages.data_ptr(),
        slots.data_ptr(), latent.shape[0], rank, rope, latent.stride(0), pages.shape[1],
        *_row(pages, rank, rope), KINDS[latent.dtype], KINDS[norm.dtype], interleaved, eps,
        device.cpu_threads(), pages.shape[0] * pages.shape[1],
    )  # fmt: skip
    _, write = _kernels(pages.dtype)
    write(packed, keep=(latent, norm, cos, sin, pages, slots))
    return None


def _row(pages: Tensor, rank: int, rope: int) -> tuple[int, int, int, int]:
    """Bytes of a page and a slot, and where in a slot the rotary key and the scale begin."""
    size = pages.element_size()
    row = packed_row(rank, rope)
    starts = (row.rope, row.scale) if size == 1 else (rank * size, 0)
    return pages.stride(0) * size, pages.stride(1) * size, *starts


def _takes(new: Tensor, cos: Tensor, sin: Tensor, pages: Tensor) -> bool:
    if new.dtype not in KINDS or pages.dtype not in PAGES or native.compiler() is None:
        return False
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in (cos, sin)):
        return False
    return new.stride(-1) == 1 and pages.stride(-1) == 1
