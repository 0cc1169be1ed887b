"""Sampling on a CPU in C++: bias, mask, penalties, filters and draw of a row in one pass.

In: float32 logits with contiguous rows, and settings (`table.py`). Out: tokens, or `NotImplemented`.
"""

from __future__ import annotations

import functools
import struct
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.common.cpu_library import build_translation_unit
from fulgurite.kernels.sampling.table import HAS_PENALTIES, NUM_SETTINGS, LogitsTable

MAX_VOCAB = 2**31 - 64  # token ids are 32 bits of a sort key
LANES = 16
_pack = struct.Struct("14q").pack
_memory = threading.local()


@functools.cache
def _load_kernel() -> replay.NativeKernel:
    # every operation rounds, so that penalties are those of torch
    source = build_translation_unit("vec16.h", "sampling.h", defines=("ROUND_EACH_STEP",))
    return replay.NativeKernel(native.load(source), "sample_tokens")


def greedy_sample(logits_RO: Tensor) -> Any:
    """`sampling.ops.greedy_sample`."""
    return sample_tokens(logits_RO, None)


def sample_rows(logits_RO: Tensor, settings_R5: Tensor, uses_threshold: bool | None = None) -> Any:
    """`sampling.ops.sample_rows`."""
    return sample_tokens(logits_RO, settings_R5)


def sample_tokens(
    logits_RO: Tensor,
    settings_R5: Tensor | None,
    processing_R5: Tensor | None = None,
    table: LogitsTable | None = None,
    uses_threshold: bool | None = None,
) -> Any:
    """`sampling.ops.sample_tokens`."""
    rows, size = logits_RO.shape
    if not 0 < size <= MAX_VOCAB or logits_RO.dtype != torch.float32 or logits_RO.stride(1) != 1:
        return NotImplemented
    if native.find_compiler() is None:
        return NotImplemented
    if settings_R5 is None:
        settings_R5 = torch.zeros(rows, NUM_SETTINGS, dtype=torch.float64)
    settings_R5 = settings_R5.contiguous()
    tokens_R = torch.empty(rows, dtype=torch.int64)
    threads = device.num_cpu_threads()
    scratch = _scratch(threads, size)
    addresses = (0, 0, 0, 0)
    words = 0
    if table is not None and processing_R5 is not None:
        processing_R5 = processing_R5.contiguous()
        tensors = (processing_R5, table.counts_WO, table.bias_WO, table.allowed_WM)
        addresses, words = tuple(x.data_ptr() for x in tensors), table.allowed_WM.shape[1]
    packed = _pack(
        logits_RO.data_ptr(), settings_R5.data_ptr(), *addresses, tokens_R.data_ptr(),
        scratch.data_ptr(), rows, size, logits_RO.stride(0), words, scratch.shape[1], threads,
    )  # fmt: skip
    _load_kernel()(packed, (logits_RO, settings_R5, processing_R5, table, tokens_R, scratch))
    return tokens_R


def record_tokens(
    tokens_R: Tensor, processing_R5: Tensor, last_tokens_W: Tensor, counts_WO: Tensor | None
) -> None:
    """`sampling.ops.record_tokens`, in numpy: torch's index ops take longer for a few numbers."""
    tokens = np.maximum(tokens_R.numpy(), 0)
    rows, flags = processing_R5[:, :2].numpy().astype(np.int64).T
    last_tokens_W.numpy()[rows] = tokens
    is_counted = (flags & HAS_PENALTIES) > 0
    if counts_WO is not None and is_counted.any():
        np.add.at(counts_WO.numpy(), (rows[is_counted], tokens[is_counted]), 2)


def _scratch(threads: int, size: int) -> Tensor:
    """Memory of each thread, kept between calls: logits, p and two lists of keys of one row."""
    needed = -(-size // LANES) * LANES * (4 + 4 + 8 + 8)
    scratch: Tensor | None = getattr(_memory, "scratch", None)
    if scratch is None or scratch.shape[0] < threads or scratch.shape[1] < needed:
        scratch = _memory.scratch = torch.empty(threads, needed, dtype=torch.uint8)
    return scratch
