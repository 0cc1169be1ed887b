"""Frozen regions: what is computed from a module's weights alone, once.

In: a graph whose inputs are parameters and buffers. Out: `FrozenRegion`, whose results are kept until an
input changes. A change is noticed at the next call: another tensor, a write that torch counts (in-place
ops, `load_state_dict`, optimizers), other memory (`p.data = ...`), and, by a sample of its bytes, a write
that torch does not count (`p.data.mul_()`, NumPy). A write of a few elements that torch does not count
may be missed.

Results die with the tensors they come from. A graph that several layers share keeps results for each.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite import native
from fulgurite.trace.cost import format_count
from fulgurite.units import format_bytes

FROZEN = "frozen"  # the executor's name in traces

SOURCE = """
typedef unsigned long uint64_t;
typedef long int64_t;
// A hash of up to eight cache lines of each tensor, the first and the last among them.
// a: number of tensors, then the address and the number of bytes of each
extern "C" __attribute__((visibility("default"))) uint64_t sample(const int64_t* a) {
  uint64_t hash = 1469598103934665603ul;
  for (int64_t t = 0; t < a[0]; ++t) {
    const unsigned char* from = (const unsigned char*)a[1 + 2 * t];
    const int64_t bytes = a[2 + 2 * t], line = bytes < 64 ? bytes : 64, lines = bytes / 64 < 8 ? bytes / 64 : 8;
    const int64_t last = bytes - line, count = lines < 1 ? 1 : lines;
    for (int64_t k = 0; k < count; ++k) {
      const unsigned char* at = from + (count == 1 ? 0 : last * k / (count - 1));
      uint64_t words[8] = {};
      __builtin_memcpy(words, at, line);
      uint64_t sum = 0;
      for (int w = 0; w < 8; ++w) sum += words[w] * (2 * (uint64_t)w + 0x9e3779b97f4a7c15ul);
      hash = (hash ^ sum) * 1099511628211ul;
    }
  }
  return hash;
}
"""


@dataclass
class _Results:
    """Results, and the state of the inputs they were computed from."""

    outputs: tuple[Any, ...]
    versions: list[int]
    addresses: list[int]
    memory: bytes  # addresses and sizes, for `sample`
    hash: int
    references: list[weakref.ref[Tensor]]

    def is_current(self, inputs: Sequence[Tensor]) -> bool:
        if [tensor.data_ptr() for tensor in inputs] != self.addresses:
            return False
        return _versions(inputs) == self.versions and _sampler()(self.memory) == self.hash


class FrozenRegion:
    """Computes the results of a graph of weights, and keeps them while the weights stay the same."""

    is_capturable = False  # a CUDA graph would not notice that weights changed

    def __init__(self, module: fx.GraphModule, num_weights: int, reason: str) -> None:
        self.module = module
        self.num_weights, self.reason = num_weights, reason  # what is packed, and why
        self.times_computed = 0
        self._results: dict[tuple[int, ...], _Results] = {}
        self._lock = threading.RLock()  # freeing an input may remove its results at any moment

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        found = self._results.get(tuple(map(id, inputs)))
        if found is not None and found.is_current(inputs):
            return found.outputs
        return self._compute(inputs)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the results that are kept."""
        results = list(self._results.values())
        return sum(t.nbytes for result in results for t in result.outputs)

    def _compute(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if any(isinstance(value, FakeTensor) for value in inputs):
            return tuple(self.module(*inputs))  # shape propagation
        with torch.inference_mode(False), torch.no_grad():
            outputs = tuple(self.module(*inputs))
        self.times_computed += 1
        key = tuple(map(id, inputs))
        remove = functools.partial(_remove_results, weakref.ref(self), key)
        memory = _pack_memory(inputs)
        results = _Results(
            outputs,
            _versions(inputs),
            [tensor.data_ptr() for tensor in inputs],
            memory,
            _sampler()(memory),
            [weakref.ref(tensor, remove) for tensor in inputs],
        )
        with self._lock:
            self._results[key] = results
        return outputs

    def remove(self, key: tuple[int, ...]) -> None:
        with self._lock:
            self._results.pop(key, None)


def describe_frozen_regions(graph: fx.Graph) -> list[str]:
    """What was packed for each frozen region of a final trace, for `explain`."""
    lines = []
    for node in graph.nodes:
        region = getattr(node.target, "call", None)
        if isinstance(region, FrozenRegion):
            kept = f"{format_bytes(region.packed_bytes)} in copies"
            times = format_count(region.times_computed, "time")
            lines.append(f"{region.num_weights} of {region.reason}; {kept}, packed {times}")
    return lines


def _remove_results(
    region: weakref.ref[FrozenRegion], key: tuple[int, ...], _: weakref.ref[Tensor]
) -> None:
    owner = region()
    if owner is not None:
        owner.remove(key)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often torch has counted a write to each; it counts none for inference tensors."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _pack_memory(tensors: Sequence[Tensor]) -> bytes:
    words = [len(tensors)]
    for tensor in tensors:
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        words += [tensor.data_ptr(), extent * tensor.element_size() if tensor.numel() else 0]
    return b"".join(word.to_bytes(8, "little", signed=True) for word in words)


@functools.cache
def _sampler() -> Any:
    function = native.load(SOURCE).sample
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_uint64
    return function
