"""Guard on inputs that share memory, for graphs that mutate an input.

In: a captured graph, the inputs it was captured with, its compiled form. Out: a callable that runs the
compiled form if its inputs overlap as they did at capture, and the captured graph op by op otherwise. Calls
that run as captured are reported.

Which inputs overlap, and by how much, is part of what AOTAutograd compiles: `a.mul_(2); a + b` is another
program if b lies inside a. TorchDynamo's guards only check whether two inputs are the same object.

If inputs that overlap need a gradient, all calls run as captured. AOTAutograd replaces them by one tensor.
That tensor has no gradient if the inputs are leaves, or if a view was made without gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fulgurite.capture.view_writes import is_written
from fulgurite.trace.cost import size_hint

Span = tuple[int, int, int]  # first byte, end, position of the input
Report = Callable[[str], None]  # takes the reason why calls run as captured, any number of times
Overlaps = list[tuple[tuple[int, int], ...]]  # overlapping inputs: (position, storage offset) each
OTHER_OVERLAPS = "a mutated input, and inputs that overlap in other ways than at capture"
INNER_OVERLAPS = "a mutated input, and inner tensors of a subclass that overlap other inputs"
SHARED_GRADIENTS = "a mutated input, and inputs that overlap and need a gradient"
MAX_CACHED_ADDRESSES = 16  # sets of addresses: prefetched batches reuse a few buffers


def describe_shared_gradients(module: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Why a graph runs as captured if it may write to memory that inputs with a gradient share."""
    positions = [k for k, value in enumerate(inputs) if has_address(value)]
    found = find_overlaps(_fake_spans(inputs, positions), inputs)
    shared = {position for pair in found for position, _ in pair if _has_gradient(pair, inputs)}
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    is_mutated = any(is_written(placeholders[position]) for position in shared)
    return SHARED_GRADIENTS if is_mutated else None


def _has_gradient(pair: tuple[tuple[int, int], ...], inputs: Sequence[Any]) -> bool:
    return any(inputs[position].requires_grad for position, _ in pair)


def guard_input_aliasing(
    run: Callable[..., Any],
    captured: Callable[..., Any],
    inputs: Sequence[Any],
    report: Report,
) -> Callable[..., Any]:
    """`run` for inputs that overlap as these do, `captured` for other inputs."""
    positions = [k for k, value in enumerate(inputs) if has_address(value)]
    subclasses = [k for k, value in enumerate(inputs) if is_traceable_wrapper_subclass(value)]
    if subclasses:
        run = _guard_inner_tensors(run, captured, positions, subclasses, report)
    if len(positions) < 2:
        return run
    extents = [(k, _static_extent(inputs[k])) for k in positions]
    expected = find_overlaps(_fake_spans(inputs, positions), inputs)
    overlapping = sorted({position for pair in expected for position, _ in pair})
    bases = [(k, _base_layout(inputs[k])) for k in overlapping]
    # with static sizes and no overlap at capture, the addresses alone decide
    is_cacheable = not expected and all(extent is not None for _, extent in extents)
    disjoint: set[tuple[int, ...]] = set()  # addresses without overlap; a model's rarely change

    def call(*args: Any) -> Any:
        addresses = tuple([args[k].data_ptr() for k in positions])
        if addresses in disjoint:
            return run(*args)
        spans = [_tensor_span(args[k], k, extent) for k, extent in extents]
        is_expected = find_overlaps(spans, args) == expected
        if not is_expected or not all(_has_base(args[k], layout) for k, layout in bases):
            report(OTHER_OVERLAPS)
            return captured(*args)
        if is_cacheable:
            if len(disjoint) >= MAX_CACHED_ADDRESSES:
                disjoint.clear()
            disjoint.add(addresses)
        return run(*args)

    return call


