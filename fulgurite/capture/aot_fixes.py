"""Where AOTAutograd is wrong on programs that eager mode runs.

In: its functions. Out: the same functions, corrected by `install`.

- An output that is an input or a view of one is rebuilt by its size, strides and offset if the graph writes to
  memory that several inputs share. AOTAutograd repeats the views of the input on that memory as a whole, and
  before torch 2.13 it returned that whole for the input itself.
- Ops of a tensor subclass without `__torch_dispatch__` run in the first call of a graph, too. The mode in
  which AOTAutograd looks at custom ops there refused them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import OutputType


def install() -> None:
    """Correct AOTAutograd's functions, where this version of torch has them."""
    metadata = runtime_wrappers.create_synthetic_base_metadata
    runtime_wrappers.create_synthetic_base_metadata = _rebuild_by_strides(metadata)
    mode: Any = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None)
    if mode is not None:
        mode.__torch_dispatch__ = _run_plain_subclasses(mode.__torch_dispatch__)


def _rebuild_by_strides(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` returns the metadata of a graph in which inputs that share memory are one input."""

    def create(metadata: Any, merged: Sequence[Any], outer: Any, inner: Any, *args: Any) -> Any:
        created, *others = original(metadata, merged, outer, inner, *args)
        for number, info in enumerate(metadata.output_info):
            if info.base_idx is None or isinstance(merged[info.base_idx], int):
                continue
            new, base = created.output_info[number], inner[merged[info.base_idx][0]]
            kind = new.output_type
            if kind == OutputType.is_input and not _is_same_view(outer[info.base_idx], base):
                kind = OutputType.alias_of_input
            new = dataclasses.replace(new, output_type=kind, view_meta_sequence=None)
            created.output_info[number] = new
        return created, *others

    return create


def _is_same_view(x: Tensor, base: Tensor) -> bool:
    has_same_elements = x.size() == base.size() and x.stride() == base.stride()
    return x._base is None and has_same_elements and x.storage_offset() == base.storage_offset()


def _run_plain_subclasses(original: Callable[..., Any]) -> Callable[..., Any]:
    def __torch_dispatch__(
        self: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = original(self, op, types, args, kwargs)
        if result is NotImplemented and not any(map(_has_dispatch, types)):
            return op(*args, **kwargs)
        return result

    return __torch_dispatch__


def _has_dispatch(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
