"""The fuser's IR: a region is a list of statements `name[axes] = expression`.

In flows what `from_trace` read from a region's fx graph; out flow regions that segments, schedules and
code generators work on. Nothing here knows of threads, tiles or languages.

    ss[i]   = sum_j (x[i,j] * x[i,j])
    y[i,j]  = (x[i,j] * rsqrt(((ss[i] / 4096.0) + 1e-06))) * w[j]

Views are index maps: they have no statement, only other indices in the loads (`expression.py`). `check` says what is
wrong with a region, if anything is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, Operation, loads, walk
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.primitives import PRIMITIVES


@dataclass(frozen=True, slots=True)
class Tensor:
    """Memory with a layout: a region input, or where a statement's values are stored."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    pairs: bool = False  # complex numbers, seen as real ones with one more dimension, of two

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether it is known to have no elements."""
        return any(size == 0 for size in self.sizes)

    def __str__(self) -> str:
        shape = ", ".join(str(size) for size in self.sizes)
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{shape}]"


@dataclass(frozen=True, slots=True)
class Reduction:
    """kind is sum, prod, max or min (max and min give NaN where there is one)."""

    kind: str
    axes: tuple[Axis, ...]
    about: str | None = None  # squared distances from the mean of what this statement sums up


@dataclass(frozen=True, slots=True)
class Scan:
    """At each place the reduction of everything up to it along one of the statement's own axes.

    kind is sum, prod, max, min (NaN from the first one on) or logsumexp.
    """

    kind: str
    axis: Axis


@dataclass(frozen=True, slots=True)
class Statement:
    """tensor[axes] = expression, its reduction over further axes, or its scan along one of them."""

    tensor: Tensor
    axes: tuple[Axis, ...]
    reduction: Reduction | None
    expression: Expression
    origin: str = ""
    loads: tuple[Load, ...] = field(default=(), compare=False)
    scan: Scan | None = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def all_axes(self) -> tuple[Axis, ...]:
        return self.axes + (self.reduction.axes if self.reduction else ())

    def __str__(self) -> str:
        left = f"{self.name}[{','.join(axis.name for axis in self.axes)}]"
        if self.scan is not None:
            return f"{left} = scan_{self.scan.kind}_{self.scan.axis.name} {self.expression}"
        if self.reduction is None:
            return f"{left} = {self.expression}"
        over = ",".join(axis.name for axis in self.reduction.axes)
        return f"{left} = {self.reduction.kind}_{over} {self.expression}"


def statement(
    tensor: Tensor,
    axes: tuple[Axis, ...],
    expression: Expression,
    reduction: Reduction | None = None,
    origin: str = "",
    scan: Scan | None = None,
) -> Statement:
    return Statement(tensor, axes, reduction, expression, origin, tuple(loads(expression)), scan)


@dataclass(frozen=True, slots=True)
class Output:
    """One entry of the region's result.

    A tensor is a strided window onto `name` (a statement's memory or a region input); a dynamic
    size is `size`; None is neither.
    """

    name: str | None = None
    sizes: tuple[Index, ...] = ()
    strides: tuple[Index, ...] = ()
    offset: Index = indices.ZERO
    size: Index | None = None
    whole: bool = False  # the window is exactly the memory, nothing to restride
    pairs: bool = False  # its last dimension, of two, is the parts of complex numbers


@dataclass(frozen=True)
class Region:
    """What one fx region means. `arguments` are the placeholders in order: a tensor or a symbol."""

    arguments: tuple[Tensor | Index, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[Output, ...]
    writes: tuple[tuple[str, str], ...] = ()  # a statement, and the input that gets its values
    lent: frozenset[str] = frozenset()  # inputs whose memory results may have
    layouts: Mapping[str, Tensor] = field(default_factory=dict)  # inputs, as `refine` splits them
    # what `refine.axis_classes` found, once it was asked
    classes: dict[tuple[str, Axis], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(a for a in self.arguments if isinstance(a, Tensor))

    @property
    def results(self) -> set[str]:
        """Statements that are asked for: returned, or written to an input."""
        returned = {output.name for output in self.outputs if output.name is not None}
        return returned | {name for name, _ in self.writes}

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        found = {t.name: t for t in self.inputs}
        found.update(self.layouts)
        found.update({s.name: s.tensor for s in self.statements})
        return found

    def __str__(self) -> str:
        lines = [f"# {a}" for a in self.arguments]
        lines += [str(s) for s in self.statements]
        lines += [f"{target} = {name}" for name, target in self.writes]
        lines.append("return " + ", ".join(o.name or str(o.size) for o in self.outputs))
        return "\n".join(lines)


def check(region: Region) -> None:
    """Raises AssertionError that names the statement where the region breaks a rule of the IR."""
    known: dict[str, Tensor] = {t.name: region.tensors[t.name] for t in region.inputs}
    for s in region.statements:
        where = f"in `{s}`"
        assert s.name not in known, f"{s.name} is defined twice, {where}"
        assert tuple(a.size for a in s.axes) == s.tensor.sizes, f"axes are not the sizes, {where}"
        assert len(set(s.all_axes)) == len(s.all_axes), f"an axis is there twice, {where}"
        assert s.scan is None or s.reduction is None, f"a scan and a reduction, {where}"
        assert s.scan is None or s.scan.axis in s.axes, f"a scan along no axis of its own, {where}"
        free = s.expression.axes() - set(s.all_axes)
        assert not free, f"axes {free} are not bound, {where}"
        for part in walk(s.expression):
            if isinstance(part, Load):
                assert part.name in known, f"{part.name} is read before it is made, {where}"
                tensor = known[part.name]
                assert len(part.index) == len(tensor.sizes), f"{part} has a wrong rank, {where}"
                assert part.dtype == tensor.dtype, f"{part} has a wrong dtype, {where}"
            elif isinstance(part, Operation):
                assert part.name in PRIMITIVES, f"{part.name} is no primitive, {where}"
                arity = PRIMITIVES[part.name].arity
                assert len(part.arguments) == arity, f"{part.name} takes {arity}, {where}"
        known[s.name] = s.tensor
    for output in region.outputs:
        assert output.name is None or output.name in known, f"output {output.name} is not made"
    for name, target in region.writes:
        old, new = known[target], known[name]
        assert old.dtype == new.dtype, f"{name} is not of the dtype of {target}"
        strides = [step for size, step in zip(old.sizes, old.strides, strict=True) if size != 1]
        assert tuple(strides) == new.strides or 0 in new.sizes, f"{name} is laid out otherwise"
