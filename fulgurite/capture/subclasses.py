"""Tensor subclasses: the context of a subclass that a graph returns holds no symbols.

In: the subclasses that AOTAutograd finds while it traces a graph. Out: their contexts with numbers in the
place of symbols, and a guard on each such number.

A wrapper subclass is its inner tensors and a context: what `__tensor_flatten__` returns. AOTAutograd keeps
the context of the trace and uses it in every call. If an integer of the program has become a symbol, the
context may hold this symbol, and later calls would return the value of the first call.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SYMBOL_TYPES: dict[type, type] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}


@contextmanager
def specialize_subclass_contexts(outputs: Iterable[Any]) -> Iterator[None]:
    """Specialize the contexts of subclasses that AOTAutograd traces inside the block.

    outputs   example values of the captured graph's outputs. Their symbols are specialized first,
              because AOTAutograd returns a size either as a symbol or as a number.
    """
    for value in outputs:
        _specialize_context(value)
    original = SubclassCreationMeta.__post_init__

    def specialize(meta: SubclassCreationMeta) -> None:
        original(meta)
        if not _takes_sizes_at_runtime(type(meta.original_subclass)):
            meta.meta = specialize_symbols(meta.meta)

    SubclassCreationMeta.__post_init__ = specialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubclassCreationMeta.__post_init__ = original  # type: ignore[method-assign]


def _specialize_context(value: Any) -> None:
    """Specialize the symbols in the context of a subclass, and of the subclasses inside it."""
    if not is_traceable_wrapper_subclass(value):
        return
    names, context = value.__tensor_flatten__()
    if not _takes_sizes_at_runtime(type(value)):
        specialize_symbols(context)
    for name in names:
        _specialize_context(getattr(value, name))


def _takes_sizes_at_runtime(subclass: type) -> bool:
    """Whether the class is torch's own: DTensor replaces the symbols by the outer sizes of each call."""
    return subclass.__module__.split(".")[0] == "torch"


def specialize_symbols(value: Any) -> Any:
    """`value` with each symbol inside replaced by its number, which becomes a guard.

    Looks into tuples, lists, dicts and dataclasses. The value itself, if it holds no symbol.
    """
    number = SYMBOL_TYPES.get(type(value))
    if number is not None:
        return value if value.node.is_nested_int() else number(value)
    if isinstance(value, (tuple, list)):
        return _specialize_sequence(value)
    if isinstance(value, dict):
        changed = {key: specialize_symbols(one) for key, one in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _specialize_fields(value)
    return value


def _specialize_sequence(value: tuple[Any, ...] | list[Any]) -> Any:
    changed = [specialize_symbols(one) for one in value]
    if all(one is other for one, other in zip(changed, value, strict=True)):
        return value
    return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)


def _specialize_fields(value: Any) -> Any:
    found = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)
    }
    changed = {name: specialize_symbols(one) for name, one in found.items()}
    if all(changed[name] is found[name] for name in found):
        return value
    result = copy.copy(value)
    for name, one in changed.items():
        object.__setattr__(result, name, one)  # the dataclass may be frozen
    return result
