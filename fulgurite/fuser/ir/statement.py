"""The fuser's IR: a region is a list of statements `name[axes] = expression`.

In: what `frontend/lower_graph.py` builds from a region's fx graph. Out: regions that segmentation,
schedules and code generators read. The IR knows no threads, tiles or target languages.

    ss[i]   = sum_j (x[i,j] * x[i,j])
    y[i,j]  = (x[i,j] * rsqrt(((ss[i] / 4096.0) + 1e-06))) * w[j]

An indexed store writes at computed indices, on top of initial values:

    out[i0,i1] = 0.0; out[index[s0],s1] sum= grad[s0,s1]

A view has no statement of its own. It only changes the indices of loads (`expression.py`).
`verify_region` checks the rules of the IR.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    Expression,
    IndexValue,
    Load,
    Operation,
    collect_loads,
    walk,
)
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.primitives import PRIMITIVES

ARGSORT_KEY_DTYPES = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A buffer with a strided layout: a region input, or the result of a statement."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    is_view_as_real: bool = False  # complex data as `torch.view_as_real` shows it
    is_negated: bool = False  # an input with the negative bit, which the launcher resolves

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether the tensor is statically known to have no elements."""
        return any(size == 0 for size in self.sizes)

    def __str__(self) -> str:
        shape = ", ".join(str(size) for size in self.sizes)
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{shape}]"


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction over `axes`. `kind` is sum, prod, max, min or argsort.

    Max and min propagate NaN. An argsort reduces integer keys to the position of one of them, row-
    major over `axes`: the key with `rank` others before it, in ascending order. Of equal keys the
    first comes first. The keys do not depend on the axes of `rank`.
    """

    kind: str
    axes: tuple[Axis, ...]
    # Set for sums of squared deviations: the statement that sums the same values. The mean comes
    # from it, so both sums can run in one Welford pass.
    welford_sum: str | None = None
    rank: Index | None = None  # of an argsort, over the statement's own axes


@dataclass(frozen=True, slots=True)
class Scan:
    """An inclusive scan along one of the statement's own axes.

    `kind` is sum, prod, max, min or logsumexp. Max and min stay NaN after the first NaN.
    """

    kind: str
    axis: Axis


@dataclass(frozen=True, slots=True)
class Scatter:
    """An indexed store: `tensor[index] kind= value` at every point of `axes`, in row-major order.

    `kind` is set, sum, prod, max or min. The statement's own expression is the initial value of the
    tensor. Several points may write the same element: of `set`, the last one wins.
    """

    kind: str
    axes: tuple[Axis, ...]
    index: tuple[Index, ...]  # one for each dimension of the tensor
    value: Expression

    def __str__(self) -> str:
        return f"[{','.join(str(i) for i in self.index)}] {self.kind}= {self.value}"


@dataclass(frozen=True, slots=True)
class Statement:
    """`tensor[axes] = expression`, optionally reduced over more axes or scanned along one axis.

    With `scatter`, the expression is the initial value, and values are stored on top of it.
    """

    tensor: Tensor
    axes: tuple[Axis, ...]
    reduction: Reduction | None
    expression: Expression
    origin: str = ""
    loads: tuple[Load, ...] = field(default=(), compare=False)
    scan: Scan | None = None
    scatter: Scatter | None = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def all_axes(self) -> tuple[Axis, ...]:
        if self.scatter is not None:
            return self.axes + self.scatter.axes
        return self.axes + (self.reduction.axes if self.reduction else ())

    @property
    def loop_axes(self) -> tuple[Axis, ...]:
        """The axes of the points at which the result is stored."""
        return self.axes if self.scatter is None else self.scatter.axes

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """All its expressions. Those of an indexed store are the value, the indices, the base."""
        if self.scatter is None:
            return (self.expression,)
        positions = (IndexValue(index, torch.int64) for index in self.scatter.index)
        return (self.scatter.value, *positions, self.expression)

    def __str__(self) -> str:
        left = f"{self.name}[{','.join(axis.name for axis in self.axes)}]"
        if self.scan is not None:
            return f"{left} = scan_{self.scan.kind}_{self.scan.axis.name} {self.expression}"
        if self.scatter is not None:
            return f"{left} = {self.expression}; {self.name}{self.scatter}"
        if self.reduction is None:
            return f"{left} = {self.expression}"
        over = ",".join(axis.name for axis in self.reduction.axes)
        rank = "" if self.reduction.rank is None else f"[{self.reduction.rank}]"
        return f"{left} = {self.reduction.kind}_{over}{rank} {self.expression}"


def make_statement(
    tensor: Tensor,
    axes: tuple[Axis, ...],
    expression: Expression,
    reduction: Reduction | None = None,
    origin: str = "",
    scan: Scan | None = None,
    scatter: Scatter | None = None,
) -> Statement:
    """Creates a statement and collects its loads."""
    s = Statement(tensor, axes, reduction, expression, origin, (), scan, scatter)
    loads = tuple(load for part in s.expressions for load in collect_loads(part))
    return replace(s, loads=loads)


@dataclass(frozen=True, slots=True)
class Output:
    """One entry of the region's result.

    A tensor is a strided view of `name`, which is a statement's buffer or a region input. A dynamic
    size has `size` set. None has neither.
    """

    name: str | None = None
    sizes: tuple[Index, ...] = ()
    strides: tuple[Index, ...] = ()
    offset: Index = indices.ZERO
    size: Index | None = None
    is_full_buffer: bool = False  # the view is the whole buffer: no as_strided needed
    is_view_as_real: bool = False  # the launcher returns it through `view_as_complex`
    is_conj: bool = False  # the launcher sets the conjugate bit
    is_neg: bool = False  # the launcher sets the negative bit


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a statement is stored in another buffer: from `offset` on, with its own strides."""

    buffer: str
    offset: Index