def _guard_inner_tensors(
    run: Callable[..., Any],
    captured: Callable[..., Any],
    positions: Sequence[int],
    subclasses: Sequence[int],
    report: Report,
) -> Callable[..., Any]:
    """`run`, unless an inner tensor of a subclass overlaps another tensor: AOTAutograd assumes not."""

    def call(*args: Any) -> Any:
        inner = [one for k in subclasses for one in find_inner_tensors(args[k])]
        tensors = [args[k] for k in positions] + inner
        spans = [_tensor_span(tensor, k, None) for k, tensor in enumerate(tensors)]
        found = find_overlaps(spans, tensors)
        touches_inner = any(k >= len(positions) for pair in found for k, _ in pair)
        if not touches_inner:
            return run(*args)
        report(INNER_OVERLAPS)
        return captured(*args)

    return call


def find_inner_tensors(value: Tensor) -> Iterator[Tensor]:
    """The tensors with an address inside a wrapper subclass, and inside subclasses in it."""
    if has_address(value):
        yield value
    elif is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from find_inner_tensors(getattr(value, name))


def has_address(value: Any) -> bool:
    """Whether a value is a strided tensor with an address: no wrapper subclass, no sparse tensor."""
    plain = type(value) in (Tensor, torch.nn.Parameter) or isinstance(value, FakeTensor)
    return plain and value.layout is torch.strided and value.device.type != "meta"


def has_storage(value: Any) -> bool:
    """Whether a value of a captured graph has a storage: no wrapper of torch.func, no sparse tensor."""
    return isinstance(value, FakeTensor) and value.layout is torch.strided


def find_overlaps(spans: list[Span], inputs: Sequence[Any]) -> Overlaps:
    """Pairs of inputs that overlap. Usually there are none, which sorting alone shows."""
    spans.sort()
    if all(before[1] <= after[0] for before, after in itertools.pairwise(spans)):
        return []
    found = []
    for k, (_, end, position) in enumerate(spans):
        for start, other_end, other in itertools.islice(spans, k + 1, None):
            if start >= end:
                break
            if other_end > start:  # not empty
                pair = sorted((position, other))
                found.append(tuple((p, size_hint(inputs[p].storage_offset())) for p in pair))
    return sorted(found)


def _base_layout(view: Tensor) -> tuple[int | None, ...] | None:
    """Sizes, strides and offset of the tensor that a view is of; None for symbols.

    AOTAutograd's graph takes the base in place of inputs that overlap.
    """
    base = view._base
    if base is None:
        return None
    numbers = (*base.shape, *base.stride(), base.storage_offset())
    return tuple(number if isinstance(number, int) else None for number in numbers)


def _has_base(view: Tensor, layout: tuple[int | None, ...] | None) -> bool:
    found = _base_layout(view)
    if found is None or layout is None or len(found) != len(layout):
        return found is layout
    return all(expected in (None, number) for expected, number in zip(layout, found, strict=True))


def _tensor_span(tensor: Tensor, position: int, extent: int | None) -> Span:
    start = tensor.data_ptr()
    if not start:  # empty, or its storage was freed
        return 0, 0, position
    return start, start + (_extent_bytes(tensor) if extent is None else extent), position


def _static_extent(tensor: Tensor) -> int | None:
    """Bytes from the first to the last element if no size is symbolic; guards then keep it."""
    is_static = all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))
    return _extent_bytes(tensor) if is_static else None


def _extent_bytes(tensor: Tensor) -> int:
    sizes = [size_hint(size) for size in tensor.shape]
    if 0 in sizes:
        return 0
    strides = map(size_hint, tensor.stride())
    return (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))) * tensor.itemsize


def _fake_spans(inputs: Sequence[Any], positions: Sequence[int]) -> list[Span]:
    """Spans of FakeTensors, which have no addresses: each storage gets an address range of its own."""
    bases: dict[int, int] = {}
    spans = []
    for position in positions:
        tensor = inputs[position]
        base = bases.setdefault(tensor.untyped_storage()._cdata, len(bases) << 48)
        start = base + size_hint(tensor.storage_offset()) * tensor.itemsize
        spans.append((start, start + _extent_bytes(tensor), position))
    return spans
