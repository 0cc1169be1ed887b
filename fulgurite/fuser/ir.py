"""The fuser's IR: a region is a list of statements `name[axes] = expression`.

In flows what `from_trace` read from a region's fx graph; out flow regions that segments, schedules and
code generators work on. Nothing here knows of threads, tiles or languages.

    ss[i]   = sum_j (x[i,j] * x[i,j])
    y[i,j]  = (x[i,j] * rsqrt(((ss[i] / 4096.0) + 1e-06))) * w[j]

Views are index maps: they have no statement, only other indices in the loads. An expression computes
in its *value type*: float32 for the narrow floats, as torch does, and the dtype itself otherwise; a
`cast` to a narrow float rounds. `check` says what is wrong with a region, if anything is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from . import index as indices
from .index import Axis, Index, Symbol
from .primitives import PRIMITIVES

NARROW_FLOATS = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fnuz: "f8e4m3z",
    torch.float8_e5m2fnuz: "f8e5m2z",
    torch.float8_e8m0fnu: "f8e8m0",
}


# formats that torch only stores: two numbers a byte, looked at through `view(torch.uint8)`
PACKED = {torch.float4_e2m1fn_x2: torch.uint8}


def value_type(dtype: torch.dtype) -> torch.dtype:
    """The type that arithmetic on a tensor of this dtype is done in (torch's opmath type).

    Of complex numbers the type of a part: the IR computes with their parts.
    """
    if dtype.is_complex:
        return value_type(dtype.to_real())
    return torch.float32 if dtype in NARROW_FLOATS else PACKED.get(dtype, dtype)


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a region input or of an earlier statement."""

    name: str
    index: tuple[Index, ...]
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Load:
        return replace(self, index=tuple(i.substitute(axes) for i in self.index))

    def parts(self) -> tuple[Expression, ...]:
        return tuple(a.value for i in self.index for a in i.loaded())

    def __str__(self) -> str:
        return f"{self.name}[{','.join(str(i).replace(' ', '') for i in self.index)}]"

    def axes(self) -> set[Axis]:
        return set().union(*(i.axes() for i in self.index)) if self.index else set()

    def symbols(self) -> set[Symbol]:
        return set().union(*(i.symbols() for i in self.index)) if self.index else set()


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the program."""

    value: int | float | bool
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Constant:
        return self

    def parts(self) -> tuple[Expression, ...]:
        return ()

    def __str__(self) -> str:
        return repr(self.value)

    def axes(self) -> set[Axis]:
        return set()

    def symbols(self) -> set[Symbol]:
        return set()


@dataclass(frozen=True, slots=True)
class Position:
    """The value of an index, as a number (arange, masks of positions, a dynamic size)."""

    index: Index
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Position:
        return replace(self, index=self.index.substitute(axes))

    def parts(self) -> tuple[Expression, ...]:
        return tuple(a.value for a in self.index.loaded())

    def __str__(self) -> str:
        return f"({self.index})"

    def axes(self) -> set[Axis]:
        return self.index.axes()

    def symbols(self) -> set[Symbol]:
        return self.index.symbols()


@dataclass(frozen=True, slots=True)
class Operation:
    """A primitive of `primitives.py`, elementwise."""

    name: str
    arguments: tuple[Expression, ...]
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Operation:
        return replace(self, arguments=tuple(a.substitute(axes) for a in self.arguments))

    def parts(self) -> tuple[Expression, ...]:
        return self.arguments

    def __str__(self) -> str:
        texts = [str(argument) for argument in self.arguments]
        if self.name == "cast":
            return f"{str(self.dtype).removeprefix('torch.')}({texts[0]})"
        sign = PRIMITIVES[self.name].infix if self.name in PRIMITIVES else None
        if sign is None:
            return f"{self.name}({', '.join(texts)})"
        return f"({texts[0]} {sign} {texts[1]})" if len(texts) == 2 else f"{sign}{texts[0]}"

    def axes(self) -> set[Axis]:
        return set().union(*(a.axes() for a in self.arguments)) if self.arguments else set()

    def symbols(self) -> set[Symbol]:
        return set().union(*(a.symbols() for a in self.arguments)) if self.arguments else set()


@dataclass(frozen=True, slots=True)
class Bound:
    """0 <= index < size."""

    index: Index
    size: Index

    def substitute(self, axes: Mapping[Axis, Index]) -> Bound:
        return Bound(self.index.substitute(axes), self.size.substitute(axes))

    @property
    def known(self) -> bool | None:
        """True or False where it always is, None where it depends on the axes."""
        low, high = self.index.bounds()
        if low is not None and low >= 0:
            if self.size.is_constant and high is not None and high < self.size.constant:
                return True
            axis = self.index.plain
            if axis is not None and axis.size == self.size:
                return True
            if self.size.is_constant and low >= self.size.constant:
                return False
        if high is not None and high < 0:
            return False
        return None

    def __str__(self) -> str:
        return f"0 <= {self.index} < {self.size}"


@dataclass(frozen=True, slots=True)
class Guard:
    """`inside` where every bound holds, else `outside`; each is read only where it is the answer."""

    bounds: tuple[Bound, ...]
    inside: Expression
    outside: Expression
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Expression:
        return guard(
            tuple(b.substitute(axes) for b in self.bounds),
            self.inside.substitute(axes),
            self.outside.substitute(axes),
        )

    def parts(self) -> tuple[Expression, ...]:
        gathered = tuple(a.value for b in self.bounds for a in b.index.loaded())
        return (self.inside, self.outside, *gathered)

    def __str__(self) -> str:
        test = " and ".join(str(b) for b in self.bounds)
        return f"where({test}, {self.inside}, {self.outside})"

    def axes(self) -> set[Axis]:
        found = self.inside.axes() | self.outside.axes()
        for bound in self.bounds:
            found |= bound.index.axes() | bound.size.axes()
        return found

    def symbols(self) -> set[Symbol]:
        found = self.inside.symbols() | self.outside.symbols()
        for bound in self.bounds:
            found |= bound.index.symbols() | bound.size.symbols()
        return found


Expression = Load | Constant | Position | Operation | Guard


def guard(bounds: tuple[Bound, ...], inside: Expression, outside: Expression) -> Expression:
    """A Guard, or the side that is always taken."""
    left = tuple(b for b in bounds if b.known is not True)
    if not left:
        return inside
    if any(b.known is False for b in left):
        return outside
    return Guard(left, inside, outside, inside.dtype)


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and all its parts, parents first."""
    stack: list[Expression] = [expression]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(top.parts())


def loads(expression: Expression) -> list[Load]:
    return [part for part in walk(expression) if isinstance(part, Load)]


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
