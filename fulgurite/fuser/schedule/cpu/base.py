"""What a schedule is: a nest with its loops ordered, and the decisions a code generator spells.

A schedule module has `accepts(nest) -> str | None` (the reason where not), and
`schedule(nest, device) -> Schedule`; `schedules.py` asks them in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.ir.expression import Load, walk
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Local, Nest, Store


@dataclass(frozen=True)
class Schedule:
    """The loops of one kernel with every decision made."""

    kind: str  # pointwise, rows, columns or transpose
    nest: Nest  # loops ordered from the outside in, `vector` the last of its group
    vector: Axis | None  # the loop that becomes SIMD
    passes: int = 1  # times the body is walked
    block: int = 0  # columns and transpose: elements of the vector axis done together
    split: bool = False  # rows are few: the body is shared among threads, then combined
    kept: tuple[str, ...] = ()  # locals kept in a row buffer from one pass to the next
    inner_parallel: bool = False  # the vector loop itself is shared among threads
    packed: bool = False  # columns: what several passes read is kept in a buffer
    streamed: tuple[str, ...] = ()  # results that go past the caches
    fetches: int | None = None  # the pass in which the next row is fetched

    def __str__(self) -> str:
        loops = " ".join(f"{a.name}<{a.size}" for a in self.nest.grid) or "1"
        body = " ".join(f"{a.name}<{a.size}" for a in self.nest.body) or "1"
        text = f"{self.kind}: {loops} x {body}"
        if self.vector is not None:
            text += f", SIMD over {self.vector.name}"
        if self.passes > 1:
            text += f", {self.passes} passes"
        if self.block:
            text += f", blocks of {self.block}"
        if self.split:
            text += ", body split among threads"
        if self.kept:
            text += f", keeps {', '.join(self.kept)}"
        if self.packed:
            text += ", packed"
        if self.streamed:
            text += ", results past the caches"
        return text


@dataclass(frozen=True)
class Analysis:
    """When each local of a nest is known, and on which loops it depends."""

    nest: Nest
    waits: dict[str, int]  # passes over the body that must be done before
    inner: dict[str, bool]  # depends on a body loop
    after: dict[str, bool]  # known only when all grid points are done

    def expression_wait(self, expression) -> int:  # type: ignore[no-untyped-def]
        return max((self.waits[x.name] for x in self.nest.references(expression)), default=0)

    def expression_inner(self, expression) -> bool:  # type: ignore[no-untyped-def]
        body = set(self.nest.body)
        if expression.axes() & body:
            return True
        return any(self.inner[x.name] for x in self.nest.references(expression))

    def expression_after(self, expression) -> bool:  # type: ignore[no-untyped-def]
        return any(self.after[x.name] for x in self.nest.references(expression))


def analyse(nest: Nest) -> Analysis:
    waits: dict[str, int] = {}
    inner: dict[str, bool] = {}
    after: dict[str, bool] = {}
    found = Analysis(nest, waits, inner, after)
    for local in nest.locals.values():
        wait = found.expression_wait(local.expression)
        late = found.expression_after(local.expression)
        if local.role == "rowsum":
            waits[local.name], inner[local.name], after[local.name] = wait + 1, False, False
        elif local.role == "scan":
            waits[local.name], inner[local.name], after[local.name] = wait, True, late
        elif local.role == "colsum":
            waits[local.name], inner[local.name], after[local.name] = wait, True, True
        elif local.role == "scalar":
            waits[local.name], inner[local.name], after[local.name] = wait, False, True
        else:
            waits[local.name] = wait
            inner[local.name] = found.expression_inner(local.expression)
            after[local.name] = late
    return found


def store_axes(nest: Nest, store: Store) -> bool:
    """Does the store happen at every body point?"""
    return bool(store.index.axes() & set(nest.body))


def needed(nest: Nest, roots: list) -> list[Local]:  # type: ignore[type-arg]
    """The locals that expressions use, directly or not, in the order they can be computed.

    Reductions count as known: what they are made of is not looked into.
    """
    wanted: set[str] = set()
    stack = list(roots)
    while stack:
        expression = stack.pop()
        for part in walk(expression):
            if isinstance(part, Load) and not part.index and part.name not in wanted:
                wanted.add(part.name)
                local = nest.locals[part.name]
                if local.reduction is None:
                    stack.append(local.expression)
    return [local for name, local in nest.locals.items() if name in wanted]
