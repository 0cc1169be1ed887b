"""Squared distances from the mean in the same walk that sums up: a variance that reads its row once.

In: a `Writer` whose schedule names such sums (`about`). Out: lines. Every element of a block is a stream of its own,
with its first value, the mean of the distances from it, and the squares about that mean (Welford); streams, and then
parts, are merged by distances from one of the first values (Chan), so that nothing large is subtracted:

    step     d = (x - first) - mean        mean += d / n        squares += d * d * (1 - 1/n)
    merge    a = first - base + mean       squares + sum n * (a - center)^2        center = sum n * a / total
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulgurite.fuser.codegen.triton.values import bare, value_tl
from fulgurite.fuser.codegen.triton.writer import MERGED, Writer, start_of, step_text
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, Load, Operation, Position
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local


@dataclass(frozen=True)
class Streams:
    """Names of what one such sum holds while the body is walked."""

    seen: str  # blocks so far
    first: str
    mean: str
    squares: str


def open_squares(w: Writer, x: Local) -> Streams:
    b = w.body
    names = [b.fresh(f"{x.name}_{what}") for what in ("seen", "first", "mean", "sums")]
    for name, shape in zip(names, ["[]", *[w.block_shape()] * 3], strict=True):
        b.line(f"{name} = tl.full({shape}, 0.0, {value_tl(x.dtype)})")
    return Streams(*names)


def add_squares(w: Writer, x: Local, total: str, partners: list[Streams]) -> None:
    """One block: its sum, and what each partner has of it."""
    b = w.body
    portion, away = b.fresh("portion"), b.fresh("away")
    value = bare(b.expression(x.expression))
    if not value.isidentifier():
        value, text = b.fresh("value"), value
        b.line(f"{value} = {text}")
    b.line(step_text(b, x, total, w.masked(value, start_of(x), w.nest.body)))
    for at in partners:
        b.line(f"{at.seen} += 1.0")
        b.line(f"{portion} = 1.0 / {at.seen}")
        b.line(f"{at.first} = tl.where({at.seen} == 1.0, {value}, {at.first})")
        distance = w.masked(f"{value} - {at.first} - {at.mean}", "0.0", w.nest.body)
        b.line(f"{away} = {distance}")
        b.line(f"{at.mean} += {away} * {portion}")
        b.line(f"{at.squares} += {away} * {away} * (1.0 - {portion})")


def close_squares(w: Writer, x: Local, at: Streams, name: str) -> None:
    """All streams of a block together; a part's base, center and count stay for the finish."""
    b = w.body
    (axis,) = w.nest.body
    block, kind = w.schedule.sizes[axis], value_tl(x.dtype)
    place, keep = b.blocks.index(axis), ", keep_dims=True" if len(b.blocks) > 1 else ""
    length, lanes = b.fresh("length"), b.shaped(f"tl.arange(0, {block})", axis)
    base, center, count = (b.fresh(f"{x.name}_{what}") for what in MERGED)
    away, each = b.fresh("away"), b.fresh("each")
    start = "" if w.part_start == "0" else f" - {w.part_start}"
    b.line(f"{length} = {w.part_end}{start}")
    b.line(f"{each} = (tl.maximum({length} - {lanes} + {block - 1}, 0) // {block}).to({kind})")
    b.line(f"{count} = tl.sum({each}, {place}{keep})")
    chosen = f'tl.where({each} > 0, {at.first}, float("-inf"))'
    b.line(f"{base} = tl.max({chosen}, {place}{keep})")
    b.line(f"{away} = tl.where({each} > 0, {at.first} - {base} + {at.mean}, 0.0)")
    b.line(f"{center} = tl.sum({each} * {away}, {place}{keep}) / tl.maximum({count}, 1.0)")
    b.line(f"{away} -= {center}")
    b.line(f"{name} = tl.sum({at.squares} + {each} * {away} * {away}, {place}{keep})")
    if w.schedule.split:
        b.line(f"{base} = tl.where({count} > 0, {base}, 0.0)")
        for what, text in zip(MERGED, (base, center, count), strict=True):
            b.names[f"{x.name}_{what}"] = text


def merged_parts(w: Writer, x: Local, t: Index, place: Index) -> dict[str, Local]:
    """The squares of all parts about the mean of all, as locals of the kernel that finishes."""
    dtype = x.dtype

    def part(name: str, at: Index) -> Expression:
        tensor = w.parts[name]
        own = place if tensor.sizes[1] != 1 else indices.ZERO
        return Load(tensor.name, (at * tensor.sizes[1] + own,), tensor.dtype)

    def of(name: str, *arguments: Expression) -> Operation:
        return Operation(name, arguments, dtype)

    base, center, count = (part(f"{x.name}_{what}", t) for what in MERGED)
    # distances from the mean of the first part
    bases = of("sub", base, part(f"{x.name}_base", indices.ZERO))
    centers = of("sub", center, part(f"{x.name}_center", indices.ZERO))
    away = Local(f"{x.name}_away", of("add", bases, centers), dtype)
    shift = Load(away.name, (), dtype)
    weighted = of("mul", count, shift)
    around = of("add", part(x.name, t), of("mul", weighted, shift))
    squares = Local(f"{x.name}_around", around, dtype, "sum", "rowsum")
    total = Local(f"{x.name}_shift", weighted, dtype, "sum", "rowsum")
    (axis,) = w.nest.body
    shifted = Load(total.name, (), dtype)
    less = of("div", of("mul", shifted, shifted), _length(axis, dtype))
    whole = Local(x.name, of("sub", Load(squares.name, (), dtype), less), dtype, None, "row")
    return {local.name: local for local in (away, squares, total, whole)}


def _length(axis: Axis, dtype: torch.dtype) -> Expression:
    if axis.size.is_constant:
        return Constant(float(axis.size.constant), dtype)
    return Operation("cast", (Position(axis.size, torch.int64),), dtype)