@dataclass(frozen=True)
class Region:
    """The IR of one fx region. `arguments` are its placeholders in order: tensors or symbols."""

    arguments: tuple[Tensor | Index, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[Output, ...]
    # (statement, input that it overwrites); the input twice if `slices` overwrite it
    writes: tuple[tuple[str, str], ...] = ()
    donated: frozenset[str] = frozenset()  # inputs whose buffers results may reuse
    # inputs with the dimensions that `split_axes` gave them
    input_layouts: Mapping[str, Tensor] = field(default_factory=dict)
    # statements that are stored in a slice of one of `buffers`, which have no statement themselves
    slices: Mapping[str, Slice] = field(default_factory=dict)
    buffers: tuple[Tensor, ...] = ()
    # the cached result of `assign_loop_ids`
    loop_ids: dict[tuple[str, Axis], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(a for a in self.arguments if isinstance(a, Tensor))

    @property
    def results(self) -> set[str]:
        """Statements that the region returns or writes to an input, and buffers of such."""
        found = {output.name for output in self.outputs if output.name is not None}
        found |= {name for name, _ in self.writes}
        return found | {name for name, place in self.slices.items() if place.buffer in found}

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        found = {t.name: t for t in self.inputs}
        found.update(self.input_layouts)
        found.update({s.name: s.tensor for s in self.statements})
        found.update({t.name: t for t in self.buffers})
        return found

    def __str__(self) -> str:
        lines = [f"# {a}" for a in self.arguments]
        lines += [str(s) for s in self.statements]
        lines += [f"{target} = {name}" for name, target in self.writes]
        lines.append("return " + ", ".join(o.name or str(o.size) for o in self.outputs))
        return "\n".join(lines)


def _verify_axes(s: Statement, where: str) -> None:
    """Checks that every axis of an expression is bound."""
    if s.scatter is None:
        _verify_rank(s, where)
        free = s.expression.axes() - set(s.all_axes)
        assert not free, f"axes {free} are not bound {where}"
        return
    assert s.reduction is None and s.scan is None, f"a store that reduces or scans {where}"
    assert len(s.scatter.index) == len(s.tensor.sizes), f"an index of the wrong rank {where}"
    *stored, base = s.expressions
    free = base.axes() - set(s.axes)
    free |= set().union(*(e.axes() for e in stored)) - set(s.scatter.axes)
    assert not free, f"axes {free} are not bound {where}"


def verify_region(region: Region) -> None:
    """Raises an AssertionError that names the first statement that breaks a rule of the IR."""
    known: dict[str, Tensor] = {t.name: region.tensors[t.name] for t in region.inputs}
    for s in region.statements:
        where = f"in `{s}`"
        assert s.name not in known, f"{s.name} is defined twice {where}"
        assert tuple(a.size for a in s.axes) == s.tensor.sizes, (
            f"axes do not match the tensor sizes {where}"
        )
        assert len(set(s.all_axes)) == len(s.all_axes), f"duplicate axis {where}"
        assert s.scan is None or s.reduction is None, f"both a scan and a reduction {where}"
        assert s.scan is None or s.scan.axis in s.axes, (
            f"the scan axis is not an axis of the statement {where}"
        )
        _verify_axes(s, where)
        for part in (part for expression in s.expressions for part in walk(expression)):
            if isinstance(part, Load):
                assert part.name in known, f"{part.name} is read before it is defined {where}"
                tensor = known[part.name]
                assert len(part.index) == len(tensor.sizes), f"{part} has the wrong rank {where}"
                assert part.dtype == tensor.dtype, f"{part} has the wrong dtype {where}"
            elif isinstance(part, Operation):
                assert part.name in PRIMITIVES, f"{part.name} is not a primitive {where}"
                arity = PRIMITIVES[part.name].arity
                assert len(part.arguments) == arity, f"{part.name} takes {arity} arguments {where}"
        known[s.name] = s.tensor
    known.update({t.name: t for t in region.buffers})
    for name, place in region.slices.items():
        assert name in known and place.buffer in known, f"{name} is not in {place.buffer}"
        assert known[name].dtype == known[place.buffer].dtype, f"{name} has the wrong dtype"
    for output in region.outputs:
        assert output.name is None or output.name in known, f"output {output.name} is not defined"
    for name, target in region.writes:
        old, new = known[target], known[name]
        assert old.dtype == new.dtype, f"{name} and {target} differ in dtype"
        old_strides, new_strides = (
            [step for size, step in zip(t.sizes, t.strides, strict=True) if size != 1]
            for t in (old, new)
        )
        assert old_strides == new_strides or 0 in new.sizes, (
            f"{name} and {target} differ in strides"
        )


def _verify_rank(s: Statement, where: str) -> None:
    """Checks that an argsort, and nothing else, has a rank."""
    if s.reduction is None:
        return
    rank, is_argsort = s.reduction.rank, s.reduction.kind == "argsort"
    assert (rank is not None) == is_argsort, f"an argsort, and nothing else, has a rank {where}"
    if rank is None:
        return
    assert rank.axes() <= set(s.axes), f"the rank depends on other axes {where}"
    assert not rank.indirect_indices(), f"the rank is loaded {where}"
    assert not s.expression.axes() & rank.axes(), f"the keys depend on the rank {where}"
    assert s.expression.dtype in ARGSORT_KEY_DTYPES, f"keys of {s.expression.dtype} {where}"
