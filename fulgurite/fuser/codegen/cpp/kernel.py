"""What the C++ of every kernel shape shares: the function around the loops, locals, accumulators.

In: a `Schedule`. Out: lines of text, collected by `Writer`. `cpp_rows` and `cpp_columns` write the
loops themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fulgurite.fuser.codegen.cpp.expressions import Names, identifier, storage_type, value_ctype
from fulgurite.fuser.cost import number
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Expression
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.cpu.base import Analysis, Schedule, analyse, needed

GRAIN = 1 << 15  # points of a cheap kernel that are worth a thread: 20 µs of a copy
SUM_BLOCK = 4096  # addends summed in float before they go to a double
FORMULAS = 24  # lines of formula above a kernel, at most


class Writer:
    """Lines with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str) -> None:
        if line.startswith("}"):
            self.depth -= 1
        prefix = "" if line.startswith("#") else "  " * self.depth
        self.lines.append(prefix + line if line else "")
        if line.endswith("{"):
            self.depth += 1


@dataclass(frozen=True)
class Accumulator:
    """How a reduction is written."""

    ctype: str
    start: str
    clause: str  # of the OpenMP reduction
    step: str  # with {0} the accumulator and {1} the next value


def accumulator(local: Local) -> Accumulator:
    ctype = value_ctype(local.dtype)
    if local.dtype == torch.bool:
        if local.reduction in ("max", "sum"):
            return Accumulator("int32_t", "0", "|", "{0} |= {1}")
        return Accumulator("int32_t", "1", "&", "{0} &= {1}")
    if local.reduction == "sum":
        return Accumulator(ctype, "0", "+", "{0} += {1}")
    if local.reduction == "prod":
        return Accumulator(ctype, "1", "*", "{0} *= {1}")
    name, start = ("nan_max", "lowest") if local.reduction == "max" else ("nan_min", "highest")
    return Accumulator(ctype, f"{start}<{ctype}>()", name, f"{{0}} = {name}({{0}}, {{1}})")


def wide_sum(local: Local) -> bool:
    """Long sums of floats go through a double."""
    return local.reduction == "sum" and local.dtype.is_floating_point


