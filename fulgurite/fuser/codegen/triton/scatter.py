"""Indexed stores in Triton: plain stores at computed indices, or atomic operations.

In: a `KernelWriter` and a `Store` with `combine`. Out: the lines of the store.

Atomic operations run in any order. A maximum of floats is one of integers (`atomic_max_float`).
There is no minimum of floats: the frontend negates it into a maximum.
"""

from __future__ import annotations

from fulgurite.fuser.codegen.triton.values import strip_parentheses
from fulgurite.fuser.codegen.triton.writer import KernelWriter
from fulgurite.fuser.ir.expression import IndexValue
from fulgurite.fuser.ir.loop_nest import Store

ATOMIC_FUNCTIONS = {
    "sum": "tl.atomic_add",
    "max": "tl.atomic_max",
    "min": "tl.atomic_min",
}  # of integers; sums of floats too


def emit_indexed_store(w: KernelWriter, store: Store) -> None:
    """Stores every point of the block at its own index."""
    b = w.body
    position = IndexValue(store.index, store.expressions[-1].dtype)
    index = b.print_index(store.index)
    missing = set(b.block_axes) - b.find_axes(position)
    if missing:  # points along these axes store to the same element, one after the other
        index = f"{index} + tl.zeros({w.print_block_shape()}, tl.int32)"
    pointer = f"{w.outputs[store.tensor.name]} + {index}"
    mask = b.print_mask(set(w.nest.grid))
    options = f", mask={mask}" if mask else ""
    if store.combine == "set":
        b.emit(f"tl.store({pointer}, {w.print_stored(store)}{options})")
        return
    assert store.combine in ATOMIC_FUNCTIONS, f"no atomic {store.combine}"
    value = strip_parentheses(b.print_typed(store.value))
    if store.combine == "sum" or not store.tensor.dtype.is_floating_point:
        function = ATOMIC_FUNCTIONS[store.combine]
        b.emit(f'{function}({pointer}, {value}{options}, sem="relaxed")')
        return
    assert store.combine == "max", "a minimum of floats is a maximum of negated ones"
    b.functions.add("atomic_max_float")
    b.emit(f"atomic_max_float({pointer}, {value}, {mask or 'True'})")
