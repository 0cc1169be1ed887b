"""Welford: the sum of squared distances from the mean, in the same pass as the sum.

In: a `KernelWriter` whose schedule names such reductions (`welford`). Out: lines. Every lane of a
block has a running state of its own: its first value, the mean of the distances from it, and the
squares about that mean (m2). Lanes, and then splits, are merged by distances from one of the first
values (Chan), so that nothing large is subtracted:

    update   d = (x - first) - mean     mean += d / n     m2 += d * d * (1 - 1/n)
    merge    a = first - base + mean    m2 + sum n * (a - center)^2    center = sum n * a / total
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulgurite.fuser.codegen.triton.values import strip_parentheses, triton_type
from fulgurite.fuser.codegen.triton.writer import (
    WELFORD_PARTIALS,
    KernelWriter,
    initial_value,
    print_accumulate,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, IndexValue, Load, Operation
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local


@dataclass(frozen=True)
class WelfordState:
    """Names of the running state."""

    blocks: str  # so far
    first: str
    mean: str
    m2: str


def open_welford(w: KernelWriter, x: Local) -> WelfordState:
    b = w.body
    names = [b.unique_name(f"{x.name}_{what}") for what in ("blocks", "first", "mean", "m2")]
    for name, shape in zip(names, ["[]", *[w.print_block_shape()] * 3], strict=True):
        b.emit(f"{name} = tl.full({shape}, 0.0, {triton_type(x.dtype)})")
    return WelfordState(*names)


def update_welford(w: KernelWriter, x: Local, total: str, states: list[WelfordState]) -> None:
    """One block: adds it to the sum `total`, and to each state."""
    b = w.body
    weight, delta = b.unique_name("weight"), b.unique_name("delta")
    value = strip_parentheses(b.print_expression(x.expression))
    if not value.isidentifier():
        value, text = b.unique_name("value"), value
        b.emit(f"{value} = {text}")
    masked = w.mask_value(value, initial_value(x), w.nest.body)
    b.emit(print_accumulate(b, x, total, masked))
    for state in states:
        b.emit(f"{state.blocks} += 1.0")
        b.emit(f"{weight} = 1.0 / {state.blocks}")
        b.emit(f"{state.first} = tl.where({state.blocks} == 1.0, {value}, {state.first})")
        distance = f"{value} - {state.first} - {state.mean}"
        b.emit(f"{delta} = {w.mask_value(distance, '0.0', w.nest.body)}")
        b.emit(f"{state.mean} += {delta} * {weight}")
        b.emit(f"{state.m2} += {delta} * {delta} * (1.0 - {weight})")


def close_welford(w: KernelWriter, x: Local, state: WelfordState, name: str) -> None:
    """Merges all lanes of a block; a split also stores its base, center and count."""
    b = w.body
    (axis,) = w.nest.body
    block, dtype = w.schedule.block_sizes[axis], triton_type(x.dtype)
    dimension = b.block_axes.index(axis)
    keep = ", keep_dims=True" if len(b.block_axes) > 1 else ""
    lanes = b.print_broadcast(f"tl.arange(0, {block})", axis)
    length = b.unique_name("length")
    base, center, count = (b.unique_name(f"{x.name}_{what}") for what in WELFORD_PARTIALS)
    delta, lane_count = b.unique_name("delta"), b.unique_name("lane_count")
    start = "" if w.split_start == "0" else f" - {w.split_start}"
    b.emit(f"{length} = {w.split_end}{start}")
    blocks = f"tl.maximum({length} - {lanes} + {block - 1}, 0) // {block}"
    b.emit(f"{lane_count} = ({blocks}).to({dtype})")
    b.emit(f"{count} = tl.sum({lane_count}, {dimension}{keep})")
    firsts = f'tl.where({lane_count} > 0, {state.first}, float("-inf"))'
    b.emit(f"{base} = tl.max({firsts}, {dimension}{keep})")
    distance = f"{state.first} - {base} + {state.mean}"
    b.emit(f"{delta} = tl.where({lane_count} > 0, {distance}, 0.0)")
    total = f"tl.sum({lane_count} * {delta}, {dimension}{keep})"
    b.emit(f"{center} = {total} / tl.maximum({count}, 1.0)")
    b.emit(f"{delta} -= {center}")
    b.emit(f"{name} = tl.sum({state.m2} + {lane_count} * {delta} * {delta}, {dimension}{keep})")
    if w.schedule.num_splits:
        b.emit(f"{base} = tl.where({count} > 0, {base}, 0.0)")
        for what, text in zip(WELFORD_PARTIALS, (base, center, count), strict=True):
            b.names[f"{x.name}_{what}"] = text


def merge_welford_partials(w: KernelWriter, x: Local, split: Index, row: Index) -> dict[str, Local]:
    """The squares of all splits about the mean of all, as locals of the combine kernel."""
    dtype = x.dtype

    def load(name: str, at: Index) -> Expression:
        tensor = w.partials[name]
        column = row if tensor.sizes[1] != 1 else indices.ZERO
        return Load(tensor.name, (at * tensor.sizes[1] + column,), tensor.dtype)

    def apply(name: str, *arguments: Expression) -> Operation:
        return Operation(name, arguments, dtype)

    base, center, count = (load(f"{x.name}_{what}", split) for what in WELFORD_PARTIALS)
    # distances from the mean of the first split
    bases = apply("sub", base, load(f"{x.name}_base", indices.ZERO))
    centers = apply("sub", center, load(f"{x.name}_center", indices.ZERO))
    delta = Local(f"{x.name}_delta", apply("add", bases, centers), dtype)
    distance = Load(delta.name, (), dtype)
    weighted = apply("mul", count, distance)
    shifted_m2 = apply("add", load(x.name, split), apply("mul", weighted, distance))
    m2 = Local(f"{x.name}_m2", shifted_m2, dtype, "sum", "row_reduction")
    total = Local(f"{x.name}_delta_sum", weighted, dtype, "sum", "row_reduction")
    (axis,) = w.nest.body
    delta_sum = Load(total.name, (), dtype)
    correction = apply("div", apply("mul", delta_sum, delta_sum), _length_of(axis, dtype))
    result = apply("sub", Load(m2.name, (), dtype), correction)
    combined = Local(x.name, result, dtype, None, "row")
    return {local.name: local for local in (delta, m2, total, combined)}


def _length_of(axis: Axis, dtype: torch.dtype) -> Expression:
    if axis.size.is_constant:
        return Constant(float(axis.size.constant), dtype)
    return Operation("cast", (IndexValue(axis.size, torch.int64),), dtype)