@dataclass
class Kernel:
    """The text of one kernel being written."""

    name: str
    schedule: Schedule
    write: Writer = field(default_factory=Writer)
    arguments: list[str] = field(default_factory=list)  # tensors, then symbols, in order

    def __post_init__(self) -> None:
        self.nest = self.schedule.nest
        self.facts: Analysis = analyse(self.nest)
        written = [s.tensor.name for s in self.nest.stores]
        used = list(dict.fromkeys(t.name for t, _, _ in self.nest.accesses()))
        self.reads = [name for name in used if name not in written]
        self.writes = list(dict.fromkeys(written))
        read = {t.name for t, _, stores in self.nest.accesses() if not stores}
        self.updates = [name for name in self.writes if name in read]
        self.symbols = sorted(self._symbols(), key=lambda s: s.name)
        self.plain = Names(identifier)

    def _symbols(self) -> set[Symbol]:
        found: set[Symbol] = set()
        for axis in self.nest.axes:
            found |= axis.size.symbols()
        for local in self.nest.locals.values():
            found |= local.expression.symbols()
        for store in self.nest.stores:
            found |= store.index.symbols() | store.value.symbols()
        return found

    # the function around the loops

    def open(self) -> None:
        w = self.write
        for formula in self.nest.formulas[:FORMULAS]:
            w(f"// {formula}"[:160])
        w(f"// {self.schedule}")
        parameters = []
        for name in self.reads:
            ctype = storage_type(self.nest.memory[name].dtype)
            parameters.append(f"const {ctype}* __restrict {identifier(name)}")
        for name in self.writes:
            ctype = storage_type(self.nest.memory[name].dtype)
            parameters.append(f"{ctype}* __restrict {self.target(name)}")
        parameters += [f"int64_t {symbol.name}" for symbol in self.symbols]
        parameters += ["int64_t* bad", "int threads"]
        w(f"static void {self.name}({', '.join(parameters)}) {{")
        self.leave_when_empty()

    def leave_when_empty(self) -> None:
        """A lookup before the loops may have no place to look at where nothing is computed."""
        locals_ = self.nest.locals.values()
        looks_up = any(index.loaded() for _, index, _ in self.nest.accesses())
        points = static_size(self.nest.axes)
        if points or not looks_up or any(x.reduction is not None for x in locals_):
            return
        self.write(
            "return;" if points == 0 else f"if ({self.product(self.nest.axes)} == 0) return;"
        )

    def close(self) -> None:
        self.write("}")
        self.write("")

    # sizes

    def size(self, axis: Axis) -> str:
        return self.plain.index(axis.size)

    def product(self, axes: tuple[Axis, ...]) -> str:
        total = Index(1)
        for axis in axes:
            total = total * axis.size
        return self.plain.index(total)

    def parallel(self, axes: tuple[Axis, ...]) -> str | None:
        """The OpenMP clause that gives the work of these loops to threads, None where it is small."""
        flops = sum(local.flops for local in self.nest.locals.values())
        grain = max(GRAIN * 8 // (8 + flops), 256)
        total = Index(1)
        for axis in self.nest.axes:
            total = total * axis.size
        if total.is_constant and total.constant < 2 * grain:
            return None
        if not total.is_constant or total.constant < 64 * grain:
            work = self.plain.index(total)
            return f"num_threads(threads_for({work}, {grain}, threads))"
        return "num_threads(threads)"

    # values

    def declare(self, local: Local, names: Names) -> None:
        text = names.expression(local.expression)
        text = text[1:-1] if _wrapped(text) else text
        self.write(f"const {value_ctype(local.dtype)} {identifier(local.name)} = {text};")

    def target(self, name: str) -> str:
        """What a result is called; what is read and then written has one name."""
        return identifier(name) if name in self.updates else f"{identifier(name)}_out"

    def store(self, store: Store, names: Names) -> None:
        target = self.target(store.tensor.name)
        index = names.index(store.index)
        value = names.expression(store.value)
        if store.tensor.dtype in NARROW_FLOATS:
            self.write(f"store({target} + {index}, {value});")
        else:
            value = value[1:-1] if _wrapped(value) else value
            self.write(f"{target}[{index}] = {value};")

    def needed(self, roots: list[Expression]) -> list[Local]:
        return needed(self.nest, roots)

    def kept_before(self, roots: list[list[Expression]], step: int) -> set[str]:
        """Locals that an earlier pass left in a buffer; `roots` are what each pass computes."""
        earlier = (local.name for part in roots[:step] for local in self.needed(part))
        return {name for name in earlier if name in self.schedule.kept}

    def body_values(self, roots: list[list[Expression]], step: int) -> list[Local]:
        """Locals that a pass computes at each point, without those only a kept value needed."""
        kept = self.kept_before(roots, step)
        order = self.needed(roots[step])
        wanted: set[str] = set()
        for root in roots[step]:
            wanted.update(x.name for x in self.nest.references(root))
        for local in reversed(order):
            if local.name in wanted and local.name not in kept and local.reduction is None:
                wanted.update(x.name for x in self.nest.references(local.expression))
        inner = self.facts.inner
        return [x for x in order if x.name in wanted and x.reduction is None and inner[x.name]]

    def loop(self, axis: Axis, comment: str = "", start: str = "0", end: str | None = None) -> None:
        end = self.size(axis) if end is None else end
        note = f"  // {comment}" if comment else ""
        name = axis.name
        text = f"for (int64_t {name} = {start}; {name} < {end}; ++{name}) {{"
        self.write(text)
        if note:
            self.write.lines[-1] += note

    def pragma(self, text: str) -> None:
        self.write.lines.append("  " * self.write.depth + f"#pragma {text}")


def _wrapped(text: str) -> bool:
    """Is the whole text inside one pair of parentheses?"""
    if not (text.startswith("(") and text.endswith(")")):
        return False
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and k < len(text) - 1:
            return False
    return True


def static_size(axes: tuple[Axis, ...]) -> int | None:
    """The number of points where it is known."""
    total = 1
    for axis in axes:
        if not axis.size.is_constant:
            return None
        total *= number(axis.size)
    return total
