"""What the ways through a kernel's body share: names, values, masks, reductions, stores.

In: a `GpuSchedule`. Out: a `Writer`, whose `body` collects lines; `triton_kernel` drives it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fulgurite.fuser.codegen.triton.expressions import Body
from fulgurite.fuser.codegen.triton.source_lines import Loop
from fulgurite.fuser.codegen.triton.values import TO_FLOAT8, bare, constant, typed, value_tl
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Constant,
    Expression,
    Load,
    Operation,
    value_type,
    walk,
)
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.loop_nest import Local, Nest, Store
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.fuser.schedule.cpu.base import analyse, store_axes
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule, replaced_waits

# functions of triton_functions.py that combine two values of a reduction
COMBINING = {
    "sum": "added",
    "prod": "product",
    "max": "nan_max",
    "min": "nan_min",
    "logsumexp": "log_add_exp",
}


MERGED = ("base", "center", "count")  # what a part of squares about a mean has beside them


@dataclass(frozen=True)
class AlignedRow:
    """Names: elements of a row before its first multiple of eight bytes, its place, elements from there on."""

    index: Index  # where a point of a row is in memory
    before: str
    start: str
    inner: str


class Writer:
    """The text of one kernel being written."""

    def __init__(self, name: str, schedule: GpuSchedule, wide: bool) -> None:
        self.name = name
        self.schedule = schedule
        self.nest = without_last_casts(schedule.nest)
        self.wide = wide
        together = schedule.online | schedule.about
        self.facts = replaced_waits(self.nest, analyse(self.nest), together)
        self.over_grid = [x for x in self.nest.locals.values() if x.role in ("colsum", "scalar")]
        self.sums = [x for x in self.nest.locals.values() if x.role == "rowsum"]
        self.partial = self.sums if schedule.split else self.over_grid
        if not (schedule.split or schedule.programs):
            self.partial = []
        written = [s.tensor.name for s in self.main_stores()]
        self.writes = list(dict.fromkeys(written))
        self.reads = list(dict.fromkeys(self._read()))
        self.body = Body(self.nest, schedule.blocks, wide, {s.name for s in self._symbols()})
        for tensor in self.reads:
            self.body.names[tensor] = self.body.fresh(tensor)
        self.updates = [t for t in self.writes if t in self.reads]
        self.outputs = {
            t: self.body.names[t] if t in self.updates else self.body.fresh(f"{t}_out")
            for t in self.writes
        }
        self.parts = {x.name: self._part(x) for x in self.partial}
        for x in self.partial if schedule.split else ():
            for what in MERGED if x.name in schedule.about else ():
                part = replace(self.parts[x.name], name=f"{x.name}_{what}_parts")
                self.parts[f"{x.name}_{what}"] = part
        self.part_names = {n: self.body.fresh(t.name) for n, t in self.parts.items()}
        self.carried: dict[str, str] = {}  # of scans, from block to block
        self.accumulators: dict[str, str] = {}  # of sums over the grid, while rows are walked
        self.first = ""  # the test for a program's first row
        self.kept: dict[Load, str] = {}  # reads that registers keep from walk to walk: their blocks
        self.edges: dict[Load, str] = {}  # the same of a row's edges
        self.aligned: AlignedRow | None = None  # where blocks start at multiples of eight bytes
        self.part_start, self.part_end = "0", ""  # of the body, what this program walks

    def main_stores(self) -> list[Store]:
        """Stores of this kernel, not of the one that adds parts up."""
        return [s for s in self.nest.stores if not self.is_late(s)]

    def late_stores(self) -> list[Store]:
        return [s for s in self.nest.stores if self.is_late(s)]

    def is_late(self, store: Store) -> bool:
        """Does the kernel that adds parts up store it?"""
        if self.schedule.split:
            return not store_axes(self.nest, store)
        return self.facts.expression_after(store.value)

    def roots(self) -> list[Expression]:
        found = [s.value for s in self.main_stores()]
        about = self.schedule.about  # made in the walk of another sum
        return found + [x.expression for x in self.partial if x.name not in about]

    def wanted(self, roots: list[Expression]) -> set[str]:
        """Locals that are needed, those that make reductions too."""
        found: set[str] = set()
        stack = list(roots)
        while stack:
            for local in self.nest.references(stack.pop()):
                if local.name not in found:
                    found.add(local.name)
                    stack.append(local.expression)
        return found

    def _read(self) -> list[str]:
        found: list[str] = []
        wanted = self.wanted(self.roots())
        expressions = [self.nest.locals[n].expression for n in self.nest.locals if n in wanted]
        for expression in [*expressions, *self.roots()]:
            found += [t.name for t in _memory(self.nest, expression)]
        return found

    def _symbols(self) -> list[Symbol]:
        found: set[Symbol] = set()
        for axis in self.nest.axes:
            found |= axis.size.symbols()
        for local in self.nest.locals.values():
            found |= local.expression.symbols()
        for store in self.nest.stores:
            found |= store.index.symbols() | store.value.symbols()
        return sorted(found, key=lambda s: s.name)

    def _part(self, x: Local) -> Tensor:
        """Memory for a local's parts: one row a program or part."""
        rows = Index(self.schedule.programs or self.schedule.split)
        if self.schedule.split:
            sizes = (rows, indices.product([a.size for a in self.nest.grid]))
        else:
            sizes = (rows, self.nest.body[0].size if x.role == "colsum" else indices.ONE)
        return Tensor(f"{x.name}_parts", value_type(x.dtype), sizes, (sizes[1], indices.ONE))

    def count(self, axis: Axis) -> Index:
        """Programs along a loop."""
        block = self.schedule.sizes.get(axis)
        if axis not in self.schedule.blocks or block is None:
            return axis.size
        return indices.floordiv(axis.size + (block - 1), Index(block))

    def grid_size(self) -> tuple[Index, Index]:
        if self.schedule.programs:
            return Index(self.schedule.programs), indices.ONE
        total = indices.product([self.count(axis) for axis in self.nest.grid])
        return total, Index(self.schedule.split or 1)

    def block_axis(self, axis: Axis, text: str, block: int, filled: bool | None = None) -> None:
        """A loop as a dimension of the block, with its mask where it is not filled."""
        b = self.body
        if len(b.blocks) > 1:
            text = b.shaped(f"({text})" if "+" in text else text, axis)
        b.head(f"{axis.name} = {text}")
        loop = Loop(axis, block, b.depth)
        if filled is None:
            size = axis.size.constant if axis.size.is_constant else 0
            filled = size > 0 and size % block == 0
        if not filled:
            loop.mask = f"{axis.name}_in"
            b.head(f"{loop.mask} = {axis.name} < {b.index(axis.size)}")
        b.loops[axis] = loop

    def declare(self, local: Local) -> None:
        b = self.body
        level, axes = b.level(local.expression), b.axes(local.expression)
        text = bare(b.typed_expression(local.expression))
        name = text
        if not text.isidentifier():
            name = b.fresh(local.name)
            b.line(f"{name} = {text}", level)
        self.known(local, name, level, axes)

    def known(self, local: Local, name: str, level: int, axes: set[Axis]) -> None:
        self.body.names[local.name] = name
        self.body.level_of[local.name] = level
        self.body.axes_of[local.name] = axes

    def masked(self, text: str, start: str, axes: tuple[Axis, ...]) -> str:
        """The value where every loop is inside its size, else what changes no reduction."""
        tests = [self.body.loops[a].mask for a in axes if a in self.body.loops]
        masks = " & ".join(test for test in tests if test)
        return f"tl.where({masks}, {bare(text)}, {start})" if masks else text

    def value_of(self, x: Local, axes: tuple[Axis, ...]) -> str:
        """What a reduction adds at a point, its full block."""
        b = self.body
        text = b.typed_expression(x.expression)
        if value_type(x.dtype) == torch.bool:
            text = f"{text}.to(tl.int32)"
        text = self.masked(text, start_of(x), axes)
        return text

    def reduced(self, x: Local, text: str, axis: Axis) -> str:
        """The reduction of a block along one of its loops."""
        b = self.body
        place = b.blocks.index(axis)
        keep = ", keep_dims=True" if len(b.blocks) > 1 else ""
        dtype = value_type(x.dtype)
        text = bare(text)
        if x.reduction == "sum":
            return f"tl.sum({text}, {place}{keep})"
        if x.reduction == "prod" or dtype.is_floating_point:
            return f"tl.reduce({text}, {place}, {self.combining(x)}{keep})"
        result = f"tl.{x.reduction}({text}, {place}{keep})"
        if dtype == torch.bool:
            return f"{result} != 0"
        return result if dtype.itemsize >= 4 else f"{result}.to({value_tl(dtype)})"

    def range(self, start: str, end: str, step: int, ahead: int = 1) -> str:
        """The steps of a loop; `ahead` of its blocks are under way at once."""
        if self.wide and end.isdigit():  # past 2**31 it would be taken for a negative number
            end = f"tl.full([], {end}, tl.int64)"
        steps = f"{start}, {end}, {step}"
        return f"tl.range({steps}, num_stages={ahead})" if ahead > 1 else f"range({steps})"

    def scanned(self, x: Local, text: str, axis: Axis) -> str:
        """The scan of a block along one of its loops."""
        place = self.body.blocks.index(axis)
        if x.reduction == "sum":
            return f"tl.cumsum({bare(text)}, {place})"
        return f"tl.associative_scan({bare(text)}, {place}, {self.combining(x)})"

    def combining(self, x: Local) -> str:
        """The function that combines two values of a reduction."""
        assert x.reduction is not None, f"{x.name} reduces nothing"
        name = COMBINING[x.reduction]
        self.body.functions.add(name)
        return name

    def block_shape(self) -> str:
        return "[" + ", ".join(str(self.schedule.sizes[a]) for a in self.body.blocks) + "]"

    def store(self, store: Store) -> None:
        b = self.body
        axes = set(store.index.axes()) | set(self.nest.grid)
        value = b.expression(store.value)
        place = b.index(store.index)
        pointer = self.outputs[store.tensor.name]
        pointer = pointer if place == "0" else f"{pointer} + {place}"
        mask = b.mask_text(axes)
        options = f", mask={mask}" if mask else ""
        if store.tensor.dtype in TO_FLOAT8:
            if isinstance(store.value, Constant):
                value = typed(store.value.value, store.value.dtype)
            value = b.narrowed(value, store.value, store.tensor.dtype)
        b.line(f"tl.store({pointer}, {bare(value)}{options})")

    def forget_points(self) -> None:
        """Values at a point of the body are unknown from here on; what was read stays."""
        b, body = self.body, set(self.nest.body)
        for name in [n for n, axes in b.axes_of.items() if axes & body]:
            del b.names[name], b.level_of[name], b.axes_of[name]
        for level in b.levels:
            level.loads = {key: n for key, n in level.loads.items() if not key[0].axes() & body}

    def forget(self, depth: int) -> None:
        """Values of the loop that ends are unknown after it."""
        b = self.body
        for name in [n for n, level in b.level_of.items() if level >= depth]:
            del b.names[name], b.level_of[name], b.axes_of[name]


