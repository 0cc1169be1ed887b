"""Sampling as CUDA graphs, for logits at a fixed address, as those of captured decode steps.

In and out: as `sampling.ops.sample_rows`. Launching four kernels and allocating their memory costs
the host several times what sampling a small batch costs the GPU. The captured graph reads its
settings from its own memory.

Graphs are keyed by the address, shape and stream of their logits, so a graph is only replayed for
logits at that address. Graphs of one stream never run at once, so they share memory.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

from fulgurite.cudagraph.capture import LivePool, capture_graph
from fulgurite.kernels.sampling import triton_sampling

CAPTURE_AFTER_CALLS = 2  # with the same key
MAX_GRAPHS = 64
MAX_COUNTED_KEYS = 10_000  # more come from logits that are never at one address

_call_counts: Counter[Any] = Counter()
_captured: OrderedDict[Any, CapturedSampler] = OrderedDict()
_pools: dict[Any, LivePool] = {}
_lock = threading.Lock()


class CapturedSampler:
    """One captured call of `sample_rows`."""

    def __init__(
        self, logits_RO: Tensor, settings_R5: Tensor, use_threshold: bool, pool: LivePool
    ) -> None:
        self.settings = settings_R5.to(logits_RO.device)
        captured = capture_graph(
            lambda: triton_sampling.sample_rows(logits_RO, self.settings, use_threshold),
            pool=pool.handle,
            stream=pool.stream,
            synchronize=False,
        )
        self.graph, self.tokens = captured.graph, captured.outputs

    def __call__(self, settings_R5: Tensor) -> Tensor:
        self.settings.copy_(settings_R5, non_blocking=True)
        self.graph.replay()
        return self.tokens.clone()


def sample_rows(logits_RO: Tensor, settings_R5: Tensor) -> Tensor:
    """`sampling.ops.sample_rows`."""
    if not logits_RO.is_cuda or settings_R5.is_cuda or torch.cuda.is_current_stream_capturing():
        return triton_sampling.sample_rows(logits_RO, settings_R5)
    use_threshold = triton_sampling.needs_threshold(settings_R5)
    stream = logits_RO.device.index, torch.cuda.current_stream(logits_RO.device).cuda_stream
    layout = logits_RO.data_ptr(), logits_RO.shape, logits_RO.stride(), logits_RO.dtype
    key = (stream, layout, use_threshold)
    with _lock:
        sampler = _captured.get(key)
        if sampler is not None:
            _captured.move_to_end(key)
        else:
            _call_counts[key] += 1
    if sampler is not None:
        return sampler(settings_R5)
    tokens = triton_sampling.sample_rows(logits_RO, settings_R5, use_threshold)
    if _call_counts[key] >= CAPTURE_AFTER_CALLS and tokens is not NotImplemented:
        _capture(key, logits_RO, settings_R5, use_threshold)
    return tokens


def _capture(key: Any, logits_RO: Tensor, settings_R5: Tensor, use_threshold: bool) -> None:
    """Capture a graph; evict the least recently used one."""
    pool = _pools.get(key[0])
    if pool is None:
        device = logits_RO.device
        pool = _pools.setdefault(key[0], LivePool(device, torch.cuda.Stream(device)))
    with torch.cuda.device(logits_RO.device):
        sampler = CapturedSampler(logits_RO, settings_R5, use_threshold, pool)
    with _lock:
        _captured[key] = sampler
        if len(_captured) > MAX_GRAPHS:
            _captured.popitem(last=False)
        if len(_call_counts) > MAX_COUNTED_KEYS:
            _call_counts.clear()
