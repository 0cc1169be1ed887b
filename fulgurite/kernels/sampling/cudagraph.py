"""Draws as CUDA graphs: for logits that lie where they lay before, as a decode step's always do.

In and out: as `kernels.sampling.sample_rows`. Four launches and their memory cost the host several
times what a small draw costs the GPU. A graph of them reads its settings from memory of its own.

A graph is kept by the address, shape and stream of its logits, so it can only ever be replayed for
logits that are there. Graphs of one stream, which never run at once, share their memory.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.sampling import triton_sampling

RECORD_AFTER = 2  # calls with the same key
MOST_GRAPHS = 64
MOST_SEEN = 10_000  # keys; more would be logits that never lie in one place

_seen: Counter[Any] = Counter()
_draws: OrderedDict[Any, Draw] = OrderedDict()
_pools: dict[Any, Any] = {}
_changing = threading.Lock()


class Draw:
    """One recorded call of `sample_rows`."""

    def __init__(self, logits_RO: Tensor, settings_R5: Tensor, cut: bool, pool: Any) -> None:
        self.settings = settings_R5.to(logits_RO.device)
        self.graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self.tokens = triton_sampling.sample_rows(logits_RO, self.settings, cut)
            self.graph.capture_end()
        current.wait_stream(side)

    def __call__(self, settings_R5: Tensor) -> Tensor:
        self.settings.copy_(settings_R5, non_blocking=True)
        self.graph.replay()
        return self.tokens.clone()


def sample_rows(logits_RO: Tensor, settings_R5: Tensor) -> Tensor:
    """`kernels.sampling.sample_rows`."""
    if not logits_RO.is_cuda or settings_R5.is_cuda or torch.cuda.is_current_stream_capturing():
        return triton_sampling.sample_rows(logits_RO, settings_R5)
    cut = triton_sampling.cuts_any(settings_R5)
    stream = logits_RO.device.index, torch.cuda.current_stream(logits_RO.device).cuda_stream
    where = logits_RO.data_ptr(), logits_RO.shape, logits_RO.stride(), logits_RO.dtype
    key = (stream, where, cut)
    with _changing:
        draw = _draws.get(key)
        if draw is not None:
            _draws.move_to_end(key)
        else:
            _seen[key] += 1
    if draw is not None:
        return draw(settings_R5)
    tokens = triton_sampling.sample_rows(logits_RO, settings_R5, cut)
    if _seen[key] >= RECORD_AFTER and tokens is not NotImplemented:
        _record(key, logits_RO, settings_R5, cut)
    return tokens


def _record(key: Any, logits_RO: Tensor, settings_R5: Tensor, cut: bool) -> None:
    """And forget the graph that was used longest ago."""
    pool = _pools.get(key[0])
    if pool is None:
        pool = _pools.setdefault(key[0], torch.cuda.graph_pool_handle())
    with torch.cuda.device(logits_RO.device):
        made = Draw(logits_RO, settings_R5, cut, pool)
    with _changing:
        _draws[key] = made
        if len(_draws) > MOST_GRAPHS:
            _draws.popitem(last=False)
        if len(_seen) > MOST_SEEN:
            _seen.clear()