def without_last_casts(nest: Nest) -> Nest:
    """A float that is rounded and then stored in the same type is rounded by the store.

    What becomes an integer or a bool is not: a store makes 0.5 a False, and what does not fit anything.
    """

    def stripped(store: Store) -> Store:
        value = store.value
        if isinstance(value, Load) and not value.index:
            local = nest.locals[value.name]
            value = value if local.reduction else local.expression
        if isinstance(value, Operation) and value.name == "cast":
            (inner,) = value.arguments
            same = value.dtype == store.tensor.dtype and value.dtype in NARROW_FLOATS
            if same and value_type(inner.dtype) == torch.float32:
                return replace(store, value=inner)
        return store

    return replace(nest, stores=tuple(stripped(s) for s in nest.stores))


def _memory(nest: Nest, expression: Expression) -> list[Tensor]:
    return [nest.memory[p.name] for p in walk(expression) if isinstance(p, Load) and p.index]


def start_of(x: Local) -> str:
    """What a reduction begins with."""
    dtype = value_type(x.dtype)
    if x.reduction == "sum":
        return "0" if not dtype.is_floating_point else "0.0"
    if x.reduction == "prod":
        return "1" if not dtype.is_floating_point else "1.0"
    if dtype == torch.bool:
        return "0" if x.reduction == "max" else "1"
    if dtype.is_floating_point:
        return 'float("inf")' if x.reduction == "min" else 'float("-inf")'
    info = torch.iinfo(dtype)
    return constant(info.min if x.reduction == "max" else info.max, dtype)


def held_tl(x: Local) -> str:
    """The type of an accumulator."""
    return "tl.int32" if value_type(x.dtype) == torch.bool else value_tl(x.dtype)


def step_text(b: Body, x: Local, name: str, value: str) -> str:
    dtype = value_type(x.dtype)
    if x.reduction == "sum":
        return f"{name} += {bare(value)}"
    if x.reduction == "prod":
        return f"{name} *= {bare(value)}"
    if dtype.is_floating_point:
        b.functions.add(f"nan_{x.reduction}")
        return f"{name} = nan_{x.reduction}({name}, {bare(value)})"
    function = "tl.maximum" if x.reduction == "max" else "tl.minimum"
    return f"{name} = {function}({name}, {bare(value)})"
