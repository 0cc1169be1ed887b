"""Inputs that share memory, where a graph writes to one of them.

In: a captured graph, the inputs it was captured with, what runs it compiled. Out: a callable that runs it compiled as
long as its inputs overlap as they did then. Which inputs overlap, and by how much, is part of what AOTAutograd compiles
(`a.mul_(2); a + b` is another program where b lies inside a), but TorchDynamo's guards only tell whether two inputs
are one object. Inputs that overlap in another way go through the captured graph as it is, op by op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fulgurite.trace.cost import size_hint

Span = tuple[int, int, int]  # first byte, behind the last byte, which input
Pattern = list[tuple[tuple[int, int], ...]]  # inputs that overlap: each with its storage offset
MOST_KNOWN = 16  # sets of addresses; batches that are loaded ahead take turns in a few


def as_captured(
    run: Callable[..., Any], captured: Callable[..., Any], inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`run` for inputs that overlap as these do, `captured` for others."""
    places = [k for k, value in enumerate(inputs) if has_memory(value)]
    if len(places) < 2:
        return run
    sizes = [(k, _fixed_bytes(inputs[k])) for k in places]
    expected = pattern(_traced_spans(inputs, places), inputs)
    told = not expected and all(count is not None for _, count in sizes)  # by addresses alone
    apart: set[tuple[int, ...]] = (
        set()
    )  # addresses where nothing overlaps: a model's hardly ever move

    def call(*given: Any) -> Any:
        addresses = tuple([given[k].data_ptr() for k in places])
        if addresses in apart:
            return run(*given)
        spans = [_span(given[k], k, count) for k, count in sizes]
        if pattern(spans, given) != expected:
            return captured(*given)
        if told:
            if len(apart) >= MOST_KNOWN:
                apart.clear()
            apart.add(addresses)
        return run(*given)

    return call


def has_memory(value: Any) -> bool:
    """Whether it is a tensor with addresses of its own: not a wrapper, nor sparse."""
    plain = type(value) in (Tensor, torch.nn.Parameter) or isinstance(value, FakeTensor)
    return plain and value.layout is torch.strided and value.device.type != "meta"


def pattern(spans: list[Span], inputs: Sequence[Any]) -> Pattern:
    """Which inputs overlap; none, mostly, and then sorting them is enough to see it."""
    spans.sort()
    if all(before[1] <= after[0] for before, after in itertools.pairwise(spans)):
        return []
    found = []
    for k, (_, end, position) in enumerate(spans):
        for start, other_end, other in itertools.islice(spans, k + 1, None):
            if start >= end:
                break
            if other_end > start:  # it has elements
                pair = sorted((position, other))
                found.append(tuple((p, size_hint(inputs[p].storage_offset())) for p in pair))
    return sorted(found)


def _span(tensor: Tensor, position: int, count: int | None) -> Span:
    start = tensor.data_ptr()
    if not start:  # empty, or its memory was taken back
        return 0, 0, position
    return start, start + (_bytes(tensor) if count is None else count), position


def _fixed_bytes(tensor: Tensor) -> int | None:
    """Bytes from the first to the last, if no size is a symbol: then the guards hold them fixed."""
    fixed = all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))
    return _bytes(tensor) if fixed else None


def _bytes(tensor: Tensor) -> int:
    sizes = [size_hint(size) for size in tensor.shape]
    if 0 in sizes:
        return 0
    strides = map(size_hint, tensor.stride())
    return (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))) * tensor.itemsize


def _traced_spans(inputs: Sequence[Any], places: Sequence[int]) -> list[Span]:
    """Spans of FakeTensors, which have no addresses: each storage is given a stretch of its own."""
    begins: dict[int, int] = {}
    spans = []
    for position in places:
        tensor = inputs[position]
        begin = begins.setdefault(tensor.untyped_storage()._cdata, len(begins) << 48)
        start = begin + size_hint(tensor.storage_offset()) * tensor.itemsize
        spans.append((start, start + _bytes(tensor), position))
    return spans
